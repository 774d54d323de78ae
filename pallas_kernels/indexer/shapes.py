"""Real shapes: ``(rows, heads, width, entries, top_k)``."""

from __future__ import annotations

SHAPES = {
    "flash_decode_384_8k": (384, 64, 128, 2048, 512),
    "flash_decode_384_64k": (384, 64, 128, 16384, 512),
    "flash_decode_6_64k": (6, 64, 128, 16384, 512),
    "pro_decode_384_64k": (384, 64, 128, 16384, 1024),
}
