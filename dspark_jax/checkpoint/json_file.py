"""Reading a checkpoint's JSON files, which are untrusted."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from dspark_jax.checkpoint.errors import CheckpointError

MAX_JSON_BYTES = 256 * 2**20


def read_json(path: pathlib.Path) -> Any:
    """The value of a JSON file. Raises ``CheckpointError`` naming a file that is too large, unreadable or not JSON."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes, more than the {MAX_JSON_BYTES} that are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}") from None
