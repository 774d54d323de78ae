"""Parameters and the small layers that everything else is made of."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import ModelConfig, Precision
from pallas_kernels import _numerics as numerics
from pallas_kernels.linear import linear
from pallas_kernels.weights import Weight

Storage = Literal["dense", "fp8", "mxfp4"]
_STORAGE: dict[str, Storage] = {"fp8": "fp8", "fp4": "mxfp4", "bf16": "dense", "fp32": "dense"}


@dataclasses.dataclass(frozen=True)
class Policy:
    """How numbers are kept and rounded: the two precision modes of the model.

    ``exact`` keeps every matrix dense in ``dtype`` and quantises nothing. ``checkpoint`` keeps FP8 and MXFP4 matrices
    as stored and quantises activations and KV rows as the checkpoint was trained.
    """

    precision: Precision
    dtype: jnp.dtype
    linear: Storage
    expert: Storage

    @classmethod
    def create(cls, config: ModelConfig, precision: Precision, dtype: Any) -> Policy:
        exact = precision == "exact"
        return cls(
            precision,
            jnp.dtype(dtype),
            "dense" if exact else _STORAGE[config.linear_dtype],
            "dense" if exact else _STORAGE[config.expert_dtype],
        )

    @property
    def quantize(self) -> bool:
        """Whether activations and KV rows are quantised."""
        return self.precision == "checkpoint"


def param(
    shape: tuple[int, ...],
    dtype: Any,
    axes: tuple[str | None, ...],
    *,
    rngs: nnx.Rngs,
    scale: float = 0.0,
    base: float = 0.0,
) -> nnx.Param:
    """Declares a parameter once: shape, dtype, logical axes and its initial law ``base + scale * normal``.

    Shardings and abstract trees derive from the metadata ``logical_axes`` (see ``dspark_jax.parallel``).
    """
    if len(axes) != len(shape):
        raise ValueError(f"expected one logical axis per dimension of {shape}, got {axes}")
    value = jnp.full(shape, base, dtype)
    if scale:
        value = (base + scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
    return nnx.Param(value, logical_axes=axes)


class Linear(nnx.Module):
    """``x @ weight.T`` with a matrix ``[*batch, out, in]`` that is dense, FP8 (128x128 E8M0 scales) or MXFP4.

    ``quantize_activations`` follows the storage: a quantised matrix takes FP8 activations (group 128), as DeepSeek's
    own linears do (model specification, section 2.0).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        storage: Storage,
        dtype: Any,
        axes: tuple[str | None, str | None] = (None, None),
        batch: tuple[int, ...] = (),
        batch_axes: tuple[str | None, ...] = (),
        rngs: nnx.Rngs,
    ):
        self.storage: Storage = storage
        shape, all_axes = (*batch, out_features, in_features), (*batch_axes, *axes)
        if storage == "dense":
            self.weight = param(shape, dtype, all_axes, rngs=rngs, scale=in_features**-0.5)
        elif storage == "fp8":
            self.weight = param(shape, jnp.float8_e4m3fn, all_axes, rngs=rngs, scale=1.0)
            blocks = (*batch, -(-out_features // 128), -(-in_features // 128))
            self.scale = param(blocks, jnp.uint8, all_axes, rngs=rngs, base=127 - _log2(in_features))
        else:
            self.weight = param((*batch, out_features, in_features // 2), jnp.uint8, all_axes, rngs=rngs)
            self.scale = param((*batch, out_features, in_features // 32), jnp.uint8, all_axes, rngs=rngs, base=127)

    @property
    def kernel(self) -> Weight:
        scale = None if self.storage == "dense" else self.scale[...]
        return Weight(self.weight[...], scale, self.storage)

    def __call__(self, x: Float[Array, "N K"], out_dtype: Any = None) -> Float[Array, "N O"]:
        return linear(x, self.kernel, quantize_activations=self.storage != "dense", out_dtype=out_dtype)


class RMSNorm(nnx.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis, all in float32 (model specification, section 2.3)."""

    def __init__(self, features: int, eps: float, *, rngs: nnx.Rngs):
        self.eps = eps
        self.weight = param((features,), jnp.float32, (None,), rngs=rngs, base=1.0)

    def __call__(self, x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
        return numerics.rms_norm(x, self.weight[...], self.eps)


def _log2(n: int) -> int:
    return max(n.bit_length() - 1, 0) // 2


class Embedding(nnx.Module):
    """A table ``[rows, features]`` looked up by id."""

    def __init__(self, rows: int, features: int, *, dtype: Any, axes: tuple[str | None, str | None], rngs: nnx.Rngs):
        self.weight = param((rows, features), dtype, axes, rngs=rngs, scale=1.0)

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B K"]:
        return self.weight[...][ids]
