"""In float64 every routed request gets, token for token, what a naive loop without a cache or a batch gives it."""

import pytest

from tests.routing import catalogue, routed


@pytest.mark.parametrize("program", catalogue.PROGRAMS, ids=catalogue.name)
def test_every_program_gives_the_tokens_of_its_naive_loop(program):
    engine = routed.engine(program)
    asked = routed.requests(0, 6)
    for request, event in zip(asked, engine.run(asked), strict=True):
        want = routed.naive(program, request)
        assert event.tokens == want.tokens
        assert event.writers == want.writers
        assert event.finished == want.finished
