"""No problem is in two splits, whatever the seed and the recipe."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.facts import question
from molora_jax.data.testbed.recipe import KINDS, Recipe, Stream
from molora_jax.data.testbed.splits import SHARES, draw_until, split_of
from tests.data.testbed import solver


def parts(prompt: str, interleaved: bool) -> set[str]:
    """The problems of a prompt without their markers."""
    pieces = prompt.rstrip("\n").split(" |")
    if interleaved:
        count = len(pieces) // 2  # level 1 has two operations
        return {"".join(pieces[i::count]) for i in range(count)}
    return {piece.split(":", 1)[1] if piece.split(":")[0] in DOMAINS else piece for piece in pieces}


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "facts"]),
    seeds=st.tuples(*[st.integers(0, 2**60)] * 3),
    signs=st.sampled_from([0.0, 0.5]),
    rival=st.sampled_from([0.0, 1.0]),
)
def test_splits_are_disjoint(kind, seeds, signs, rival):
    recipe = Recipe(shares={kind: 1.0}, levels=(1,), signs=signs, rival=rival)
    found = {}
    for split, seed in zip(SHARES, seeds, strict=True):
        found[split] = set()
        for example in Stream(recipe, split, seed, 30):
            found[split] |= parts(example.prompt, kind == "interleaved")
        assert {split_of(part) for part in found[split]} == {split}
    assert not found["train"] & found["test"]


def test_a_part_is_a_problem():
    example = Stream(Recipe(shares={"several": 1.0}), "test", 0, 1)[0]
    for part in parts(example.prompt, False):
        assert solver.split(part)[0] in DOMAINS


def test_shares_of_the_splits():
    found = [split_of(f"problem {i}") for i in range(20_000)]
    for split, share in SHARES.items():
        assert abs(found.count(split) / len(found) - share) < 0.01


def test_fact_questions_have_one_split():
    texts = {s: {(q.question, q.segments) for q in (question(s, i, level=1) for i in range(20))} for s in SHARES}
    assert not texts["train"] & texts["test"]


def test_drawing_ends_in_one_line_when_nothing_fits():
    other = next(s for s in SHARES if s != split_of("same"))
    with pytest.raises(UserError, match="raise the difficulty"):
        draw_until(other, lambda: "same", str)
