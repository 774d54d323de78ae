"""Configuration: the released variants are read, and every bad field is named."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.checkpoint import tiny_config_json
from dspark_jax.config import ConfigError, EngineConfig, ModelConfig, SpeculativeConfig
from dspark_jax.engine.buckets import StepShapes, bucket_for, ladder

FLASH = [0, 0] + [4, 128] * 20 + [4]
PRO = [128, 128] + [4, 128] * 29 + [4]


@pytest.mark.parametrize(
    ("ratios", "draft", "length", "stages"),
    [(FLASH, "mtp", 44, 1), (FLASH, "dspark", 46, 3), (PRO, "mtp", 62, 1), (PRO, "dspark", 64, 3)],
)
def test_the_length_of_compress_ratios_gives_the_draft_stages(ratios, draft, length, stages):
    taps = {"dspark_target_layer_ids": [40, 41, 42]} if draft == "dspark" else {}
    raw = tiny_config_json(draft, num_hidden_layers=len(ratios), compress_ratios=ratios + [0] * stages, **taps)
    assert len(raw["compress_ratios"]) == length
    assert raw["num_nextn_predict_layers"] == 1
    config = ModelConfig.from_hf(raw)
    assert (config.num_draft_stages, config.draft_kind) == (stages, draft)
    assert config.compress_ratios == tuple(ratios)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "deepseek_v41", "'deepseek_v41' is not supported"),
        ("model_type", "deepseek_v3", "'deepseek_v3' is not supported"),
        ("architectures", ["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("hidden_size", -1, "hidden_size must be a positive integer"),
        ("hidden_size", "256", "hidden_size must be an integer"),
        ("vocab_size", True, "vocab_size must be an integer"),
        ("rope_theta", float("nan"), "rope_theta must be a number"),
        ("compress_ratios", [0, 4], "at least num_hidden_layers = 6"),
        ("compress_ratios", [0, 4, 128, 8, 128, 0], "may hold only"),
        ("compress_ratios", [0, 4, 128, 4, 128, 0, 4, 0, 0], "draft stages"),
        ("scoring_func", "softmax", "scoring_func must be 'sqrtsoftplus'"),
        ("num_experts_per_tok", 9, "at most n_routed_experts 8"),
        ("o_groups", 3, "multiple of o_groups 3"),
        ("expert_dtype", "int4", "expert_dtype must be"),
        ("quantization_config", {"quant_method": "awq"}, "quant_method must be 'fp8'"),
        ("dspark_target_layer_ids", [4, 3], "ascending layer indices"),
        ("dspark_noise_token_id", 512, "below vocab_size 512"),
        ("eos_token_id", 512, "eos_token_id must be below"),
    ],
)
def test_bad_model_fields_are_named(field, value, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny_config_json(**{field: value}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(tiny_config_json())), JSON)
def test_any_value_of_a_field_is_read_or_refused(field, value):
    with contextlib.suppress(ConfigError):
        ModelConfig.from_hf({**tiny_config_json(), field: value})


def test_directories(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config_json()))
    assert ModelConfig.from_dir(tmp_path).dspark_block_size == 5


@pytest.mark.parametrize(
    ("k", "draft", "resolved"),
    [(None, "none", 0), (None, "mtp", 1), (None, "dspark", 5), (3, "dspark", 3), (0, "dspark", 0), (0, "none", 0)],
)
def test_number_of_drafts(k, draft, resolved):
    assert SpeculativeConfig(k).resolve(ModelConfig.from_hf(tiny_config_json(draft))) == resolved


@pytest.mark.parametrize(("k", "draft"), [(1, "none"), (2, "mtp"), (33, "dspark")])
def test_too_many_drafts(k, draft):
    with pytest.raises(ConfigError, match="num_speculative_tokens must be"):
        SpeculativeConfig(k).resolve(ModelConfig.from_hf(tiny_config_json(draft)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"precision": "half"}, "precision must be"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"max_num_batched_tokens": 5}, r"hold one verification of 1 \+ 5 rows, got 5"),
        ({"max_model_len": 10_000}, "at most max_position_embeddings 8192"),
        ({"num_blocks": 3}, "num_blocks must hold one request"),
        ({"decode_row_capacity": 0}, "decode_row_capacity must be positive, got 0"),
        ({"decode_row_capacity": 1.5}, "decode_row_capacity must be an integer"),
        ({"decode_row_capacity": 47}, "decode_row_capacity 47 is smaller than the 48 rows that 8 requests"),
        ({"decode_buckets": (4, 9)}, "decode_buckets must hold integers from 1 to 8"),
        ({"prefill_buckets": (0,)}, "prefill_buckets must hold integers from 1 to 256"),
        ({"page_style": "striped"}, "page_style must be one of"),
        ({"num_prefix_tails": -1}, "num_prefix_tails must be a non-negative integer"),
        ({"speculative": SpeculativeConfig(5, depth_schedule=((4, 6),))}, "at most num_speculative_tokens 5, got 6"),
        (
            {"max_num_batched_tokens": 40, "speculative": SpeculativeConfig(5, depth_schedule=((8, 5),))},
            r"depth_schedule asks for 8 requests of 1 \+ 5 rows, .* max_num_batched_tokens 40",
        ),
    ],
)
def test_bad_engine_fields_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        StepShapes.create(ModelConfig.from_hf(tiny_config_json()), EngineConfig(**fields))


@pytest.mark.parametrize("pairs", [(), ((4,),), ((4, 2), (2, 1)), ((0, 1),), ((4, -1),), ((4, 2.0),)])
def test_bad_schedules(pairs):
    with pytest.raises(ConfigError, match="depth_schedule must hold pairs"):
        SpeculativeConfig(5, depth_schedule=pairs)


def test_buckets_of_an_engine():
    """The ladder ends at the capacity; a budget below it bounds the requests of a step; buckets can be named."""
    model = ModelConfig.from_hf(tiny_config_json())

    def shapes(**options):
        made = StepShapes.create(model, EngineConfig(max_model_len=512, **options))
        return made.capacity, [shape.rows for shape in made.decode], made.prefill

    assert shapes(max_num_seqs=64, max_num_batched_tokens=2048) == (
        384,
        [6, 12, 24, 48, 96, 192, 384],
        (64, 256, 1024, 2048),
    )
    assert shapes(max_num_seqs=43, max_num_batched_tokens=512)[:2] == (258, [6, 12, 24, 48, 96, 192, 258])
    # 300 rows hold 50 requests of 6: the others take turns.
    assert shapes(max_num_seqs=64, max_num_batched_tokens=300)[:2] == (300, [6, 12, 24, 48, 96, 192, 300])
    assert shapes(max_num_seqs=64, max_num_batched_tokens=384, decode_buckets=(8,), prefill_buckets=(64,)) == (
        384,
        [48, 384],
        (64, 384),
    )
    plain = shapes(max_num_seqs=4, speculative=SpeculativeConfig(0))
    assert plain == (None, [1, 2, 4], (64, 256))


def test_buckets():
    assert ladder(6) == (1, 2, 4, 6)
    assert ladder(1) == (1,)
    assert [bucket_for(n, (1, 2, 4, 6), "requests") for n in (1, 3, 6)] == [1, 4, 6]
    with pytest.raises(ValueError, match="requests 7 exceed the largest compiled bucket 6"):
        bucket_for(7, (1, 2, 4, 6), "requests")
