"""The prefix cache: blocks of finished and running requests, found again by prompts that begin alike.

A block of 256 tokens is named by a hash of its tokens and of the block before it. To go on after the last shared block
a request needs more than the block's compressed entries: the window rows before that boundary, of every layer and of
the drafter. They are the block's **tail**, kept as window pages. What is not kept, the compressors' state, follows from
the last four tokens, which are computed once more (without writing to shared pages). So a hit restores everything that
the next token reads, and continues bit for bit like the request that was there first.

Host only, no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import xxhash

from dspark_jax.cache.allocator import BLOCK_TOKENS, WINDOW_PAGE_TOKENS, PagePool


class BlockNames:
    """Names of a request's blocks, computed once: ``(hash of this block and all before it, its tokens)``."""

    def __init__(self) -> None:
        self._names: list[tuple[bytes, bytes]] = []

    def of(self, tokens: Sequence[int], count: int) -> list[tuple[bytes, bytes]]:
        """Names of the first ``count`` blocks of ``tokens``, which only ever grow."""
        for i in range(len(self._names), count):
            content = np.asarray(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS], np.int32).tobytes()
            parent = self._names[-1][0] if self._names else b""
            self._names.append((xxhash.xxh3_128_digest(parent + content), content))
        return self._names[:count]


@dataclasses.dataclass(eq=False)
class CachedBlock:
    """One block of a chain. ``tail`` maps logical to physical window pages before its end (``None``: not continuable,
    only a link to later blocks). ``following`` is the token after the block in the request that wrote it."""

    key: bytes
    tokens: bytes
    parent: CachedBlock | None
    block: int
    tail: dict[int, int] | None = None
    following: int | None = None


@dataclasses.dataclass(frozen=True)
class PrefixHit:
    """What a prompt can take over: ``num_tokens`` of it (a multiple of 256, 0: nothing), their ``blocks`` and the
    window pages (logical to physical) before their end. ``first_valid`` is the first position in those pages."""

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    tail: dict[int, int] = dataclasses.field(default_factory=dict)
    last: CachedBlock | None = None

    @property
    def first_valid(self) -> int:
        return min(self.tail, default=0) * WINDOW_PAGE_TOKENS


class PrefixCache:
    """Finds and keeps blocks in ``blocks`` and their tails in ``window_pages``; both pools evict what they need.

    ``tail_pages`` window pages make a tail. With ``same_next_token`` a boundary is continued only by a prompt whose
    next token is also that of the request that wrote it: an MTP block's rows depend on it.
    """

    def __init__(self, blocks: PagePool, window_pages: PagePool, *, tail_pages: int, same_next_token: bool = False):
        self._blocks, self._window_pages = blocks, window_pages
        self._tail_pages = tail_pages
        self._same_next_token = same_next_token
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._by_tail_page: dict[int, set[CachedBlock]] = {}
        self.num_hits = 0
        self.num_hit_tokens = 0
        self.num_query_tokens = 0
        self.num_evictions = 0
        blocks.on_evict = self._on_block_evicted
        window_pages.on_evict = self._on_window_page_evicted

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._by_key)

    # -- lookup -----------------------------------------------------------------------------------------------------
    def lookup(self, tokens: Sequence[int], names: BlockNames, limit: int) -> PrefixHit:
        """The longest continuable prefix of ``tokens[:limit]``. Changes nothing: ``acquire`` takes the pages."""
        best = PrefixHit()
        chain: list[CachedBlock] = []
        for key, content in names.of(tokens, min(limit, len(tokens)) // BLOCK_TOKENS):
            node = self._by_key.get(key)
            # The hash only finds: tokens decide, so that no two prompts can be made to share a block by a collision.
            if node is None or node.tokens != content or not _same(node.parent, chain[-1] if chain else None):
                break
            chain.append(node)
            end = len(chain) * BLOCK_TOKENS
            following = tokens[end] if end < len(tokens) else None
            if node.tail is not None and (not self._same_next_token or node.following == following is not None):
                best = PrefixHit(end, tuple(n.block for n in chain), node.tail, node)
        return best

    def num_idle(self, hit: PrefixHit) -> int:
        """How many of the hit's blocks nobody holds: taking them leaves the pool with that many free pages less."""
        return sum(not self._blocks.holders(block) for block in hit.blocks)

    def acquire(self, hit: PrefixHit, num_tokens: int) -> None:
        """Becomes a holder of the hit's pages and counts it, for a prompt of ``num_tokens`` tokens to compute."""
        self._blocks.share(hit.blocks)
        self._window_pages.share(hit.tail.values())
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += hit.num_tokens
        self.num_hits += hit.num_tokens > 0

    # -- registration -----------------------------------------------------------------------------------------------
    def register(
        self,
        tokens: Sequence[int],
        names: BlockNames,
        index: int,
        parent: CachedBlock | None,
        block: int,
        window: dict[int, int],
    ) -> CachedBlock | None:
        """Makes block ``index`` of a request findable: all of its tokens are known and computed (or in a step that runs
        before any that could read them).

        ``parent`` is what this returned for the block before; ``window`` are the request's window pages by logical
        number. Returns the findable block with this content, which may be an older one, or ``None`` if the block cannot
        be linked. The request must hold ``block`` and the pages.
        """
        if index and parent is None:
            return None
        end = (index + 1) * BLOCK_TOKENS
        key, content = names.of(tokens, index + 1)[index]
        node = self._by_key.get(key)
        if node is None or node.tokens != content or not _same(node.parent, parent):
            if node is not None or block in self._by_block:
                return None  # a collision: the older block keeps the name
            node = CachedBlock(key, content, parent, block)
            self._by_key[key] = self._by_block[block] = node
            self._blocks.keep(block)
        if node.tail is None:
            last = end // WINDOW_PAGE_TOKENS
            wanted = range(max(0, last - self._tail_pages), last)
            if all(page in window for page in wanted):
                node.tail = {page: window[page] for page in wanted}
                node.following = tokens[end] if end < len(tokens) else None
                for physical in node.tail.values():
                    self._by_tail_page.setdefault(physical, set()).add(node)
                    self._window_pages.keep(physical)
        return node

    def clear(self) -> None:
        """Forgets everything. Requests that hold pages keep them."""
        for node in list(self._by_key.values()):
            self._blocks.drop(node.block)
            self._forget(node)

    # -- eviction ---------------------------------------------------------------------------------------------------
    def _on_block_evicted(self, block: int) -> None:
        self.num_evictions += 1
        self._forget(self._by_block[block])

    def _forget(self, node: CachedBlock) -> None:
        del self._by_key[node.key], self._by_block[node.block]
        self._forget_tail(node)

    def _on_window_page_evicted(self, page: int) -> None:
        for node in list(self._by_tail_page[page]):
            self._forget_tail(node)

    def _forget_tail(self, node: CachedBlock) -> None:
        for page in (node.tail or {}).values():
            users = self._by_tail_page[page]
            users.remove(node)
            if not users:
                del self._by_tail_page[page]
                self._window_pages.drop(page)
        node.tail = None


def _same(a: CachedBlock | None, b: CachedBlock | None) -> bool:
    """Whether two blocks have the same tokens all the way back. Blocks evicted and computed again are new objects."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True
