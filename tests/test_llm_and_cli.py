"""The offline API over a scripted engine, and the command line's flags."""

from __future__ import annotations

import itertools
import json

import pytest

from dspark_jax.cli import build_parser, engine_config, main
from dspark_jax.engine.llm import LLM
from dspark_jax.engine.request import FinishReason, RequestError
from dspark_jax.sampling_params import SamplingParams
from dspark_jax.testing.scripted import ScriptedEngine
from dspark_jax.text.byte_tokenizer import build_byte_tokenizer
from dspark_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(build_byte_tokenizer(512))


def llm(answer, group=3):
    """Answers every prompt with ``answer`` and the prompt's length, ``group`` tokens a step."""

    def script(request):
        tokens = [*TOKENIZER.encode(f"{answer} {len(request.prompt_token_ids)}"), TOKENIZER.eos_token_id]
        return list(itertools.batched(tokens, group))

    core = ScriptedEngine(script, vocab_size=512, eos_token_id=1)
    return LLM(core=core, tokenizer=TOKENIZER, progress=False)


def test_generate():
    outputs = llm("yes").generate(["a", [9, 9, 9]], SamplingParams(max_tokens=None), n=2)
    assert [[c.text for c in o.outputs] for o in outputs] == [["yes 1"] * 2, ["yes 3"] * 2]
    assert outputs[0].prompt == "a"
    assert outputs[1].prompt is None
    assert outputs[0].outputs[1].index == 1
    assert outputs[0].outputs[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("group", [1, 2, 5, 100])
def test_limits_do_not_depend_on_the_groups(group):
    model = llm("one two three", group)
    (output,) = model.generate("x", SamplingParams(max_tokens=100, stop=("wo t",)))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one t", "wo t")
    (output,) = model.generate("x", SamplingParams(max_tokens=4))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("one ", FinishReason.LENGTH)


def test_chat_tokenises_the_grammar():
    model = llm("ok")
    model.chat([{"role": "user", "content": "<think>"}])
    (request,) = model.core.requests
    # begin, user, 7 letters that spell a tag, assistant, end of thinking
    assert len(request.prompt_token_ids) == 2 + 7 + 2


def test_bad_prompts_and_arguments():
    with pytest.raises(RequestError, match="empty"):
        llm("x").generate("")
    with pytest.raises(ValueError, match="n must be at least 1"):
        llm("x").generate("a", n=0)
    with pytest.raises(ValueError, match="one for each of 2"):
        llm("x").generate(["a", "b"], [SamplingParams()])
    with pytest.raises(TypeError, match="ready core"):
        LLM("dir", core=llm("x").core, tokenizer=TOKENIZER)


def test_flags_reach_the_engine():
    flags = "serve --max-num-seqs 3 --num-speculative-tokens 0 --precision exact --dtype float32 --num-blocks 9"
    config = engine_config(build_parser().parse_args(flags.split()))
    assert (config.max_num_seqs, config.speculative.num_speculative_tokens, config.num_blocks) == (3, 0, 9)
    assert (config.precision, config.dtype) == ("exact", "float32")


def test_flags_of_shapes():
    flags = (
        "serve --max-num-seqs 8 --decode-buckets 2,4 --prefill-buckets 64,128 --decode-row-capacity 64 "
        "--page-style packed_blocks --no-prefix-caching --num-prefix-tails 3 --depth-schedule 2:5,4:2"
    )
    config = engine_config(build_parser().parse_args(flags.split()))
    assert (config.decode_buckets, config.prefill_buckets, config.decode_row_capacity) == ((2, 4), (64, 128), 64)
    assert (config.page_style, config.prefix_caching, config.num_prefix_tails) == ("packed_blocks", False, 3)
    assert config.speculative.depth_schedule == ((2, 5), (4, 2))


FLASH_64 = "plan --model flash --max-num-seqs 64 --max-num-batched-tokens 2048 --max-model-len 524288 --num-blocks 4096"


@pytest.mark.contract("VR-1", "VR-4")
@pytest.mark.parametrize(
    ("seqs", "k", "rows"), [(64, 5, 384), (64, 7, 512), (128, 5, 768)], ids=["64/5", "64/7", "128/5"]
)
def test_plan_of_flash(capsys, seqs, k, rows):
    """The table of the serving contracts' section 2.3, of one of two devices and with 2,048 selected entries."""
    flags = f"{FLASH_64} --num-speculative-tokens {k} --max-num-seqs {seqs} --heads 32 --index-topk 2048 --json"
    assert main(flags.split()) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["decode_row_capacity"] == plan["decode_regime_bound"] == plan["decode_buckets"][-1]["rows"] == rows
    got = {layer["name"]: layer["workspace_bytes"] / 2**20 for layer in plan["attention"]}
    causal = {"SWA causal": 64.502929688, "C4 causal": 273.315429688, "C128 causal": 530.315429688}
    assert {name: got[name] for name in causal} == pytest.approx(causal, abs=1e-6)
    if rows == 384:
        dspark = {"SWA DSpark": 96.627929688, "C4 DSpark": 482.127929688, "C128 DSpark": 867.627929688}
        assert {name: got[name] for name in dspark} == pytest.approx(dspark, abs=1e-6)
    assert plan["memory_bytes"]["total"] == sum(v for name, v in plan["memory_bytes"].items() if name != "total")


def test_plan_to_read(capsys):
    assert main(f"{FLASH_64} --num-speculative-tokens 5".split()) == 0
    text = capsys.readouterr().out
    assert "decode row capacity   384 rows" in text
    assert "64 x (1+5) = 384" in text
    assert main("plan --num-speculative-tokens 0".split()) == 0
    assert "undeclared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("plan --heads 0", "heads must be positive, got 0"),
        ("plan --model flash --max-num-seqs 64 --max-num-batched-tokens 384 --decode-row-capacity 256", "384 rows"),
        ("serve --depth-schedule 4", "invalid list of N:K pairs"),
        ("serve --decode-buckets four", "invalid list of integers"),
        ("serve --max-num-seqs 0", "max_num_seqs must be a positive integer"),
        ("serve --port 99999", "--port must be in"),
        ("serve --num-speculative-tokens -1", "num_speculative_tokens must be"),
        ("generate hello --thinking", "--thinking needs --chat"),
        ("generate hello --temperature -1", "temperature must be in"),
        ("generate hello --model /does/not/exist", "no config.json in checkpoint directory"),
        ("convert /does/not/exist never", "no config.json in checkpoint directory"),
    ],
)
def test_bad_flags_end_with_a_message(capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        main(flags.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
