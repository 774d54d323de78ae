"""A checkpoint's ``tokenizer.json`` (byte-level BPE), through the Hugging Face ``tokenizers`` library."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import tokenizers

from dspark_jax.text.special_tokens import BOS, EOS

MAX_FILE_BYTES = 128 * 2**20
"""Largest ``tokenizer.json`` that is read. V4's has 8 MB."""


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used, or text that it cannot encode."""


class Segment(NamedTuple):
    """A piece of a prompt. ``special`` text is one token of the prompt grammar; the rest came from people or tools."""

    text: str
    special: bool = False


class Tokenizer:
    """Text to token ids and back.

    Special tokens that stand in a text become their ids: V4's prompts are written that way (model specification,
    section 6.1). Nothing is added around the text. ``encode_segments`` is for prompts whose user text must not be
    able to write special tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        """Wraps a byte-level tokenizer. Raises ``TokenizerError`` if its decoder is of another kind."""
        if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
            kind = type(tokenizer.decoder).__name__
            raise TokenizerError(f"tokenizer.json: decoder must be ByteLevel (byte-level BPE, as V4's), got {kind}")
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise TokenizerError("tokenizer.json: the vocabulary is empty")
        self._bytes = [b""] * (max(vocab.values()) + 1)
        for text, token_id in vocab.items():
            self._bytes[token_id] = text.encode() if token_id in added else _bytes_of_base_token(text)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a ``tokenizer.json``. Raises ``TokenizerError`` naming the path if it is absent, too large or
        invalid."""
        path = Path(path)
        if not path.is_file():
            raise TokenizerError(f"no tokenizer at {path}: expected a Hugging Face tokenizer.json")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise TokenizerError(f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} bytes that are read")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise TokenizerError(f"{path} is not a valid tokenizer.json: {error}") from error
        return cls(tokenizer)

    @classmethod
    def from_dir(cls, checkpoint_dir: str | Path) -> Self:
        """Reads ``tokenizer.json`` of a checkpoint directory. Raises ``TokenizerError`` as ``from_file`` does."""
        return cls.from_file(Path(checkpoint_dir) / "tokenizer.json")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens in it become their ids. Raises ``TokenizerError`` for lone
        surrogates."""
        return _encode(self._tokenizer, text)

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Token ids of a rendered prompt in which only special segments may become special tokens.

        Plain text that spells a special token is encoded letter by letter, so a user cannot forge a turn. Equal to
        ``encode`` of the joined text when no plain segment spells one: added tokens are cut out before BPE runs, so no
        merge ever crosses a special segment. Raises ``TokenizerError`` if the vocabulary lacks a special segment's
        token.
        """
        ids: list[int] = []
        plain = ""
        for segment in segments:
            if not segment.special:
                plain += segment.text  # joined with its plain neighbours: BPE does merge across those
                continue
            token_id = self._added.get(segment.text)
            if token_id is None:
                raise TokenizerError(f"the tokenizer lacks {segment.text!r}, a token of V4's prompt grammar")
            ids += _encode(self._plain_tokenizer, plain)
            ids.append(token_id)
            plain = ""
        return ids + _encode(self._plain_tokenizer, plain)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids: their bytes joined and read as UTF-8, invalid bytes as U+FFFD."""
        kept = (i for i in ids if not (skip_special_tokens and i in self._special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: a base token's raw bytes, an added token's UTF-8.

        An id without a token (a model's vocabulary may be padded beyond the tokenizer's) gives no bytes. Raises
        ``ValueError`` for a negative id, which is always a padding value that leaked.
        """
        if token_id < 0:
            raise ValueError(f"token_id must be >= 0, got {token_id}")
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token_to_id(self, token: str) -> int | None:
        """Id of a token given as the vocabulary spells it, or None."""
        return self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out: those the file marks special.

        V4 marks the sentence tokens, padding and placeholders, but neither the role tokens, nor the think tags, nor
        ``｜DSML｜``; the output parsers need those.
        """
        return self._special_ids

    @property
    def bos_token_id(self) -> int | None:
        return self.token_to_id(BOS)

    @property
    def eos_token_id(self) -> int | None:
        return self.token_to_id(EOS)

    @functools.cached_property
    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its added tokens. Built when first needed: it is a second copy of the merges."""
        definition = json.loads(self._tokenizer.to_str())
        definition["added_tokens"] = []
        definition["post_processor"] = None  # it may name added tokens, and only matters for add_special_tokens
        return tokenizers.Tokenizer.from_str(json.dumps(definition))


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    if not text:
        return []
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"text is not valid Unicode: lone surrogate at character {error.start}") from None
    return tokenizer.encode(text, add_special_tokens=False).ids


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte-level alphabet inverted: 188 visible Latin-1 characters stand for themselves, the rest moved up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def byte_to_char() -> dict[int, str]:
    """The byte-level alphabet: the character that stands for each of the 256 bytes in a vocabulary."""
    return {byte: char for char, byte in _byte_of_char().items()}


def _bytes_of_base_token(text: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in text)
    except KeyError:  # not written in the alphabet; the library's decoder takes such a token as it stands
        return text.encode()
