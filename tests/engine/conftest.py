"""Tiny models in the real format and engines over them. Engines are built once per worker: compiling is what takes
time."""

from __future__ import annotations

import pytest
from small_models import small_config

from dspark_jax.checkpoint import build_checkpoint
from dspark_jax.config import EngineConfig, ModelConfig, SpeculativeConfig
from dspark_jax.engine.build import load_model
from dspark_jax.engine.engine import LLMEngine
from dspark_jax.models import Policy


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
            # One verification shape unless asked: each further one is seconds of compiling.
            options.setdefault("decode_buckets", (options["max_num_seqs"],))
            config = EngineConfig(precision=precision, dtype=dtype, speculative=SpeculativeConfig(k), **options)
            made[key] = LLMEngine(models(draft, precision, dtype), config, progress=False)
        engine = made[key]
        assert not engine.has_work(), "an earlier test left requests behind"
        return engine

    return get
