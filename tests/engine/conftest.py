"""Tiny models in the real format and engines over them. Engines are built once per worker: compiling is what takes
time."""

from __future__ import annotations

import pytest

from dspark_jax.checkpoint import build_checkpoint, tiny_config_json
from dspark_jax.config import EngineConfig, ModelConfig, SpeculativeConfig
from dspark_jax.engine.build import load_model
from dspark_jax.engine.engine import LLMEngine
from dspark_jax.models import Policy

# The tiny configuration made smaller still: every kind of layer once.
SMALL = {
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "vocab_size": 320,
    "sliding_window": 32,
    "index_topk": 8,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_block_size": 3,
}


def small_config(draft="dspark", **overrides):
    fields = {**SMALL, **overrides}
    if draft != "dspark":
        fields = {name: value for name, value in fields.items() if not name.startswith("dspark_")}
    stages = {"dspark": 3, "mtp": 1, "none": 0}[draft]
    return tiny_config_json(draft, compress_ratios=[0, 4, 128, 4] + [0] * stages, **fields)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """``models(draft, precision, dtype)``: a small random model that went through checkpoint files."""
    made = {}

    def get(draft="dspark", precision="checkpoint", dtype="bfloat16"):
        key = draft, precision, dtype
        if key not in made:
            path = build_checkpoint(tmp_path_factory.mktemp("model"), small_config(draft), seed=1)
            config = ModelConfig.from_dir(path)
            made[key] = load_model(path, config, Policy.create(config, precision, dtype), progress=False)
        return made[key]

    return get


@pytest.fixture(scope="session")
def engines(models):
    """``engines(num_speculative_tokens, ...)``: a warmed-up engine, shared by tests that leave it idle."""
    made = {}

    def get(
        k=None, *, draft="dspark", precision="checkpoint", dtype="bfloat16", draft_sampling="probabilistic", **sizes
    ):
        key = k, draft, precision, dtype, draft_sampling, tuple(sorted(sizes.items()))
        if key not in made:
            options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, **sizes}
            config = EngineConfig(precision=precision, dtype=dtype, speculative=SpeculativeConfig(k), **options)
            made[key] = LLMEngine(models(draft, precision, dtype), config, progress=False)
        engine = made[key]
        assert not engine.has_work(), "an earlier test left requests behind"
        return engine

    return get
