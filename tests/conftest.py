"""Shared fixtures. Warnings are errors; every exception to that has its reason beside it in pyproject.toml."""

from __future__ import annotations

import os
import pathlib
import zlib

# Before JAX is imported: tests run on the CPU (unless a GPU run asks otherwise) and two workers share two cores.
if "DSPARK_TEST_GPU" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers whose seed is the test's own name: stable under reordering and selection."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Directory of golden data."""
    return GOLDEN
