"""A matrix in one of the stored formats."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from pallas_kernels import _numerics as numerics

Format = Literal["dense", "fp8", "mxfp4"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """A matrix ``[*batch, out, in]``: a pytree of its arrays, with the format as static data.

    ======  ==================================  ============================================
    format  ``data``                            ``scale``
    ======  ==================================  ============================================
    dense   float ``[*batch, out, in]``         ``None``
    fp8     E4M3 ``[*batch, out, in]``          E8M0 codes (uint8) ``[*batch, out/128, in/128]``, rounded up
    mxfp4   packed uint8 ``[*batch, out, in/2]``  E8M0 codes (uint8) ``[*batch, out, in/32]``
    ======  ==================================  ============================================
    """

    data: jax.Array
    scale: jax.Array | None = None
    format: Format = dataclasses.field(default="dense", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """``[*batch, out, in]`` with ``in`` unpacked."""
        *lead, columns = self.data.shape
        return (*lead, 2 * columns if self.format == "mxfp4" else columns)

    def dequantize(self, dtype: Any) -> jax.Array:
        """The matrix in ``dtype``. Exact in bfloat16: its mantissa holds E4M3 and E2M1, its exponent the scale."""
        match self.format:
            case "dense":
                return self.data.astype(dtype)
            case "fp8":
                assert self.scale is not None
                return numerics.decode_block_fp8(self.data, self.scale, dtype)
            case "mxfp4":
                assert self.scale is not None
                return numerics.decode_mxfp4(self.data, self.scale, dtype)
        raise ValueError(f"format must be dense, fp8 or mxfp4, got {self.format!r}")


def check_weight(op: str, name: str, weight: Weight, ndim: int) -> None:
    """Raises ``ValueError`` unless the arrays of ``weight`` fit together and have ``ndim`` axes."""
    if weight.data.ndim != ndim:
        raise ValueError(f"{op}: {name} must have {ndim} axes, got shape {list(weight.data.shape)}")
    *batch, rows, columns = weight.shape
    expected = {
        "dense": None,
        "fp8": (*batch, -(-rows // 128), -(-columns // 128)),
        "mxfp4": (*batch, rows, columns // 32),
    }[weight.format]
    got = None if weight.scale is None else tuple(weight.scale.shape)
    if got != expected:
        raise ValueError(f"{op}: {name}.scale must have shape {expected} for format {weight.format}, got {got}")
