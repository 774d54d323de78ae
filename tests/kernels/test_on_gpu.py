"""What only a GPU can show: caches beyond 2 GiB, and compiled kernels that run again after others.

``DSPARK_TEST_GPU=1 pytest -m gpu tests/kernels`` on a machine with one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compressed_mla, kv_pages
from pallas_kernels.pages import PageLayout

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = ["mosaic", "reference"]
HEADS, WIDTH, LIVE = 64, 384, 32


@pytest.mark.contract("KV-6")
@pytest.mark.parametrize(("stride", "num_pages"), [(37_440, 57_600), (37_376, 57_600), (1_039_680, 2_100)])
def test_pages_beyond_2_gib(rng, stride, num_pages):
    """Slots in the first page, around byte 2**31 and in the last page: what is written there is read back as from a
    small cache, and no other byte changes."""
    straddling = (2**31 - 1) // stride  # the page that holds byte 2**31 - 1 or begins right behind it
    pages = [0, straddling - 1, straddling, straddling + 1, num_pages - 1]
    large, small = PageLayout(64, stride, num_pages), PageLayout(64, stride, len(pages))
    assert large.num_pages * large.page_stride > 2**31
    offsets = np.array([0, 17, 63], np.int32)
    values = jnp.asarray(0.05 * rng.standard_normal((len(pages) * 3, 512)), jnp.bfloat16)
    write = jax.jit(functools.partial(kv_pages.write, quantize=True), static_argnums=1, donate_argnums=0)
    gather = jax.jit(kv_pages.gather, static_argnums=1)
    results, words = [], []
    for layout, numbers in ((small, range(len(pages))), (large, pages)):
        slots = jnp.asarray(np.concatenate([page * 64 + offsets for page in numbers]), jnp.int32)
        cache = write(layout.zeros(), layout, slots, values)
        results.append(np.asarray(gather(cache, layout, slots), np.float32))
        words.append(np.asarray(jnp.take(cache, jnp.asarray(list(numbers)), axis=0)))
        assert int(jnp.sum(jnp.any(cache != 0, axis=1))) == len(pages), "a page was written that nobody named"
        del cache
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(words[1], words[0])
    np.testing.assert_allclose(results[0], np.asarray(values, np.float32), atol=0.01, rtol=0.12)


class Verification:
    """``rows`` queries over a window and an indexed list, 384 slots wide together, of which 32 are live."""

    def __init__(self, rng, rows, scale):
        self.layouts = PageLayout.padded(64, 8), PageLayout.padded(64, 40)
        self.caches, self.keys, self.slots = [], [], []
        for layout, width in zip(self.layouts, (128, WIDTH - 128), strict=True):
            x = jnp.asarray(1.25 * scale * rng.standard_normal((layout.num_slots, 512)), jnp.bfloat16)
            every = jnp.arange(layout.num_slots)
            cache = kv_pages.write(layout.zeros(), layout, every, x, quantize=True)
            self.caches.append(cache)
            self.keys.append(np.asarray(kv_pages.gather(cache, layout, every), np.float64))
            slots = np.full((rows, width), -1, np.int32)
            for row in slots:
                row[: LIVE // 2] = rng.permutation(layout.num_slots)[: LIVE // 2]
            self.slots.append(slots)
        self.q = jnp.asarray(scale * rng.standard_normal((rows, HEADS, 512)), jnp.bfloat16)
        self.sink = np.linspace(-0.1, 0.1, HEADS, dtype=np.float32)
        self.sm_scale = 512**-0.5

    def compiled(self, implementation):
        def attend(q, window, indexed, sink, window_slots, indexed_slots):
            # Lengths count the dead entries too: -1 masks each.
            lengths = [jnp.full(q.shape[0], slots.shape[1], jnp.int32) for slots in (window_slots, indexed_slots)]
            return compressed_mla.attend(
                q,
                window,
                self.layouts[0],
                window_slots,
                lengths[0],
                indexed_cache=indexed,
                indexed_layout=self.layouts[1],
                indexed_slots=indexed_slots,
                indexed_lengths=lengths[1],
                attn_sink=sink,
                sm_scale=self.sm_scale,
                return_lse=True,
                implementation=implementation,
            )

        arguments = (self.q, *self.caches, jnp.asarray(self.sink), *map(jnp.asarray, self.slots))
        program = jax.jit(attend).lower(*arguments).compile()
        return lambda: [np.asarray(x) for x in program(*arguments)]

    def expected(self):
        keys = np.concatenate([k[s[:, : LIVE // 2]] for k, s in zip(self.keys, self.slots, strict=True)], axis=1)
        logits = self.sm_scale * np.einsum("rhd,rkd->rhk", np.asarray(self.q, np.float64), keys)
        weights = np.exp(logits)
        total = weights.sum(-1) + np.exp(np.float64(self.sink))
        return np.einsum("rhk,rkd->rhd", weights, keys) / total[..., None], np.log(total)


@pytest.mark.contract("VR-6")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [384, 512, 768])
def test_verification_buckets_against_float64(rng, rows, implementation):
    case = Verification(rng, rows, scale=0.04)
    out, lse = case.compiled(implementation)()
    want, want_lse = case.expected()
    error = out.astype(np.float64) - want
    assert np.sqrt((error**2).mean() / (want**2).mean()) <= 5e-3
    assert np.abs(error).max() <= 2e-3
    assert np.abs(lse - want_lse).max() <= 2e-3
    cosine = (out * want).sum() / np.linalg.norm(out.astype(np.float64)) / np.linalg.norm(want)
    assert cosine >= 0.9999
    case = Verification(rng, rows, scale=1.0)
    out, _ = case.compiled(implementation)()
    want, _ = case.expected()
    assert np.sqrt(((out - want) ** 2).mean() / (want**2).mean()) <= 5e-3


@pytest.mark.contract("VR-7")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_small_bucket_is_the_same_after_large_ones(rng, implementation):
    """The 6-row program, then 384, 512 and 768 rows, then the first again: 100 times, bit for bit."""
    programs = {rows: Verification(rng, rows, scale=0.04).compiled(implementation) for rows in (6, 384, 512, 768)}
    first = {rows: program() for rows, program in programs.items()}
    for _ in range(100):
        for rows, program in programs.items():
            if rows == 6 or rng.random() < 0.3:
                for got, want in zip(program(), first[rows], strict=True):
                    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.contract("PR-3")
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_row_is_the_same_alone_and_among_others(rng, heads):
    """The Mosaic kernel, bit for bit, in batches of 1, 6, 48, 384 and 768 rows that hold the same row, wherever it
    stands; also where the batch is small enough that a row is split over CTAs."""
    case = Verification(rng, 768, scale=1.0)
    q = jnp.asarray(rng.standard_normal((768, heads, 512)), jnp.bfloat16)
    sink = jnp.linspace(-1.0, 1.0, heads, dtype=jnp.float32)
    for slots in case.slots:
        slots[:] = rng.integers(0, 8 * 64, slots.shape)
    lengths = [jnp.asarray(rng.integers(0, s.shape[1] + 1, 768), jnp.int32) for s in case.slots]

    @jax.jit
    def attend(q, window_slots, window_lengths, indexed_slots, indexed_lengths):
        return compressed_mla.attend(
            q,
            case.caches[0],
            case.layouts[0],
            window_slots,
            window_lengths,
            indexed_cache=case.caches[1],
            indexed_layout=case.layouts[1],
            indexed_slots=indexed_slots,
            indexed_lengths=indexed_lengths,
            attn_sink=sink,
            sm_scale=case.sm_scale,
            return_lse=True,
            implementation="mosaic",
        )

    arguments = (q, *(x for pair in zip(map(jnp.asarray, case.slots), lengths, strict=True) for x in pair))
    want = [np.asarray(x) for x in attend(*arguments)]
    for rows in (1, 6, 48, 384, 768):
        order = rng.permutation(768)[:rows]
        got = attend(*(x[order] for x in arguments))
        for one, all_ in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(one).view(np.uint8), all_[order].view(np.uint8))


@pytest.mark.contract("AT-7")
def test_twenty_runs_are_bit_identical(rng):
    program = Verification(rng, 384, scale=1.0).compiled("mosaic")
    first = program()
    for _ in range(20):
        for got, want in zip(program(), first, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
