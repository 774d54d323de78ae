"""Real shapes: rows of a step of DeepSeek-V4 on one device."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MLAShape:
    """``rows`` queries of ``heads`` heads over ``window`` + ``indexed`` keys, in pages of 64 and ``indexed_page``.

    ``consecutive``: the compressed entries of a row are neighbours (ratio 128) and not scattered (ratio 4).
    ``share``: groups of that many rows belong to one request: their windows overlap, and so do eight ninths of their
    entries, as in the verification of a block of drafts.
    """

    rows: int
    heads: int
    window: int
    indexed: int
    indexed_page: int
    consecutive: bool = False
    share: int = 1


def _both(name: str, shape: MLAShape) -> dict[str, MLAShape]:
    return {name: shape, f"{name}_shared": dataclasses.replace(shape, share=6)}


SHAPES: dict[str, MLAShape] = {}
for _rows in (6, 64, 384, 768):
    SHAPES |= _both(f"flash_csa_{_rows}", MLAShape(_rows, 64, 128, 512, 64))
del SHAPES["flash_csa_64_shared"]  # 64 rows are not whole requests of 6
for _rows in (6, 384):
    SHAPES |= _both(f"flash_tp4_csa_{_rows}", MLAShape(_rows, 16, 128, 512, 64))
    SHAPES |= _both(f"pro_csa_{_rows}", MLAShape(_rows, 128, 128, 1024, 64))
    SHAPES |= _both(f"flash_hca_{_rows}_256k", MLAShape(_rows, 64, 128, 2048, 2, consecutive=True))
SHAPES |= _both("flash_swa_384", MLAShape(384, 64, 128, 0, 64))
SHAPES["flash_draft_320"] = MLAShape(320, 64, 128, 5, 5, consecutive=True)
