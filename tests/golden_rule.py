"""The rule that gives every tensor of the golden models from its name (the same for all of them)."""

from __future__ import annotations

import json
import pathlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

_FP8 = re.compile(r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|shared_experts\.w[123]|main_proj)\.weight$")
_FP4 = re.compile(r"\.experts\.\d+\.w[123]\.weight$")


def tensor(name: str, shape: tuple[int, ...], num_experts: int) -> np.ndarray:
    """float32 value of a tensor (int64 for ``tid2eid``): PCG64 seeded by the CRC of its name, scaled by its kind."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if name.endswith("tid2eid"):
        return np.stack([rng.permutation(num_experts)[: shape[1]] for _ in range(shape[0])]).astype(np.int64)
    x = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name.split(".")[-2:][0] or name.endswith("_scale"):
        return 1 + 0.1 * x
    if name.endswith(("_base", "attn_sink", "gate.bias", "ape")):
        return 0.5 * x
    if name.endswith(("embed.weight", "markov_w1.weight")):
        return x
    return x / np.sqrt(shape[-1]).astype(np.float32)


def law(config: dict[str, Any]) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """``tensor`` with the spread of scales that quantised models have: matrices are multiplied by 1/2, 1 or 2 by
    block."""
    quantised = "quantization_config" in config

    def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = tensor(name, shape, config["n_routed_experts"])
        if quantised and _FP4.search(name):
            rows, groups = np.arange(shape[0])[:, None], np.arange(shape[1] // 32)
            x = x * np.repeat(2.0 ** ((rows + 3 * groups) % 3 - 1), 32, axis=1)
        elif quantised and _FP8.search(name):
            a, b = np.arange(-(-shape[0] // 128))[:, None], np.arange(-(-shape[1] // 128))
            spread = 2.0 ** ((3 * a + 5 * b) % 3 - 1)
            x = x * np.repeat(np.repeat(spread, 128, axis=0)[: shape[0]], 128, axis=1)[:, : shape[1]]
        return x.astype(np.float32) if x.dtype != np.int64 else x

    return value


def config(golden: pathlib.Path, name: str) -> dict[str, Any]:
    path = golden / "tiny_checkpoint" / "config.json" if name == "tiny_checkpoint" else golden / f"{name}_config.json"
    return json.loads(path.read_text())
