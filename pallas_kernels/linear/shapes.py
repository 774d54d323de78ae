"""Real shapes of DeepSeek-V4-Flash: ``(out, in)``, for any number of rows."""

from __future__ import annotations

ROWS = (6, 64, 384, 8192)

SHAPES = {
    "flash_wq_a": (1024, 4096),
    "flash_wq_b": (32768, 1024),
    "flash_wkv": (512, 4096),
    "flash_wo_b": (4096, 8192),
    "flash_lm_head": (129280, 4096),
}
