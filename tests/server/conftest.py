"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from server_harness import VOCAB_SIZE, grouped

from dspark_jax.testing.scripted import ScriptedEngine
from dspark_jax.text.byte_tokenizer import build_byte_tokenizer
from dspark_jax.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_byte_tokenizer(VOCAB_SIZE))


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Callable[..., ScriptedEngine]:
    """Makes an engine that answers every request with ``text`` (or with a script), ``group`` tokens a step."""

    def make(text: str | None = None, *, group: int = 1, script: Any = None, **options: Any) -> ScriptedEngine:
        if text is not None:
            tokens = [*tokenizer.encode(text), tokenizer.eos_token_id]
            script = lambda _: grouped(tokens, group)  # noqa: E731
        return ScriptedEngine(script, vocab_size=VOCAB_SIZE, eos_token_id=tokenizer.eos_token_id, **options)

    return make
