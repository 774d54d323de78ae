"""A store of converted parameters (orbax): stacked, decoded and in their final dtype, ready to be restored."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dspark_jax.checkpoint.errors import CheckpointError
from dspark_jax.checkpoint.json_file import read_json

MANIFEST_NAME = "dspark_jax.json"
FORMAT_VERSION = 1
# What a server needs besides the parameters.
_COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "encoding")


def is_converted(path: str | pathlib.Path) -> bool:
    """Whether a directory is such a store."""
    return (pathlib.Path(path) / MANIFEST_NAME).is_file()


def save_converted(
    path: str | pathlib.Path, source: str | pathlib.Path, params: Mapping[str, jax.Array], *, precision: str, dtype: str
) -> pathlib.Path:
    """Writes ``params`` (by dotted path) and copies the configuration and text files of ``source``.

    Raises ``CheckpointError`` if ``path`` exists and is not empty.
    """
    path, source = pathlib.Path(path).absolute(), pathlib.Path(source)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not an empty directory")
    path.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, path / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, path / name)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "params", dict(params))
    manifest = {
        "format_version": FORMAT_VERSION,
        "precision": precision,
        "dtype": dtype,
        "parameters": {name: [str(x.dtype), list(x.shape)] for name, x in sorted(params.items())},
    }
    # Last: a store without a manifest is an interrupted conversion.
    (path / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return path


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
    file = path / MANIFEST_NAME
    manifest = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        got = manifest.get("format_version") if isinstance(manifest, dict) else manifest
        raise CheckpointError(f"{file}: format_version must be {FORMAT_VERSION}, got {got!r}")
    if not isinstance(manifest.get("parameters"), dict):
        raise CheckpointError(f"{file} must list its parameters")
    return manifest


def load_converted(
    path: str | pathlib.Path,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    shardings: Mapping[str, jax.sharding.Sharding],
) -> dict[str, jax.Array]:
    """Restores parameters straight into their shardings.

    Raises ``CheckpointError`` listing every parameter that the store lacks, has too many or has in another shape or
    dtype, with the precision it was converted for.
    """
    path = pathlib.Path(path).absolute()
    manifest = _read_manifest(path)
    stored = manifest["parameters"]
    problems = []
    for name, target in targets.items():
        want = [str(np.dtype(target.dtype)), list(target.shape)]
        if stored.get(name) != want:
            problems.append(f"{name} is {stored.get(name, 'missing')}: expected {want}")
    problems += [f"{name} is not used by the model" for name in sorted(set(stored) - set(targets))]
    if problems:
        raise CheckpointError(
            f"{path} was converted for precision {manifest.get('precision')!r}, dtype {manifest.get('dtype')!r} and "
            f"does not fit what is asked for",
            problems,
        )
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=shardings.get(name, default))
        for name, target in targets.items()
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path / "params", abstract)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / 'params'} cannot be restored: {str(error)[:300]}") from error
