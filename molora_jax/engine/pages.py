"""Pages of the KV table: a free list, and sharing of equal prefixes between requests."""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

Digest = bytes


def digests(tokens: Sequence[int] | np.ndarray, page_size: int) -> list[Digest]:
    """One digest for each full page of `tokens`, of everything up to its end: equal digests, equal keys and values.

    Where keys depend on more than the ids of the tokens, a token is a row of an array: its id, and the rest.
    """
    chain, digest = [], b""
    flat = np.asarray(tokens, np.int64)
    for end in range(page_size, len(flat) + 1, page_size):
        digest = hashlib.blake2b(digest + flat[end - page_size : end].tobytes(), digest_size=16).digest()
        chain.append(digest)
    return chain


class PagePool:
    """The pages that the layers of one kind have, counted by how many requests use each.

    A page whose contents are known by a digest stays when nobody uses it, and is the last to be given away, the longest
    unused first. Full pages are never written again, so that sharing needs no copy.
    """

    def __init__(self, pages: int):
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._digest: dict[int, Digest] = {}
        self._known: dict[Digest, int] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # known pages without users

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def known(self, chain: Sequence[Digest]) -> int:
        """How many pages at the front of `chain` are here."""
        count = 0
        while count < len(chain) and chain[count] in self._known:
            count += 1
        return count

    def share(self, chain: Sequence[Digest]) -> list[int]:
        """Takes part in the known pages of `chain`, all of which must be here."""
        pages = [self._known[digest] for digest in chain]
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        return pages

    def take(self, count: int) -> list[int]:
        """Gives `count` pages to one user; the caller has seen that they are available."""
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._digest.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def publish(self, page: int, digest: Digest) -> None:
        """Lets others share a page that is full; the first of equal pages wins."""
        if digest not in self._known and page not in self._digest:
            self._known[digest] = page
            self._digest[page] = digest

    def forget(self) -> None:
        """Frees the known pages that nobody uses, and shares none of the others any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._known.clear()
        self._digest.clear()

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one user's part in `pages`; a prefix will be forgotten from its end."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._digest:
                self._idle[page] = None
            else:
                self._free.append(page)
