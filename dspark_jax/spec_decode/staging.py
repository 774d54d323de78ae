"""How many drafts of each request may be verified, when the decision comes from results that arrive late."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.cache.allocator import SlotPool


class DraftCapacities:
    """Drafts to verify per request slot: ``default`` until a decision for the slot's present tenant takes effect.

    A decision is staged with the tenancy ``(slot, generation)`` it was made for and takes effect at ``flush``, if that
    tenancy has not ended meanwhile; it is consumed either way. So a result that comes after its request has left never
    reaches the request that took the slot (serving contracts, section 4.5).
    """

    def __init__(self, slots: SlotPool, default: int):
        self._slots, self.default = slots, default
        self._staged: dict[tuple[int, int], int] = {}
        self._values: dict[tuple[int, int], int] = {}

    def stage(self, tenancies: Sequence[tuple[int, int]], capacities: Sequence[int]) -> None:
        """Raises ``ValueError`` for a capacity outside 0 .. default."""
        for tenancy, capacity in zip(tenancies, capacities, strict=True):
            if not 0 <= capacity <= self.default:
                raise ValueError(f"a draft capacity must be in [0, {self.default}], got {capacity}")
            self._staged[tenancy] = int(capacity)

    def flush(self) -> None:
        """Applies what was staged and forgets everything about tenancies that have ended."""
        merged = {**self._values, **self._staged}
        self._values = {tenancy: value for tenancy, value in merged.items() if self._slots.is_current(*tenancy)}
        self._staged = {}

    def get(self, slot: int, generation: int) -> int:
        return self._values.get((slot, generation), self.default)
