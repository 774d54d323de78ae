"""The offline API over a scripted engine, and the command line's flags."""

from __future__ import annotations

import itertools

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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
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
