"""Real shapes: rows of a decode step of DeepSeek-V4 on one device."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MLAShape:
    """``rows`` queries of ``heads`` heads over ``window`` + ``indexed`` keys, in pages of 64 and ``indexed_page``."""

    rows: int
    heads: int
    window: int
    indexed: int
    indexed_page: int


SHAPES = {
    "flash_csa_6": MLAShape(6, 64, 128, 512, 64),
    "flash_csa_64": MLAShape(64, 64, 128, 512, 64),
    "flash_csa_384": MLAShape(384, 64, 128, 512, 64),
    "flash_hca_384_64k": MLAShape(384, 64, 128, 512, 2),
    "flash_swa_384": MLAShape(384, 64, 128, 0, 0),
    "pro_csa_384": MLAShape(384, 128, 128, 1024, 64),
    "flash_draft_320": MLAShape(320, 64, 128, 5, 5),
}
