"""Who owns which slot and pages of a model's memory; kept on the host, pure Python."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from molora_jax.config import UserError
from molora_jax.engine.pages import Digest, PagePool, digests


@dataclasses.dataclass
class Lease:
    """The slot and pages of one request.

    Attributes:
      slot: row of the request table.
      shared: leading tokens whose keys and values were there already.
      tables: page of each block of positions, one row a kind of layer: [kinds, P].
      pages: pages of each kind, to be given back.
      publishable: per kind, how many leading pages keep their contents for as long as the request lives.
      chain: digests of the prompt's full pages.
    """

    slot: int
    shared: int
    tables: np.ndarray
    pages: list[list[int]]
    publishable: list[int]
    chain: list[Digest]


class Slots:
    """Admission: a request gets a slot and all the pages that it can ever need, or waits; it never runs out midway.

    Layers that see a window of W positions need no more pages than W and one program's tokens span: longer requests
    write over their oldest pages in a ring, and only prefixes that were never in a ring are offered for sharing.
    """

    def __init__(
        self, windows: Sequence[int], *, slots: int, length: int, pages: Sequence[int], page_size: int, chunk: int
    ):
        """`windows[k]` is what the layers of kind k see (0: everything), `pages[k]` the pages that they have."""
        self.page_size = page_size
        self.width = -(-length // page_size)
        self.pools = [PagePool(count) for count in pages]
        self._rings = [ring_pages(window, chunk, page_size) for window in windows]
        self._free = list(range(slots - 1, -1, -1))
        self._coming: set[Digest] = set()  # pages that a running prefill is about to publish
        self.looked_up = self.hits = 0  # full prompt pages, and how many of them were shared

    @property
    def free(self) -> bool:
        """Whether any slot is free, without which no lease can be had."""
        return bool(self._free)

    def check(self, limit: int) -> None:
        """Raises `UserError` for a request of `limit` tokens that all the pages together could not hold."""
        for kind, pool in enumerate(self.pools):
            need = self._own(kind, -(-limit // self.page_size))
            if need > pool.pages:
                raise UserError(f"request: needs {need} KV pages of {self.page_size} tokens, got {pool.pages} in all")

    def lease(self, prompt: Sequence[int], limit: int) -> Lease | None:
        """A slot and pages for `prompt` and what follows it up to `limit` tokens; None if the request has to wait.

        It waits for a slot, for pages, or for a running request to publish a prefix that it can share.
        """
        if not self._free:
            return None
        chain = digests(prompt, self.page_size)
        # the last token is always read again: its logits give the next one
        sharable = chain[: (len(prompt) - 1) // self.page_size]
        hit = min(pool.known(sharable) for pool in self.pools)
        if hit < len(sharable) and sharable[hit] in self._coming:
            return None
        total = -(-limit // self.page_size)
        held = self._hold(sharable[:hit], total)
        if held is None and hit:  # a ring takes no fewer pages for what is shared: it may fit without
            hit, held = 0, self._hold([], total)
        if held is None:
            return None
        self.looked_up += len(sharable)
        self.hits += hit
        tables, publishable = np.zeros((len(self.pools), self.width), np.int32), []
        for kind, pages in enumerate(held):
            tables[kind, :hit] = pages[:hit]
            tables[kind, hit:total] = np.resize(pages[hit:], total - hit)
            publishable.append(total if len(pages) == total else hit)
        lease = Lease(self._free.pop(), hit * self.page_size, tables, held, publishable, chain)
        self._coming.update(sharable[hit : min(publishable)])
        return lease

    def _hold(self, shared: Sequence[Digest], total: int) -> list[list[int]] | None:
        """Per kind, the `shared` pages and those that a request of `total` pages writes; None if too few are left."""
        needs = [self._own(kind, total - len(shared)) for kind in range(len(self.pools))]
        held = [pool.share(shared) for pool in self.pools]
        if all(pool.available >= need for pool, need in zip(self.pools, needs, strict=True)):
            return [pages + pool.take(need) for pool, pages, need in zip(self.pools, held, needs, strict=True)]
        for pool, pages in zip(self.pools, held, strict=True):
            pool.release(pages)
        return None

    def _own(self, kind: int, pages: int) -> int:
        ring = self._rings[kind]
        return min(pages, ring) if ring else pages

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Offers the full pages of `tokens`, whose keys and values have been written, to later requests."""
        chain = digests(tokens, self.page_size)
        for kind, pool in enumerate(self.pools):
            for page, digest in zip(lease.tables[kind], chain[: min(lease.publishable)], strict=False):
                pool.publish(int(page), digest)
        self._coming.difference_update(lease.chain)

    def forget(self) -> None:
        """Offers no prefix that is there now to any later request."""
        for pool in self.pools:
            pool.forget()

    def give_back(self, lease: Lease) -> None:
        """Frees the slot and the request's part in its pages."""
        self._coming.difference_update(lease.chain)
        for pool, pages in zip(self.pools, lease.pages, strict=True):
            pool.release(pages)
        self._free.append(lease.slot)


def ring_pages(window: int, chunk: int, page_size: int) -> int:
    """Pages that hold a window and the `chunk` tokens a program may write at once, at any offset; 0: no window."""
    return -(-(window + chunk) // page_size) + 1 if window else 0


def pages_for(windows: Sequence[int], *, slots: int, length: int, page_size: int, chunk: int) -> tuple[int, ...]:
    """Per kind, pages with which `slots` requests of `length` tokens run at once and none is shared."""
    most = -(-length // page_size)
    rings = (ring_pages(window, chunk, page_size) for window in windows)
    return tuple(slots * (min(most, ring) if ring else most) for ring in rings)
