"""The golden models, written in the checkpoint format and read back: what users' weights go through."""

from __future__ import annotations

import golden_rule
import numpy as np
import pytest

from dspark_jax.checkpoint import build_checkpoint
from dspark_jax.config import ModelConfig
from dspark_jax.engine.build import load_model
from dspark_jax.models import Policy


@pytest.fixture(scope="session")
def golden_model(golden, tmp_path_factory):
    """``golden_model(name, precision, dtype)`` gives a model; ``name`` is that of the npz file."""
    models = {}

    def build(name, precision, dtype):
        if (name, precision, dtype) not in models:
            raw = golden_rule.config(golden, name)
            path = golden / name
            if name != "tiny_checkpoint":
                path = build_checkpoint(tmp_path_factory.mktemp(name), raw, law=golden_rule.law(raw))
            config = ModelConfig.from_dir(path)
            model = load_model(path, config, Policy.create(config, precision, dtype), progress=False)
            models[name, precision, dtype] = model
        return models[name, precision, dtype]

    return build


@pytest.fixture(scope="session")
def golden_data(golden):
    def load(name):
        with np.load(golden / f"{name}.npz") as data:
            return dict(data)

    return load
