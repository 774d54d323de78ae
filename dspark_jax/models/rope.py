"""Rotary frequencies: plain for layers without a compressor, YaRN for layers with one."""

from __future__ import annotations

import math

import numpy as np

from dspark_jax.config import ModelConfig


def inverse_frequencies(config: ModelConfig, ratio: int) -> np.ndarray:
    """Angle per position of each channel pair: float32 ``[qk_rope_head_dim / 2]``.

    Ratio 0 (and draft stages): ``rope_theta``, no YaRN. Ratio 4 and 128: ``compress_rope_theta`` with YaRN and no
    amplitude factor. Source: model specification, section 2.4.
    """
    dim = config.qk_rope_head_dim
    pair = np.arange(dim // 2, dtype=np.float64)
    if ratio == 0:
        return (config.rope_theta ** (-2 * pair / dim)).astype(np.float32)
    base, yarn = config.compress_rope_theta, config.rope_scaling
    plain = base ** (-2 * pair / dim)

    def pair_of(rotations: float) -> float:
        """The pair that turns ``rotations`` times within the original context."""
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001  # the reference's guard against a division by zero
    ramp = np.clip((pair - low) / (high - low), 0, 1)
    return (plain * (1 - ramp) + plain / yarn.factor * ramp).astype(np.float32)
