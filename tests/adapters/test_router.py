"""Learned routers inside the whole decoder: exactness, replay, padding, and where gradients go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import router as routers
from molora_jax.adapters.adapter import merge
from molora_jax.adapters.route import LAYER, NONE, ROUTED, Choice, Route
from molora_jax.adapters.router import new_router
from molora_jax.adapters.selection import Rule
from molora_jax.adapters.spec import projection_shape
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.models.state import new_state
from molora_jax.nn.layout import dense, ragged
from tests.adapters.routing import SHAPE, identical, run, tokens, world
from tests.numerics import assert_close

N = SHAPE[0] * SHAPE[1]
RULES = {
    "hard": Rule(),
    "hard_dense": Rule("hard_dense"),
    "switch": Rule("switch"),
    "gumbel": Rule("gumbel"),
    "soft": Rule("soft"),
    "top_2": Rule("top_k", k=2),
    "equal": Rule("equal", k=2),
    "smear": Rule("soft", factored=True),
}
each = pytest.mark.parametrize("rule", [RULES[name] for name in ("hard", "switch", "gumbel", "top_2", "smear")])


def make(cfg, rule=Rule(), **how):
    """A router of three experts, with noise where the rule is `gumbel`."""
    router = new_router(cfg.width, 3, rule=rule, **how).placed((0, 1, 2), 5)
    return dataclasses.replace(router, key=jax.random.key(3), temperature=0.7) if rule.mode == "gumbel" else router


def certain(router, expert: int):
    """The router with a bias that leaves it no choice."""
    out = router.params["out"] | {"bias": 1e4 * jnp.eye(3)[expert]}
    return dataclasses.replace(router, params=router.params | {"out": out})


@functools.partial(jax.jit, static_argnums=0)
def plain(cfg, params, rows):
    """Hidden states without experts."""
    return transformer.apply(cfg, params, rows.reshape(-1), dense(*rows.shape)).hidden


def route_of(router, **choice) -> Route:
    return Route({LAYER: Choice(**choice)} if choice else {}, router)


@pytest.mark.parametrize("mode", ["hard", "hard_dense", "switch", "gumbel"])
def test_all_tokens_on_one_expert_by_router_equal_forced_ids_and_the_merged_adapter(mode):
    cfg, params, adapters, library = world()
    rows, base = tokens(cfg), plain(cfg, params, tokens(cfg))
    for expert in range(3):
        routed = run(cfg, params, rows, library.bank, route_of(certain(make(cfg, Rule(mode)), expert)))
        forced = run(cfg, params, rows, library.bank, Route.of(np.full(N, expert)))
        identical(routed.hidden, forced.hidden)
        alone = plain(*merge(cfg, params, adapters[expert]), rows)
        assert_close(routed.hidden, alone, "model")
        assert np.abs(alone - base).max() > 0.1 * np.abs(base).max()


@each
def test_no_expert_is_the_base_to_the_bit(rule):
    cfg, params, _, library = world()
    rows, router = tokens(cfg), make(cfg, rule)
    routes = [route_of(router.placed((NONE, NONE, NONE), 5))]  # a router whose experts are the base
    if rule.mode in ("hard", "top_k"):
        routes.append(route_of(router, ids=np.full(N, NONE)))
    for route in routes:
        identical(run(cfg, params, rows, library.bank, route).hidden, plain(cfg, params, rows))


@each
def test_experts_in_other_slots_change_routes_and_nothing_else(rule):
    cfg, params, _, library = world()
    rows, router = tokens(cfg), make(cfg, rule)
    slots = np.array([4, 0, 2])  # of experts 0, 1, 2
    move = lambda leaf: jnp.zeros_like(leaf).at[:, slots].set(leaf[:, :3])
    moved = dataclasses.replace(library.bank, layers=jax.tree.map(move, library.bank.layers))
    one = run(cfg, params, rows, library.bank, route_of(router))
    other = run(cfg, params, rows, moved, route_of(router.placed(slots, 5)))
    if one.trace[LAYER].ids is not None:
        identical(other.hidden, one.hidden)
        identical(other.trace[LAYER].ids, slots[one.trace[LAYER].ids])
        assert len(np.unique(one.trace[LAYER].ids)) == 3
    else:  # a sum over experts in another order
        assert_close(other.hidden, one.hidden, "model")
        assert_close(other.trace[LAYER].weights[..., slots], one.trace[LAYER].weights[..., :3], "model")


REPLAYED = [  # rule, form of the router, unrolled
    ("hard", dict(hidden=6, bias=True), False),
    ("gumbel", dict(layers=2), True),
    ("switch", dict(pooling="scores"), False),
    ("top_2", dict(pooling="probabilities", layers=2), False),
]


@pytest.mark.parametrize(("name", "form", "unrolled"), REPLAYED, ids=[case[0] for case in REPLAYED])
def test_a_trace_replays_to_the_bit_with_and_without_its_router(name, form, unrolled):
    cfg, params, _, library = world()
    rows, bank, router = tokens(cfg), library.bank, make(cfg, RULES[name], **form)
    if unrolled:
        params, layers = transformer.unstack(dict(params)), range(cfg.layers)
        bank = dataclasses.replace(bank, layers=[bank.at(i) for i in layers])
    out = run(cfg, params, rows, bank, route_of(router))
    assert out.trace[LAYER].scores.shape == (cfg.layers, N, 3)
    other = dataclasses.replace(router, params=jax.tree.map(lambda w: -w, router.params))  # would decide differently
    for again in (None, router, other):
        identical(run(cfg, params, rows, bank, Route(out.trace, again)).hidden, out.hidden)


def test_every_site_can_have_its_own_router():
    cfg, params, _, library = world()
    widths = {name: projection_shape(params, name)[1] for name in library.spec.ranks}
    router = new_router(widths, 3, layers=cfg.layers).placed((0, 1, 2), 5)
    out = run(cfg, params, tokens(cfg), library.bank, route_of(router))
    assert set(out.trace) == set(library.spec.ranks)
    ids = np.stack([out.trace[name].ids for name in sorted(out.trace)])
    assert len(np.unique(ids.reshape(len(ids), -1), axis=0)) == len(ids)  # no two sites agree throughout
    identical(run(cfg, params, tokens(cfg), library.bank, Route(out.trace)).hidden, out.hidden)


def test_decided_tokens_among_forced_ones():
    cfg, params, _, library = world()
    ids = np.resize([ROUTED, 2, NONE], N).astype(np.int32)
    out = run(cfg, params, tokens(cfg), library.bank, route_of(make(cfg), ids=ids))
    got = np.asarray(out.trace[LAYER].ids)
    identical(got[:, ids != ROUTED], np.broadcast_to(ids[ids != ROUTED], (cfg.layers, (ids != ROUTED).sum())))
    scores = np.asarray(out.trace[LAYER].scores)
    identical(got[:, ids == ROUTED], scores.argmax(-1)[:, ids == ROUTED])


PADS = {"left": slice(3, None), "right": slice(0, -3)}
PADDED = [("hard", None), ("gumbel", None), ("gumbel", "scores"), ("top_2", "probabilities")]


@pytest.mark.parametrize(("name", "pooling"), PADDED)
def test_padding_changes_no_decision(name, pooling):
    cfg, params, _, library = world()
    rows, router = tokens(cfg), make(cfg, RULES[name], pooling=pooling)
    want = run(cfg, params, rows, library.bank, route_of(router)).trace[LAYER]
    for where in PADS.values():
        padded = tokens(cfg, 1, (SHAPE[0], SHAPE[1] + 3))
        valid = np.zeros(padded.shape, bool)
        padded[:, where], valid[:, where] = rows, True
        out = run(cfg, params, padded, library.bank, route_of(router), dense(*padded.shape, valid=valid))
        got, at = out.trace[LAYER], valid.reshape(-1)
        if want.ids is None:
            assert_close(got.weights[:, at], want.weights, "model")
            identical(got.weights[:, at] > 0, want.weights > 0)
        else:
            identical(got.ids[:, at], want.ids)


def test_documents_of_one_row_are_decided_apart():
    cfg, params, _, library = world()
    rows, router = tokens(cfg), make(cfg, pooling="scores")
    packed, segments = rows.reshape(1, -1), np.repeat([[5, 2]], SHAPE[1], axis=1)
    apart = run(cfg, params, rows, library.bank, route_of(router)).trace[LAYER].ids
    together = run(cfg, params, packed, library.bank, route_of(router), dense(1, N, segments=segments)).trace[LAYER].ids
    identical(together, apart)
    assert (np.asarray(apart)[:, 0] != np.asarray(apart)[:, -1]).any()


def test_a_row_is_decided_from_its_pool_and_without_one_is_the_base():
    cfg, params, _, library = world()
    rows, router = tokens(cfg), make(cfg, pooling="scores", seed=4)
    pool = np.zeros(SHAPE, bool)
    pool[0, :3] = True
    out = run(cfg, params, rows, library.bank, Route({}, router, pool.reshape(-1))).trace[LAYER]
    short = run(cfg, params, rows[:1, :3], library.bank, route_of(router)).trace[LAYER]
    ids = np.asarray(out.ids).reshape(cfg.layers, *SHAPE)
    assert (ids[:, 1] == NONE).all()
    # causal: in the first layer the same inputs; later layers' inputs have seen no more either
    identical(ids[:, 0, :3], short.ids)


@functools.partial(jax.jit, static_argnums=0)
def run_parts(cfg, params, tokens, layout, state, bank, route):
    return transformer.apply(cfg, params, tokens, layout, state, bank=bank, route=route)


def test_whole_rows_decide_and_rows_in_parts_follow():
    cfg, params, _, library = world()
    rows, router = tokens(cfg), make(cfg, pooling="scores")
    layout = dense(*SHAPE)
    out = run(cfg, params, rows, library.bank, route_of(router))
    decided = routers.of_rows(out.trace, layout)
    state = new_state(cfg, pages=(4,), page_size=4)
    tables = np.arange(4).reshape(1, 2, 2).astype(np.int32)
    got = []
    for start, stop in ((0, 4), (4, 7)):
        length = stop - start
        parts = ragged(np.full(2, start), np.full(2, length), tables, tokens=9, tile=2, page_size=4)
        flat = np.resize(np.append(rows[:, start:stop].reshape(-1), 0), 9)
        with pytest.raises(UserError, match="expected whole rows"):
            run_parts(cfg, params, flat, parts, state, library.bank, route_of(router))
        route = Route(routers.for_tokens(decided, parts.rows))
        step = run_parts(cfg, params, flat, parts, state, library.bank, route)
        state = step.state
        got.append(np.asarray(step.hidden[: 2 * length]).reshape(2, length, -1))
    assert_close(np.concatenate(got, axis=1), out.hidden.reshape(*SHAPE, -1), "model")


@functools.partial(jax.jit, static_argnums=0)
def gradient(cfg, params, rows, bank, router, choices):
    """Of a sum of squares, to the router's parameters."""

    def loss(trained):
        route = Route(choices, dataclasses.replace(router, params=trained))
        hidden = transformer.apply(cfg, params, rows.reshape(-1), dense(*rows.shape), bank=bank, route=route).hidden
        return jnp.sum(hidden**2)

    return jax.grad(loss)(router.params)["out"]["weight"]


def test_a_record_of_ids_has_the_gradient_of_the_run_that_took_them():
    cfg, params, _, library = world()
    rows, router = tokens(cfg), make(cfg)
    ids = run(cfg, params, rows, library.bank, route_of(router)).trace[LAYER].ids
    want = gradient(cfg, params, rows, library.bank, router, {})
    assert np.isfinite(want).all()
    assert np.abs(want).max() > 0
    got = gradient(cfg, params, rows, library.bank, router, {LAYER: Choice(ids=ids)})
    assert_close(got, want, "model")


def test_noise_draws_experts_with_their_probabilities():
    x = np.random.default_rng(0).standard_normal((1, 4))
    router = dataclasses.replace(new_router(4, 3, rule=Rule("gumbel")), key=jax.random.key(0))
    many = dense(4000, 1)
    choice = router.decide(LAYER, jnp.tile(jnp.asarray(x, jnp.float32), (4000, 1)).T, None, None, many)
    p = np.asarray(jax.nn.softmax(router.scores(x.astype(np.float32))))[0]
    share = np.bincount(choice.ids, minlength=3) / 4000
    assert np.abs(share - p).max() < 4 * np.sqrt(0.25 / 4000)


def test_temperatures_fall_from_start_to_end():
    steps = np.arange(0, 131)
    cosine = [float(routers.cooled(s, 100)) for s in steps]
    powers = [float(routers.cooled(s, 100, shape="exponential")) for s in steps]
    t = np.minimum(steps / 100, 1)
    np.testing.assert_allclose(cosine, 0.1 + 0.9 * (1 + np.cos(np.pi * t)) / 2, rtol=1e-5)
    np.testing.assert_allclose(powers, 10.0**-t, rtol=1e-5)


def test_errors_say_what_to_change():
    for bad in (dict(mode="best"), dict(mode="top_k"), dict(mode="soft", k=2), dict(factored=True)):
        with pytest.raises(UserError, match="expected"):
            Rule(**bad)
    with pytest.raises(UserError, match="got 2 experts and k=3"):
        new_router(4, 2, rule=Rule("top_k", k=3))
    with pytest.raises(UserError, match="one for each of 2 experts"):
        new_router(4, 2).placed((0, 1, 2), 3)


def test_a_scorer_is_a_module_of_its_own_too():
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    scorer = routers.Scorer(4, 3, hidden=6, bias=True, rngs=nnx.Rngs(0), dtype=jnp.float32)
    leaf = lambda p: np.asarray(p[...], np.float64)
    hidden = np.maximum(x @ leaf(scorer.hidden.weight).T + leaf(scorer.hidden.bias), 0)
    assert_close(scorer(x), hidden @ leaf(scorer.out.weight).T + leaf(scorer.out.bias))
