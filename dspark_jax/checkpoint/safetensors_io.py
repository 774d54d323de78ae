"""Reading and writing of safetensors files. A file is untrusted: nothing in it is believed before it is checked.

Our own, because the ``safetensors`` package hands FP8 and E8M0 tensors to PyTorch only. It accepts what is written
here.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.errors import CheckpointError

# safetensors' own limit.
MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 16

# E8M0 and packed MXFP4 are bit patterns: uint8.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
# Wide dtypes come first in a file, so that every tensor is aligned.
_ORDER = {name: -rank for rank, name in enumerate(DTYPES)}


class Entry(NamedTuple):
    """A tensor of a file: dtype name, shape, and the bytes it has behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One file, mapped into memory: ``entries`` by name and ``metadata``.

    Raises ``CheckpointError`` naming the file and the first thing wrong with it. ``data`` views do not copy.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            size = os.path.getsize(self.path)
            with open(self.path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._check(size >= 8, f"has {size} bytes, fewer than the 8 of a header length")
                room = min(size - 8, MAX_HEADER_BYTES)
                self._check(length <= room, f"declares a header of {length} bytes, but at most {room} are possible")
                header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        self._start = 8 + length
        self.entries, self.metadata = self._parse(header, size - self._start)
        self._bytes = np.memmap(self.path, np.uint8, mode="r") if size else np.zeros(0, np.uint8)

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            raise CheckpointError(f"{self.path}: {message}")

    def _parse(self, header: bytes, data_bytes: int) -> tuple[dict[str, Entry], dict[str, str]]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            result = dict(pairs)
            if len(result) != len(pairs):
                names = [name for name, _ in pairs]
                repeated = next(name for name in names if names.count(name) > 1)
                raise CheckpointError(f"{self.path}: the header has {repeated!r} twice")
            return result

        try:
            raw = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
        except CheckpointError:
            raise
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: the header is not valid JSON: {str(error)[:200]}") from None
        self._check(isinstance(raw, dict), f"the header must be a JSON object, got {type(raw).__name__}")
        metadata = raw.pop("__metadata__", {})
        self._check(
            isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()),
            "__metadata__ must map strings to strings",
        )
        entries = {name: self._entry(name, value, data_bytes) for name, value in raw.items()}
        at = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            self._check(entry.begin >= at, f"tensor {name!r} at byte {entry.begin} overlaps the one before (to {at})")
            self._check(entry.begin == at, f"bytes {at} to {entry.begin} belong to no tensor")
            at = entry.end
        self._check(at == data_bytes, f"has {data_bytes} bytes of data, but its tensors take {at}")
        return entries, metadata

    def _entry(self, name: str, value: Any, data_bytes: int) -> Entry:
        keys = {"dtype", "shape", "data_offsets"}
        self._check(isinstance(value, dict) and set(value) == keys, f"tensor {name!r} must have {sorted(keys)}")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        self._check(isinstance(dtype, str) and dtype in DTYPES, f"tensor {name!r} has the unknown dtype {dtype!r}")
        for what, numbers in (("shape", shape), ("data_offsets", offsets)):
            ok = isinstance(numbers, list) and len(numbers) <= MAX_RANK
            ok = ok and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
            self._check(ok, f"tensor {name!r}: {what} must be a list of non-negative integers")
        self._check(len(offsets) == 2, f"tensor {name!r}: data_offsets must have two entries")
        begin, end = offsets
        self._check(
            begin <= end <= data_bytes,
            f"tensor {name!r} at bytes {begin} to {end} is outside of the {data_bytes} bytes of data (truncated file?)",
        )
        size = math.prod(shape) * DTYPES[dtype].itemsize
        self._check(
            size == end - begin, f"tensor {name!r} {dtype} {shape} needs {size} bytes, data_offsets give {end - begin}"
        )
        return Entry(dtype, tuple(shape), begin, end)

    def data(self, name: str) -> np.ndarray:
        """A read-only view of a tensor. E8M0 and I8 are uint8 codes. Raises ``KeyError`` for an unknown name."""
        entry = self.entries[name]
        raw = self._bytes[self._start + entry.begin : self._start + entry.end]
        dtype = DTYPES[entry.dtype]
        if (self._start + entry.begin) % dtype.itemsize:  # other writers need not align
            raw = raw.copy()
        return raw.view(dtype).reshape(entry.shape)


def write_safetensors(
    path: str | pathlib.Path, tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, str] | None = None
) -> int:
    """Writes ``name -> (dtype, array)`` and returns the bytes of data. The same tensors always give the same file.

    Raises ``ValueError`` for an array that is not of its dtype.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1][0]], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, array) in ordered:
        if array.dtype != DTYPES[dtype]:
            raise ValueError(f"{name}: expected {DTYPES[dtype]} for {dtype}, got {array.dtype}")
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, (_, array) in ordered:
            file.write(np.ascontiguousarray(array).tobytes())
    return at
