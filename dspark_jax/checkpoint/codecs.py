"""Encoding and decoding of stored matrices, in NumPy. E8M0 scales are always uint8 codes: never cast, only placed.

Source: model specification, sections 2.0, 3.2 and 3.3.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = 128
FP4_GROUP = 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_SIGNED = np.concatenate([_E2M1, -_E2M1])
# Halfway between neighbours; a tie goes to the even code, that is up from every odd one.
_E2M1_MIDDLE = (_E2M1[:-1] + _E2M1[1:]) / 2


def scale_code(amax: np.ndarray, largest: float) -> np.ndarray:
    """E8M0 codes of ``amax / largest`` rounded up to a power of two; 127 (one) for zero."""
    ratio = (amax.astype(np.float32) * np.float32(1 / largest)).astype(np.float32)
    bits = ratio.view(np.int32)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return np.where(amax > 0, np.clip(code, 1, 254), 127).astype(np.uint8)


def scale_value(codes: np.ndarray) -> np.ndarray:
    """float32 ``2 ** (code - 127)``; code 255 is NaN."""
    values = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    return np.where(codes == 255, np.float32(np.nan), values)


def _spread(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    return np.repeat(np.repeat(scales, BLOCK, axis=0)[: shape[0]], BLOCK, axis=1)[:, : shape[1]]


def encode_fp8(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 codes and E8M0 scale codes (uint8) of a float32 matrix, one scale for each 128 x 128 block."""
    rows, columns = matrix.shape
    padded = np.zeros((-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK), np.float32)
    padded[:rows, :columns] = np.abs(matrix)
    amax = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).max(axis=(1, 3))
    scales = scale_code(amax, 448.0)
    return (matrix / _spread(scale_value(scales), (rows, columns))).astype(E4M3), scales


def decode_fp8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 matrix of ``encode_fp8``'s arrays."""
    return codes.astype(np.float32) * _spread(scale_value(scales), (codes.shape[0], codes.shape[1]))


def encode_mxfp4(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed uint8 ``[out, in / 2]`` (low nibble first) and E8M0 scale codes ``[out, in / 32]`` of a float32 matrix."""
    rows, columns = matrix.shape
    if columns % FP4_GROUP:
        raise ValueError(f"an MXFP4 matrix needs a multiple of {FP4_GROUP} columns, got {columns}")
    groups = matrix.reshape(rows, -1, FP4_GROUP)
    scales = scale_code(np.abs(groups).max(-1), 6.0)
    scaled = (groups / scale_value(scales)[..., None]).reshape(rows, columns)
    magnitude = np.abs(scaled)
    code = np.searchsorted(_E2M1_MIDDLE, magnitude, side="left")
    tie = (code < len(_E2M1_MIDDLE)) & (magnitude == _E2M1_MIDDLE[np.minimum(code, len(_E2M1_MIDDLE) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = (code | np.where(np.signbit(scaled), 8, 0)).astype(np.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, scales


def decode_mxfp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 matrix of ``encode_mxfp4``'s arrays."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = _E2M1_SIGNED[codes].reshape(len(packed), -1, FP4_GROUP)
    return (values * scale_value(scales)[..., None]).reshape(len(packed), -1)
