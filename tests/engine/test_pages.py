"""A pool of pages: who uses which, what is shared, and what is given away first."""

import pytest

from molora_jax.engine.pages import PagePool, digests


def test_digests_are_of_everything_up_to_the_end_of_a_page():
    a = digests([1, 2, 3, 4, 5, 6, 7], 3)
    assert len(a) == 2
    assert a == digests((1, 2, 3, 4, 5, 6), 3)
    assert a[0] == digests([1, 2, 3, 9, 9, 9], 3)[0]
    assert a[1] != digests([1, 2, 3, 9, 9, 9], 3)[1]
    assert a[1] != digests([9, 2, 3, 4, 5, 6], 3)[1]  # equal page, other past
    assert digests([1, 2], 3) == []
    assert digests([], 3) == []
    assert len(set(digests([0] * 9, 3))) == 3
    assert digests([258], 1) != digests([2, 1], 1)[:1]


def test_pages_come_from_the_free_ones_and_go_back():
    pool = PagePool(5)
    a, b = pool.take(3), pool.take(2)
    assert sorted(a + b) == list(range(5))
    assert pool.available == 0
    pool.release(a)
    assert pool.available == 3
    assert sorted(pool.take(3)) == sorted(a)
    assert pool.take(0) == []


def test_a_shared_page_is_free_when_its_last_user_left():
    pool, chain = PagePool(3), digests([1, 2], 1)
    pages = pool.take(2)
    for page, digest in zip(pages, chain, strict=True):
        pool.publish(page, digest)
    assert pool.share(chain) == pages
    assert pool.share(chain[:1]) == pages[:1]
    pool.release(pages)
    assert pool.available == 1
    pool.release(pages)
    assert pool.available == 2
    pool.release(pages[:1])
    assert pool.available == 3
    assert pool.known(chain) == 2  # and still known


def test_known_stops_at_the_first_gap():
    pool, chain = PagePool(4), digests([1, 2, 3], 1)
    pages = pool.take(3)
    pool.publish(pages[0], chain[0])
    pool.publish(pages[2], chain[2])
    assert pool.known(chain) == 1
    assert pool.known(chain[1:]) == 0
    assert pool.known([]) == 0


def test_the_first_of_equal_pages_wins():
    pool, chain = PagePool(2), digests([7], 1)
    first, second = pool.take(2)
    pool.publish(first, chain[0])
    pool.publish(second, chain[0])
    assert pool.share(chain) == [first]
    pool.release([first])
    pool.release([second])  # unknown: free at once, and given before the known one
    assert pool.take(1) == [second]
    assert pool.known(chain) == 1


def fill(pool: PagePool, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """Pages of a request that came, was read and published, and is still here."""
    chain = digests(tokens, 1)
    pages = pool.take(len(chain))
    for page, digest in zip(pages, chain, strict=True):
        pool.publish(page, digest)
    return pages, chain


def test_the_longest_unused_request_is_forgotten_first():
    pool = PagePool(5)
    (a, a_chain), (b, b_chain) = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.release(a)
    pool.release(b)
    pool.release(pool.share(a_chain))  # a was used after b
    pool.take(1)  # the one that was never used
    assert (pool.known(a_chain), pool.known(b_chain)) == (2, 2)
    pool.take(2)
    assert (pool.known(a_chain), pool.known(b_chain)) == (2, 0)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_prefix_is_forgotten_from_its_end(lost):
    pool = PagePool(4)
    pages, chain = fill(pool, [1, 2, 3, 4])
    pool.release(pages)
    pool.take(lost)
    assert pool.known(chain) == 4 - lost


def test_a_page_in_use_is_never_given_away():
    pool = PagePool(3)
    pages, chain = fill(pool, [1, 2])
    assert pool.available == 1
    assert not set(pool.take(1)) & set(pages)
    assert pool.known(chain) == 2
    pool.release(pages)
    shared = pool.share(chain[:1])
    assert pool.take(1) == pages[1:]
    assert pool.known(chain) == 1
    pool.release(shared)


def test_what_is_forgotten_is_shared_no_more_and_comes_back_free():
    pool = PagePool(4)
    (idle, first), (used, second) = fill(pool, [1]), fill(pool, [2, 3])
    pool.release(idle)
    pool.forget()
    assert (pool.known(first), pool.known(second), pool.available) == (0, 0, 2)
    pool.release(used)
    assert sorted(pool.take(4)) == list(range(4))
