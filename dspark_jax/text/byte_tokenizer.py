"""A small real ``tokenizer.json`` for tiny checkpoints: one token per byte, and V4's special tokens."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dspark_jax.text import special_tokens as st
from dspark_jax.text.tokenizer import byte_to_char

_SPECIAL_TOKENS = (
    st.BOS, st.EOS, st.PAD, st.USER, st.ASSISTANT, st.THINK, st.END_THINK, st.NOISE, st.DSML, st.LATEST_REMINDER,
    *st.TASK_TOKENS.values(), st.EXTRACTED_URL, st.IMAGE,
)  # fmt: skip
BYTE_TOKENIZER_IDS = {token: token_id for token_id, token in enumerate(_SPECIAL_TOKENS)}
"""Ids of the special tokens: begin 0, end 1, padding 2, ..., the drafter's noise token 7."""

FIRST_BYTE_ID = len(_SPECIAL_TOKENS)
"""Byte ``b`` is token ``FIRST_BYTE_ID + b``."""

MIN_VOCAB_SIZE = FIRST_BYTE_ID + 256

# As V4's own file: these are left out of decoded text on request, the others are not.
_MARKED_SPECIAL = {st.BOS, st.EOS, st.PAD, st.NOISE, st.IMAGE}


def build_byte_tokenizer(vocab_size: int = 512) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with exactly the ids 0 to ``vocab_size`` - 1; any text survives encode and decode.

    Special tokens come first (``BYTE_TOKENIZER_IDS``), then the 256 bytes, then fillers: tokens that encoding never
    makes but a model with random weights may emit, each decoding to its own short ASCII name. The same ``vocab_size``
    always gives the same file. Raises ``ValueError`` if ``vocab_size`` is below ``MIN_VOCAB_SIZE``.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be at least {MIN_VOCAB_SIZE} ({FIRST_BYTE_ID} special tokens and 256 bytes), "
            f"got {vocab_size}"
        )
    chars = byte_to_char()
    vocab = dict(BYTE_TOKENIZER_IDS)
    vocab |= {chars[byte]: FIRST_BYTE_ID + byte for byte in range(256)}
    vocab |= {f"<{token_id}>": token_id for token_id in range(MIN_VOCAB_SIZE, vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in _SPECIAL_TOKENS:
        tokenizer.add_tokens([AddedToken(token, special=token in _MARKED_SPECIAL, normalized=False)])
    return tokenizer


def write_byte_tokenizer(directory: str | Path, vocab_size: int = 512) -> Path:
    """Writes ``tokenizer.json`` of ``build_byte_tokenizer`` into an existing directory and returns its path."""
    path = Path(directory) / "tokenizer.json"
    path.write_text(build_byte_tokenizer(vocab_size).to_str(pretty=True) + "\n", encoding="utf-8")
    return path
