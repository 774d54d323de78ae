"""From a checkpoint directory to parameters in their final dtype and sharding."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dspark_jax import telemetry
from dspark_jax.checkpoint import codecs, orbax_store
from dspark_jax.checkpoint.errors import CheckpointError
from dspark_jax.checkpoint.json_file import read_json
from dspark_jax.checkpoint.names import duplicate_specs, tensor_table
from dspark_jax.checkpoint.safetensors_io import SafetensorsFile
from dspark_jax.config import ModelConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_STACKED = re.compile(r"(.*\.ffn\.experts)\.(w[123])\.(weight|scale)")


class Checkpoint:
    """The files of a directory and an account of their tensors: each is expected, and each expected one is there.

    Raises one ``CheckpointError`` that lists everything missing, unexpected or of another shape or dtype.
    """

    def __init__(self, path: str | pathlib.Path, config: ModelConfig):
        self.path = pathlib.Path(path)
        problems: list[str] = []
        self._files: dict[str, SafetensorsFile] = {}
        where = self._locate(problems)
        self._where: dict[str, SafetensorsFile] = {name: self._files[file] for name, file in where.items()}
        expected = tensor_table(config)
        duplicates = duplicate_specs(config)
        for name, spec in (expected | duplicates).items():
            if name not in self._where:
                if name not in duplicates:
                    problems.append(f"{name} is missing: expected {spec.dtype} {list(spec.shape)}")
                continue
            entry = self._where[name].entries[name]
            if entry.dtype != spec.dtype:
                problems.append(f"{name} has dtype {entry.dtype}: expected {spec.dtype}")
            if entry.shape != spec.shape:
                problems.append(f"{name} has shape {list(entry.shape)}: expected {list(spec.shape)}")
        for name in sorted(set(self._where) - set(expected) - set(duplicates)):
            entry = self._where[name].entries[name]
            problems.append(f"{name} ({entry.dtype} {list(entry.shape)}) is unexpected")
        if problems:
            raise CheckpointError(f"checkpoint {self.path} does not fit its config.json", problems)
        self.names = frozenset(expected)

    def _locate(self, problems: list[str]) -> dict[str, str]:
        """File of each tensor, from the index or the single file. Structural problems are added to ``problems``."""
        index = self.path / INDEX_NAME
        if not index.is_file():
            if not (self.path / SINGLE_NAME).is_file():
                raise CheckpointError(f"{self.path} has neither {INDEX_NAME} nor {SINGLE_NAME}")
            self._files[SINGLE_NAME] = SafetensorsFile(self.path / SINGLE_NAME)
            return dict.fromkeys(self._files[SINGLE_NAME].entries, SINGLE_NAME)
        weight_map = _read_index(index)
        bad_files = set()
        for file in sorted(set(weight_map.values())):
            if pathlib.PurePath(file).name != file or not file.endswith(".safetensors") or "\\" in file:
                problems.append(f"{INDEX_NAME} names the file {file!r}: expected a plain name ending in .safetensors")
                bad_files.add(file)
                continue
            try:
                self._files[file] = SafetensorsFile(self.path / file)
            except CheckpointError as error:
                problems.append(str(error))
                bad_files.add(file)
        where = {}
        for name, file in weight_map.items():
            if file in bad_files:
                where.pop(name, None)
            elif name in self._files[file].entries:
                where[name] = file
            else:
                problems.append(f"{name} is in {file} by {INDEX_NAME}, but that file does not have it")
        for file, content in self._files.items():
            for name in content.entries:
                if weight_map.get(name) != file:
                    problems.append(f"{name} is in {file}, but {INDEX_NAME} says {weight_map.get(name, 'nothing')!r}")
        if bad_files:
            # The tensors of those files would all be listed as missing, which says nothing new.
            raise CheckpointError(f"checkpoint {self.path} cannot be read", problems)
        return where

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def array(self, name: str) -> np.ndarray:
        """A stored tensor as it is (E8M0 and MXFP4 as uint8), a view of its file."""
        return self._where[name].data(name)

    def dense(self, name: str) -> np.ndarray:
        """A stored tensor with its quantisation undone: float32 if it had one, otherwise as stored."""
        data = self.array(name)
        stem = name.removesuffix(".weight")
        if f"{stem}.scale" not in self or stem == name:
            return data
        scales = self.array(f"{stem}.scale")
        return (codecs.decode_mxfp4 if data.dtype == np.uint8 else codecs.decode_fp8)(data, scales)


def _read_index(path: pathlib.Path) -> dict[str, str]:
    raw = read_json(path)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path} must have a weight_map from tensor names to file names")
    return weight_map


def load_params(
    path: str | pathlib.Path,
    config: ModelConfig,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    *,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Parameters by dotted path, each in the shape, dtype and (if given) sharding of its target.

    ``targets`` uses DeepSeek's names, with the matrices of routed experts stacked (``...ffn.experts.w1.weight``). They
    decide what a quantised matrix becomes: kept as stored where a target of that dtype and its ``.scale`` exist,
    otherwise decoded to the target's floating-point dtype. One parameter at a time is held besides those finished; with
    a sharding, only the parts that this process needs are read. A directory that ``dspark-jax convert`` wrote is
    restored as it is.

    Raises ``CheckpointError`` listing every problem. Source: model specification, section 3.
    """
    shardings = shardings or {}
    if orbax_store.is_converted(path):
        return orbax_store.load_converted(path, targets, shardings)
    checkpoint = Checkpoint(path, config)
    readers: dict[str, Callable[[Any], np.ndarray]] = {}
    problems: list[str] = []
    used: set[str] = set()
    for name, target in targets.items():
        reader, sources = _reader(checkpoint, name, target, config)
        missing = [source for source in sources if source not in checkpoint]
        problems += [f"{name} needs {source}, which such checkpoints do not have" for source in missing[:1]]
        used.update(sources)
        readers[name] = reader
    problems += [f"{name} is not used by the model" for name in sorted(checkpoint.names - used)]
    if problems:
        raise CheckpointError(f"checkpoint {path} does not fit the model", problems)

    params = {}
    for name in telemetry.progress(readers, description="loading weights", total=len(readers), enabled=progress):
        target, read = targets[name], readers[name]
        sharding = shardings.get(name)
        if sharding is None:
            params[name] = jax.device_put(_checked(name, read((slice(None),) * len(target.shape)), target.shape))
        else:
            params[name] = jax.make_array_from_callback(target.shape, sharding, read)
        # The source is a view of a mapped file: nothing may be pending on it when its pages are dropped.
        params[name].block_until_ready()
    return params


def _checked(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise CheckpointError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    return array


def _reader(
    checkpoint: Checkpoint, name: str, target: jax.ShapeDtypeStruct, config: ModelConfig
) -> tuple[Callable[[tuple[slice, ...]], np.ndarray], list[str]]:
    """How to read any part of a parameter, and the stored tensors that it takes."""
    dtype = np.dtype(target.dtype)
    decode = name.endswith(".weight") and dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
    stacked = _STACKED.fullmatch(name)
    if stacked:
        stem, matrix, part = stacked.groups()
        names = [f"{stem}.{expert}.{matrix}.{part}" for expert in range(target.shape[0])]
    else:
        names = [name]
    sources = list(names)
    if decode:
        sources += [scale for scale in (_scale_of(n) for n in names) if scale in checkpoint]

    def one(source: str) -> np.ndarray:
        data = checkpoint.dense(source) if decode else checkpoint.array(source)
        if source.endswith(".tid2eid"):
            outside = (data < 0) | (data >= config.n_routed_experts)
            if outside.any():
                raise CheckpointError(
                    f"{source} must hold expert ids in [0, {config.n_routed_experts}), got {data[outside][0]}"
                )
        return data

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not stacked:
            return np.array(one(name)[index], dtype)
        chosen = names[index[0]]
        # Filled row by row: the experts of one matrix exist once, not as a list and as a stack.
        first = one(chosen[0])[index[1:]]
        out = np.empty((len(chosen), *first.shape), dtype)
        for row, source in enumerate(chosen):
            out[row] = one(source)[index[1:]]
        return out

    return read, sources


def _scale_of(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"
