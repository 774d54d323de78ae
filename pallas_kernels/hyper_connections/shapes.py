"""Real shapes: ``(rows, streams, width)``."""

from __future__ import annotations

SHAPES = {
    "flash_decode_6": (6, 4, 4096),
    "flash_decode_384": (384, 4, 4096),
    "flash_prefill_8192": (8192, 4, 4096),
    "pro_decode_384": (384, 4, 7168),
}
