"""Number formats and small functions, bit for bit against data of an independent implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import _numerics as numerics
from pallas_kernels.hyper_connections import reference as hyper
from pallas_kernels.linear import linear
from pallas_kernels.weights import Weight

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def primitives(golden):
    with np.load(golden / "primitives.npz") as data:
        return dict(data)


def bf16(bits):
    return jnp.asarray(bits.view(ml_dtypes.bfloat16))


def same(got, bits):
    np.testing.assert_array_equal(np.asarray(got, np.float32), bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_activation_quantiser(primitives):
    codes, exponent = numerics.act_quant(bf16(primitives["act_x"]), 128)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), primitives["act_q"])
    np.testing.assert_array_equal(np.asarray(exponent) + 127, primitives["act_s"])


def test_simulated_quantisers_and_hadamard(primitives):
    x = bf16(primitives["act_x"])
    same(numerics.fake_quant_fp8(x, 64), primitives["fq8_64"])
    same(numerics.fake_quant_fp4(x), primitives["fq4_32"])
    same(numerics.hadamard(bf16(primitives["hadamard128_in"])), primitives["hadamard128_out"])


@pytest.mark.parametrize(("kind", "format"), [("fp8", "fp8"), ("fp4", "mxfp4")])
def test_quantised_linear(primitives, kind, format):
    data = primitives[f"{kind}_w"].view(ml_dtypes.float8_e4m3fn if kind == "fp8" else np.uint8)
    weight = Weight(jnp.asarray(data), jnp.asarray(primitives[f"{kind}_ws"]), format)
    same(linear(bf16(primitives["lin_x"]), weight, quantize_activations=True), primitives[f"{kind}_y"])


def test_sinkhorn(primitives):
    mix, base, scale = (jnp.asarray(primitives[f"hc_{name}"]) for name in ("mix", "base", "scale"))
    for got, name in zip(hyper.split_mixes(mix.T, base, scale, 4, 1e-6, 20), ("pre", "post", "comb"), strict=True):
        np.testing.assert_allclose(np.moveaxis(np.asarray(got), -1, 0), primitives[f"hc_{name}"], rtol=0, atol=1e-6)


def test_sinkhorn_of_the_specification():
    """Specification 2.2: the values printed there, to their six digits."""
    i = np.arange(24)
    mix, base = np.sin(i + 1).astype(np.float32)[None], (0.1 * np.cos(i)).astype(np.float32)
    read, write, comb = hyper.split_mixes(
        jnp.asarray(mix).T, jnp.asarray(base), jnp.asarray([1, 0.5, 2], jnp.float32), 4, 1e-6, 20
    )
    np.testing.assert_allclose(read[:, 0], [0.719398, 0.723789, 0.524857, 0.298218], atol=1e-6)
    np.testing.assert_allclose(write[:, 0], [0.734131, 0.944387, 1.209124, 1.277558], atol=1e-6)
    rows = [
        [0.419492, 0.196652, 0.159374, 0.224482],
        [0.044164, 0.476456, 0.447288, 0.032091],
        [0.003811, 0.02129, 0.283733, 0.691165],
        [0.532532, 0.305601, 0.109605, 0.052261],
    ]
    np.testing.assert_allclose(comb[..., 0], rows, atol=1e-6)


@pytest.mark.contract("T2")
def test_sinkhorn_balances_columns(rng):
    mix, base, scale = rng.standard_normal((64, 24)), 0.5 * rng.standard_normal(24), 1 + 0.1 * rng.standard_normal(3)
    f32 = [jnp.asarray(x, jnp.float32) for x in (mix.T, base, scale)]
    comb = np.moveaxis(np.asarray(hyper.split_mixes(*f32, 4, 1e-6, 20)[2]), -1, 0)
    np.testing.assert_allclose(comb.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(comb.sum(2), 1, atol=1e-1)
    c = (mix[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4)
    c = np.exp(c - c.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + 1e-6
    c /= c.sum(1, keepdims=True) + 1e-6
    for _ in range(19):
        c /= c.sum(2, keepdims=True) + 1e-6
        c /= c.sum(1, keepdims=True) + 1e-6
    np.testing.assert_allclose(comb, c, atol=2e-6)  # float32 rounding over 40 divisions


def test_ceil_pow2_is_exact_at_and_around_powers_of_two():
    powers = np.float32(2.0) ** np.arange(-120, 120, dtype=np.float32)
    above = np.nextafter(powers, np.float32(np.inf))
    below = np.nextafter(powers, np.float32(0))
    exponents = np.arange(-120, 120)
    for x, expected in ((powers, exponents), (above, exponents + 1), (below, exponents)):
        np.testing.assert_array_equal(numerics.ceil_pow2_exponent(jnp.asarray(x)), expected)


def test_float8_cast_rounds_to_nearest_even(rng):
    """XLA's cast equals ml_dtypes' on midpoints, their neighbours and random numbers."""
    middle = np.arange(-448, 449, 2**-7, dtype=np.float32)
    x = np.concatenate([middle, np.nextafter(middle, 999), np.nextafter(middle, -999), rng.normal(0, 0.01, 9999)])
    x = np.clip(x.astype(np.float32), -448, 448)
    got = np.asarray(jax.jit(lambda v: v.astype(jnp.float8_e4m3fn))(x))
    np.testing.assert_array_equal(got.view(np.uint8), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_e2m1_ties_go_to_the_even_code(rng):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    np.testing.assert_array_equal(numerics.round_e2m1(jnp.asarray(ties)), [0, 1, 1, 2, 2, 4, 4])
    x = rng.uniform(-6, 6, 1000).astype(np.float32)
    nearest = np.abs(np.abs(x)[:, None] - E2M1).argmin(1)
    np.testing.assert_array_equal(numerics.round_e2m1(jnp.asarray(x)), np.sign(x) * E2M1[nearest])


def test_e8m0_codes():
    codes = np.arange(256, dtype=np.uint8)
    got = np.asarray(numerics.decode_e8m0(jnp.asarray(codes)))
    # Code 0 is the subnormal 2**-127: compared by its bits, since a CPU may flush subnormals in arithmetic.
    assert got.view(np.uint32)[0] == np.float32(2.0**-127).view(np.uint32)
    np.testing.assert_array_equal(got[1:255], 2.0 ** (np.arange(1, 255) - 127.0))
    assert np.isnan(got[255])


def test_mxfp4_nibbles_low_first():
    packed = jnp.asarray([[0x21, 0x93] + [0] * 14], jnp.uint8)  # codes 1, 2, 3, 9
    scale = jnp.asarray([[128]], jnp.uint8)
    np.testing.assert_array_equal(numerics.decode_mxfp4(packed, scale, jnp.float32)[0, :4], [1, 2, 3, -1])


def test_block_fp8_with_cut_blocks(rng):
    codes = rng.normal(0, 1, (130, 200)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(120, 130, (2, 2), dtype=np.uint8)
    full = np.kron(2.0 ** (scales.astype(float) - 127), np.ones((128, 128)))[:130, :200]
    got = numerics.decode_block_fp8(jnp.asarray(codes), jnp.asarray(scales), jnp.float32)
    np.testing.assert_array_equal(got, codes.astype(np.float64) * full)


def test_hadamard_is_its_own_inverse_and_keeps_dot_products(rng):
    a, b = jnp.asarray(rng.standard_normal((2, 5, 128)), jnp.float32)
    np.testing.assert_allclose(numerics.hadamard(numerics.hadamard(a)), a, atol=1e-5)
    np.testing.assert_allclose((numerics.hadamard(a) * numerics.hadamard(b)).sum(-1), (a * b).sum(-1), atol=1e-4)


def test_rope_rotates_interleaved_pairs_of_the_last_channels():
    x = jnp.asarray([[5, 6, 1, 0, 0, 1]], jnp.float32)
    inv_freq = np.array([np.pi / 2, np.pi], np.float32)
    turned = numerics.rope(x, jnp.asarray([1]), inv_freq)
    np.testing.assert_allclose(turned, [[5, 6, 0, 1, 0, -1]], atol=1e-6)
    np.testing.assert_allclose(numerics.rope(turned, jnp.asarray([1]), inv_freq, inverse=True), x, atol=1e-6)


def test_rope_at_long_positions(rng):
    """At position 2**20 - 1 the angle is still that of float32 position times frequency (no bfloat16 tables)."""
    x = rng.standard_normal((1, 2, 8)).astype(np.float32)
    inv_freq = np.array([0.75, 0.01, 0.001, 1e-5], np.float32)
    angle = np.float64(np.float32(2**20 - 1) * inv_freq)
    pairs = x.reshape(1, 2, 4, 2)
    want = np.stack(
        [
            pairs[..., 0] * np.cos(angle) - pairs[..., 1] * np.sin(angle),
            pairs[..., 0] * np.sin(angle) + pairs[..., 1] * np.cos(angle),
        ],
        -1,
    ).reshape(x.shape)
    np.testing.assert_allclose(numerics.rope(jnp.asarray(x), jnp.asarray([2**20 - 1]), inv_freq), want, atol=1e-5)


def test_group_sizes_are_checked():
    with pytest.raises(ValueError, match="multiple of the group size 128, got 100"):
        numerics.act_quant(jnp.zeros((1, 100)), 128)
    with pytest.raises(ValueError, match="power of two, got 96"):
        numerics.hadamard(jnp.zeros((1, 96)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("columns", [1, 2, 7, 320, 1024])
@pytest.mark.parametrize("width", [64, 144, 512])
def test_a_row_of_a_product_does_not_depend_on_the_others(rng, width, columns, dtype):
    x, matrix = (jnp.asarray(rng.standard_normal((n, width)), dtype) for n in (320, columns))
    product = jax.jit(numerics.product)
    whole = np.asarray(product(x, matrix))
    for rows in (1, 2, 3, 4, 6, 8, 18, 20, 24, 40, 100):  # bfloat16 as it is fails at 1, 2, 3 and 18
        np.testing.assert_array_equal(product(x[:rows], matrix), whole[:rows])
