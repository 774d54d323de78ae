"""Real shapes: ``(rows, requests, ratio, channels)``."""

from __future__ import annotations

SHAPES = {
    "flash_csa_decode_384": (384, 64, 4, 1024),
    "flash_hca_decode_384": (384, 64, 128, 512),
    "flash_indexer_decode_384": (384, 64, 4, 256),
    "flash_csa_prefill_8192": (8192, 8, 4, 1024),
}
