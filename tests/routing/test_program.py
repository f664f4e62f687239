"""The contract between a program and its runtime: budgets, drops, holds, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molora_jax.config import UserError
from molora_jax.routing import turn as turns
from molora_jax.routing.program import KEEP, NAMES, UNLIMITED, Mode, Program, check, decide, knob_values, select
from molora_jax.routing.programs import speculative
from tests.routing import catalogue
from tests.routing.naive_route import Route, Sampler, generate
from tests.routing.small_models import table


@pytest.mark.parametrize("program", catalogue.PROGRAMS, ids=catalogue.name)
def test_knobs_are_known_by_name(program):
    knobs = knob_values(program, {})
    assert all(value.dtype == jnp.float32 for value in knobs.values())
    for name in knobs:
        assert knob_values(program, {name: 3})[name] == 3
    with pytest.raises(UserError, match="has no such knob"):
        knob_values(program, {"treshold": 1})


def bad(**fields):
    program = Program()
    for name, value in fields.items():
        setattr(program, name, value)
    return program


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (bad(signals=frozenset({"perplexity"})), r"got \['perplexity'\]"),
        (bad(signals=frozenset({"pattern_hits"})), "got pattern_hits without"),
        (bad(signals=frozenset({"top_k"})), "got top_k without"),
        (bad(signals=frozenset({"score"})), "got score without"),
        (bad(signals=frozenset({"accepted"})), "got accepted without"),
        (bad(modes=frozenset({Mode.VERIFY})), "a method accept"),
        (bad(modes=frozenset({Mode.FUSE})), "a method fuse"),
        (bad(patterns=((),)), "an empty pattern"),
        (speculative.Speculative(draft=0), "got 0, expected at least 1 with VERIFY"),
    ],
)
def test_contradictions_are_refused_in_one_line(program, line):
    with pytest.raises(UserError, match=line):
        check(program)


@dataclasses.dataclass(frozen=True)
class Scripted(Program):
    """Decides what a list says, run after run; the last decision for ever."""

    script: tuple[tuple[tuple[str, int], ...], ...]
    draft: int = 3

    signals = NAMES - {"top_k", "pattern_hits"}
    modes = frozenset(Mode)
    models = 3

    def init(self, params, knobs, key):
        return jnp.int32(0)

    def step(self, params, knobs, state, model, sig):
        decisions = [decide(**dict(fields)) for fields in self.script]
        chosen = decisions[-1]
        for i, decision in enumerate(decisions[:-1]):
            chosen = select(state == i, decision, chosen)
        return state + 1, chosen

    def accept(self, params, knobs, state, draft, key):
        return jnp.minimum(draft.count, state % 3), jnp.argmax(draft.p[0]).astype(jnp.int32)

    def read(self, params, knobs, state, logits):
        return logits[0]

    def fuse(self, params, knobs, state, logits):
        return jnp.mean(logits, axis=0)


def script(*decisions) -> Scripted:
    return Scripted(tuple(tuple(sorted(fields.items())) for fields in decisions))


MODELS = [table(seed, 6) for seed in range(3)]


def writers(*decisions, limit=9):
    return generate(script(*decisions), MODELS, [1], limit=limit).writers


def test_a_budget_returns_to_who_handed_over():
    stay = lambda model: dict(next_model=model)
    assert writers(dict(next_model=1, budget=2), stay(1), stay(1), stay(0)) == [0, 1, 1, 0, 0, 0, 0, 0]
    # without one control stays; a hand-off on the way ends the budget, and that one's end leads to whom it came from
    assert writers(dict(next_model=1), stay(1)) == [0] + [1] * 7
    there = dict(next_model=2, budget=1)
    assert writers(dict(next_model=1, budget=4), stay(1), there, stay(2), stay(1), stay(1)) == [0, 1, 1, 2] + [1] * 4
    # what was dropped was written all the same
    again = dict(next_model=1, drop=1)
    assert writers(dict(next_model=1, budget=2), again, again, stay(0)) == [0] * 8


def test_a_drop_takes_back_only_what_is_held_or_just_written():
    stay, back = dict(next_model=0), dict(next_model=1, drop=9)
    assert writers(stay, stay, back, dict(next_model=1)) == [0, 0] + [1] * 6
    held = [dict(next_model=0, hold=n) for n in (1, 2)]
    assert writers(stay, *held, back, dict(next_model=1)) == [0] + [1] * 7
    # a score writes nothing: it takes back what is held, and no more
    score = dict(next_model=2, mode=Mode.SCORE, hold=1)
    assert writers(stay, stay, score, back, dict(next_model=1)) == [0, 0] + [1] * 6


def test_held_tokens_are_read_by_score_and_verify():
    seen = {}

    class Spy(Scripted):
        def step(self, params, knobs, state, model, sig):
            jax.debug.callback(lambda at, span: seen.update({int(at): span}), state, sig.span_logprobs)
            return super().step(params, knobs, state, model, sig)

    held = [dict(next_model=0, hold=n) for n in (1, 2)]
    fields = (*held, dict(next_model=1, mode=Mode.SCORE, hold=3), dict(next_model=1))
    got = generate(Spy(script(*fields).script), MODELS, [1], limit=6)
    jax.effects_barrier()
    text = [1, *got.tokens]
    logits = MODELS[1](text, [-1] * len(text))[0].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(seen[3], [logs[i, text[i + 1]] for i in range(3)], rtol=1e-5)
    np.testing.assert_array_equal(seen[2], np.zeros(3))


DECISIONS = st.fixed_dictionaries(
    dict(
        next_model=st.integers(0, 2),
        drop=st.integers(0, 4),
        budget=st.sampled_from([0, 1, 2, UNLIMITED]),
        mode=st.sampled_from(Mode),
        adapter=st.sampled_from([KEEP, -1, 0, 3]),
        hold=st.integers(0, 5),
    )
)


@settings(max_examples=60)
@given(st.lists(DECISIONS, min_size=1, max_size=12), st.integers(3, 9), st.sampled_from([(), (2,), (2, 3)]))
def test_turns_are_those_of_the_plain_interpreter(decisions, limit, stops):
    """`turn.follow`, which an engine vmaps, and the interpreter's own bookkeeping agree on any decisions."""
    program = script(dict(next_model=0))
    given = dict(params={}, knobs={}, limit=limit, stops=stops, sampler=Sampler())
    route = Route(program, MODELS, [1], **given)
    turn = turns.begin(decide(0))
    steps = []
    route.follow, follow = lambda decision, wrote: steps.append(wrote), route.follow
    for fields in decisions:
        route.run()
        wrote, decision = steps.pop(), decide(**fields)
        turn = dataclasses.replace(turn, hold=jnp.int32(route.hold))
        length = len(route.tokens)
        turn, drop = turns.follow(program, turn, decision, jnp.int32(wrote))
        follow(decision, wrote)
        assert len(route.tokens) == length - int(drop)
        assert bool(turns.ended(turn, jnp.bool_(route.stopped))) == bool(route.finished)
        if route.finished:
            return
        got = (turn.model, turn.mode, turn.home, turn.left, turn.since, turn.adapter, turn.hold)
        want = (route.model, route.mode, route.home, route.left, route.since, route.adapter, route.hold)
        assert tuple(map(int, got)) == tuple(map(int, want))
