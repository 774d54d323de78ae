"""What ``python -m pallas_kernels.bench compressed_mla`` measures."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compressed_mla, kv_pages
from pallas_kernels._bench import BYTES_PER_US, FLOPS_PER_US, Case, rotations
from pallas_kernels.compressed_mla.shapes import SHAPES, MLAShape
from pallas_kernels.pages import RECORD_BYTES, PageLayout

IMPLEMENTATIONS = ("mosaic", "reference")
WIDTH = 512
# Tokens of a cache: far more than the L2 cache or the reach of a TLB holds.
_WINDOW_TOKENS, _INDEXED_TOKENS = 1 << 20, 1 << 22


@functools.cache
def _cache(page_size: int, tokens: int) -> tuple[jax.Array, PageLayout]:
    layout = PageLayout.padded(page_size, -(-tokens // page_size))

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(cache: jax.Array, first: jax.Array) -> jax.Array:
        x = jax.random.normal(jax.random.fold_in(jax.random.key(page_size), first), (step, WIDTH), jnp.bfloat16)
        slots = first + jnp.arange(step, dtype=jnp.int32)
        return kv_pages.write(cache, layout, jnp.where(slots < layout.num_slots, slots, -1), x, quantize=True)

    step, cache = 1 << 18, layout.zeros()
    for first in range(0, layout.num_slots, step):
        cache = fill(cache, jnp.int32(first))
    return cache, layout


def _runs(key: jax.Array, rows: int, share: int, width: int, tokens: int) -> jax.Array:
    """Consecutive slots; the rows of a group start one behind the other."""
    span = -(-(width + share - 1) // 8) * 8
    start = jax.random.permutation(key, tokens // span)[: rows // share] * span
    start = start[:, None] + jnp.arange(share)
    return (start.reshape(rows, 1) + jnp.arange(width)).astype(jnp.int32)


def _scattered(key: jax.Array, rows: int, share: int, width: int, tokens: int) -> jax.Array:
    """Slots anywhere; the rows of a group draw theirs from a pool of nine eighths of the width."""
    if share == 1:
        return jax.random.permutation(key, tokens)[: rows * width].reshape(rows, width).astype(jnp.int32)
    pool = width + width // 8
    first, second = jax.random.split(key)
    slots = jax.random.permutation(first, tokens)[: rows // share * pool].reshape(-1, 1, pool)
    order = jnp.argsort(jax.random.uniform(second, (rows // share, share, pool)))[..., :width]
    return jnp.take_along_axis(slots, order, axis=-1).reshape(rows, width).astype(jnp.int32)


def _lists(shape: MLAShape, seed: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    window = _runs(keys[0], shape.rows, shape.share, shape.window, _WINDOW_TOKENS)
    if not shape.consecutive:
        return window, _scattered(keys[1], shape.rows, shape.share, shape.indexed, _INDEXED_TOKENS)
    start = jax.random.permutation(keys[1], _INDEXED_TOKENS // shape.indexed)[: shape.rows // shape.share]
    start = jnp.repeat(start * shape.indexed, shape.share)
    return window, (start[:, None] + jnp.arange(shape.indexed)).astype(jnp.int32)


def floor_us(shape: MLAShape, unique_keys: int) -> float:
    """The larger of the bytes that must move and the products that must be computed, both at the device's rates."""
    keys = shape.window + shape.indexed
    moved = unique_keys * RECORD_BYTES + 2 * shape.rows * shape.heads * WIDTH * 2 + shape.rows * keys * 4
    return max(moved / BYTES_PER_US, 2 * shape.rows * shape.heads * keys * 2 * WIDTH / FLOPS_PER_US)


def cases(names: list[str]) -> Iterator[Case]:
    for name in names or SHAPES:
        yield _case(name, SHAPES[name])


def _case(name: str, shape: MLAShape) -> Case:
    caches: Any = [_cache(64, _WINDOW_TOKENS)]
    if shape.indexed:
        caches.append(_cache(shape.indexed_page, _INDEXED_TOKENS))
    layouts = [layout for _, layout in caches]
    sink = jax.random.normal(jax.random.key(1), (shape.heads,))
    keys = shape.window + shape.indexed
    sets = []
    for seed in range(rotations(shape.rows * (keys * RECORD_BYTES // shape.share + 4 * shape.heads * WIDTH))):
        q = jax.random.normal(jax.random.key(seed), (shape.rows, shape.heads, WIDTH), jnp.bfloat16)
        sets.append((q, *_lists(shape, seed)))
    unique = sum(len(jnp.unique(x)) for x in sets[0][1:])

    def function(implementation: str, **options: Any) -> Any:
        attend = compressed_mla.IMPLEMENTATIONS[implementation]
        lengths = [jnp.full(shape.rows, width, jnp.int32) for width in (shape.window, shape.indexed)]

        @jax.jit
        def call(arrays: Any, q: jax.Array, *slots: jax.Array) -> jax.Array:
            groups = list(zip(arrays, layouts, slots, lengths, strict=False))
            return attend(q, groups, sink, WIDTH**-0.5, **options)[0]

        arrays = [cache for cache, _ in caches]
        return lambda s: call(arrays, *s)

    return Case(
        name=name,
        sets=sets,
        function=function,
        floor_us=floor_us(shape, unique),
        # bfloat16 weights and outputs: 2**-9 each, relative to the whole.
        tolerance=6e-3,
        peer=_peer_key(shape),
        note=f"{2 * shape.rows * shape.heads * keys * 2 * WIDTH / 1e12:.4f} TFLOP",
    )


def _peer_key(shape: MLAShape) -> dict[str, Any]:
    """How the peer's own benchmark names the shape."""
    case = {0: "swa", 512: "flash", 1024: "pro"}.get(shape.indexed, f"hca{shape.indexed}")
    return {"case": case, "rows": shape.rows, "h": shape.heads, "sq": "1" if shape.share == 1 else f"{shape.share}s"}


def sweep(case: Case) -> Iterator[dict[str, Any]]:
    """Options of the Mosaic kernel to try."""
    shape = SHAPES[case.name]
    chunks = sum(math.ceil(x / 128) for x in (shape.window, shape.indexed))
    items = shape.rows * math.ceil(shape.heads / 64)
    for regs in ((192, 64), (200, 56), (184, 72)):
        for ahead in (1, 2):
            for split in (False, True) if chunks > 1 and items <= 132 else (False,):
                yield {"regs": regs, "ahead": ahead, "split": split}
