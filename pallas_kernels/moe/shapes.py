"""Real shapes: ``(rows, experts, top_k, width, inner)``."""

from __future__ import annotations

SHAPES = {
    "flash_decode_6": (6, 256, 6, 4096, 2048),
    "flash_decode_384": (384, 256, 6, 4096, 2048),
    "flash_prefill_8192": (8192, 256, 6, 4096, 2048),
    "pro_decode_384": (384, 384, 6, 7168, 3072),
}
