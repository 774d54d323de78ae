"""Page geometries in use (serving contracts, section 1.2)."""

from __future__ import annotations

from pallas_kernels.pages import PageLayout

# The window group, ratio-4 entries, ratio-128 entries of a 256-token block.
SHAPES: dict[str, PageLayout] = {
    "window": PageLayout.padded(64, 2048),
    "csa_entries": PageLayout.padded(64, 2048),
    "hca_entries": PageLayout.padded(2, 2048),
    # A slab that holds every layer's page of one block: the stride is the slab's, not the page's.
    "packed_slab": PageLayout(64, 1_039_680, 64),
}
