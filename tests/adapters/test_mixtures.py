"""Every way to route and every mixture, through a whole decoder, against fp64 numpy that shares no code with it.

Experts have ranks 3, 1 and 2 and adapt other projections; the two layers are unrolled. One row each; the command is
`python -m pytest tests/adapters/test_mixtures.py -k ROW`, the tests are test_values_and_gradients[ROW]:

    hard          one expert, sparse straight-through     hard_dense   the same, dense straight-through
    switch        one expert times its probability        gumbel       dense straight-through (no noise: evaluation)
    soft          softmax over all experts                top_2        normalised top-2
    equal         1/2 each for the two best (ReMix)       mlp          a two-layer scorer, another in each layer
    row           one expert a row, by mean scores        uniform      all experts, equally
    oracle        each row its own expert                 xlora        X-LoRA, weights for each layer
    xlora_flat    X-LoRA, one set of weights              xlora_sites  X-LoRA, weights for each projection, top-2
    arrow         Arrow, top-2                            mole         MoLE
    loramoe       LoRAMoE (and MoLoRA 2023)               mixlora      MixLoRA
    hydra         HydraLoRA                               phatgoose    PHATGOOSE, top-2
    phatgoose_fit PHATGOOSE, training a gate              smear        SMEAR
    soup          LoRA Soups CAT

Elsewhere: LoraHub and the adapter of a soup in test_mixtures_merged.py, the prompt classifier there too; auxiliary
losses in test_router_losses.py; vocabulary ranges and control tokens in test_vocabulary.py; forced ids and replay in
test_router.py and test_selection.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.mixtures import settings
from molora_jax.adapters.mixtures.arrow import arrow
from molora_jax.adapters.mixtures.mole import mole
from molora_jax.adapters.mixtures.phatgoose import phatgoose
from molora_jax.adapters.mixtures.soups import soup
from molora_jax.adapters.mixtures.xlora import XLoRA, xlora
from molora_jax.adapters.route import Route
from molora_jax.adapters.router import new_router
from molora_jax.adapters.selection import Rule
from molora_jax.adapters.spec import projection_shape
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests.adapters.numpy_decoder import Place, decode
from tests.adapters.routing import MLP, SHAPE, SITES, softmax, tokens, world
from tests.numerics import assert_close

N, L, J = SHAPE[0] * SHAPE[1], 2, 3
ONE = np.array([0, 2, 1, 1, 0, 2, 0, 1, 1, 2, 0, 0, 2, 1], np.int32)


@dataclasses.dataclass
class Row:
    """What makes the router, and what gives its weights in numpy from (params, temperature)."""

    make: Callable
    weigh: Callable[[Any, float], Callable[[Place], np.ndarray]]
    trained: bool = True
    factored: bool = False
    sites: tuple = SITES
    given: Route = dataclasses.field(default_factory=Route)
    tied: bool = False


def linear(params, x):
    if "hidden" in params:
        x = np.maximum(x @ params["hidden"]["weight"].T + params["hidden"]["bias"], 0)
    return x @ params["out"]["weight"].T + params["out"].get("bias", 0)


def at_layer(params, layer):
    return jax.tree.map(lambda leaf: leaf[layer], params)


def kept(p, k):
    """`p` without all but the k largest of each row."""
    return np.where(np.argsort(np.argsort(-p, axis=-1), axis=-1) < k, p, 0)


def normalised_top(scores, k):
    p = kept(softmax(scores), k)
    return p / p.sum(-1, keepdims=True)


def chosen(mode: str, score=lambda params, at: linear(params, at.h)):
    """One expert, its index and probability held at what they were the first time: what straight-through stands for."""
    first = {}

    def of(params, tau):
        def weigh(at: Place):
            scores = score(params, at)
            p = softmax(scores / tau)
            best, p0 = first.setdefault(at.layer, (scores.argmax(-1), p))
            one = np.eye(J)[best]
            if mode == "switch":
                return one * p
            return one + (p - p0 if mode == "hard_dense" else one * (p - p0))

        return weigh

    return of


def pooled(params, at):
    means = linear(params, at.h).reshape(*SHAPE, J).mean(1)
    return np.repeat(means, SHAPE[1], axis=0)


def by_score(weights: Callable[[np.ndarray], np.ndarray], score=lambda params, at: linear(params, at.h)):
    return lambda params, tau: lambda at: weights(score(params, at) / tau)


own_site = lambda params, at: linear(at_layer(params[at.site], at.layer), at.x)
own_layer = lambda params, at: linear(at_layer(params, at.layer), at.h)


def xlora_weights(flat: bool, sites: tuple, k: int):
    def of(params, tau):
        cfg, weights, adapters, _ = world()
        scores = linear(params, decode(cfg, weights, adapters, tokens(cfg), None)) / tau
        scores = np.broadcast_to(scores[:, None, None], (N, L, 1, J)) if flat else scores.reshape(N, L, -1, J)
        return lambda at: kept(softmax(scores[:, at.layer, sites.index(at.site) if sites else 0]), k)

    return of


def arrow_weights(_params, tau):
    adapters = world()[2]

    def weigh(at: Place):
        scores = np.full((N, J), -np.inf)
        for e, adapter in enumerate(adapters):
            column = adapter.sites.get(("layers", *at.site.split(".")))
            if column is not None:
                w = column[at.layer]
                direction = np.linalg.svd(w.b.astype(np.float64) @ w.a.astype(np.float64))[2][0]
                scores[:, e] = np.abs(at.x @ direction)
        return normalised_top(scores / tau, 2)

    return weigh


def mole_scores(params, at):
    outputs = at.updates.transpose(1, 0, 2).reshape(N, -1)
    outputs = (outputs - outputs.mean(-1, keepdims=True)) / np.sqrt(outputs.var(-1, keepdims=True) + 1e-6)
    return outputs @ params[at.site]["out"]["weight"][at.layer].T


def standard(v):
    return (v - v.mean(-1, keepdims=True)) / v.std(-1, keepdims=True)


def phatgoose_scores(params, at):
    return standard(at.x) @ standard(params[at.site]["out"]["weight"][at.layer]).T / np.sqrt(at.x.shape[1])


def phatgoose_fit(params, _tau):
    sigmoid = lambda s: 1 / (1 + np.exp(-s))
    return lambda at: np.eye(J)[ONE] * sigmoid(own_site(params, at))


def smear_weights(params, tau):
    means = lambda at: softmax(own_layer(params, at) / tau).reshape(*SHAPE, J).mean(1)
    return lambda at: np.repeat(means(at), SHAPE[1], axis=0)


def widths(axis: int):
    _, params, _, library = world()
    return {name: projection_shape(params, name)[axis] for name in library.spec.ranks}


def shared(rule, **how):
    return lambda cfg: new_router(cfg.width, J, rule=rule, **how)


def gates(cfg, **how):
    router = phatgoose(widths(1), J, L, **how)
    draw = lambda site, d: np.random.default_rng(len(site)).standard_normal((L, J, d)) * 0.5
    params = {site: {"out": {"weight": jnp.asarray(draw(site, d), jnp.float32)}} for site, d in widths(1).items()}
    return dataclasses.replace(router, params=params)


def stirred(cfg):
    return dataclasses.replace(soup(J, L), params={"weight": jnp.linspace(-0.5, 1.2, L * J).reshape(L, J)})


two = lambda scores: normalised_top(scores, 2)
x_sites = tuple(world()[3].spec.ranks)
ROWS = {
    "hard": Row(shared(Rule()), chosen("hard")),
    "hard_dense": Row(shared(Rule("hard_dense")), chosen("hard_dense")),
    "switch": Row(shared(Rule("switch")), chosen("switch")),
    "gumbel": Row(shared(Rule("gumbel")), chosen("hard_dense")),
    "soft": Row(shared(Rule("soft")), by_score(softmax)),
    "top_2": Row(shared(Rule("top_k", k=2)), by_score(two)),
    "equal": Row(shared(Rule("equal", k=2)), by_score(lambda s: (kept(softmax(s), 2) > 0) / 2), trained=False),
    "mlp": Row(shared(Rule(), hidden=5, bias=True, layers=L), chosen("hard", own_layer)),
    "row": Row(shared(Rule(), pooling="scores"), chosen("hard", pooled)),
    "uniform": Row(lambda cfg: None, lambda *_: lambda at: np.full((N, J), 1 / J), trained=False),
    "oracle": Row(lambda cfg: None, lambda *_: lambda at: np.eye(J)[np.repeat([2, 0], SHAPE[1])], trained=False),
    "xlora": Row(lambda cfg: xlora(cfg.width, J, L, hidden=6), xlora_weights(False, (), J)),
    "xlora_flat": Row(lambda cfg: xlora(cfg.width, J, L, layerwise=False), xlora_weights(True, (), J)),
    "xlora_sites": Row(lambda cfg: xlora(cfg.width, J, L, sites=x_sites, k=2), xlora_weights(False, x_sites, 2)),
    "arrow": Row(lambda cfg: arrow(world()[2], k=2), arrow_weights, trained=False),
    "mole": Row(lambda cfg: mole(widths(0), J, L), by_score(softmax, mole_scores)),
    "loramoe": Row(lambda cfg: settings.loramoe(widths(1), J, L), by_score(softmax, own_site)),
    "mixlora": Row(lambda cfg: settings.mixlora(cfg.width, J, L), by_score(two, own_layer), sites=(MLP, MLP[:2], MLP)),
    "hydra": Row(lambda cfg: settings.hydra(widths(1), J, L), by_score(softmax, own_site), tied=True),
    "phatgoose": Row(gates, by_score(two, phatgoose_scores)),
    "phatgoose_fit": Row(functools.partial(gates, training=True), phatgoose_fit, given=Route.of(ONE)),
    "smear": Row(lambda cfg: settings.smear(cfg.width, J, L), smear_weights, factored=True),
    "soup": Row(stirred, lambda params, _: lambda at: np.tile(params["weight"][at.layer], (N, 1))),
}
FIXED = {"uniform": settings.uniform((0, 1, 2), 5, N), "oracle": settings.oracle(np.array([2, 0]), SHAPE[1])}


@functools.partial(jax.jit, static_argnums=0)
def run(cfg, params, rows, bank, route, y, trained):
    """(hidden [N D], gradient of Σ y·hidden) for what is trained: (params, temperature) of the route's router."""

    def loss(trained):
        router, given = route.router, route
        flat, layout = rows.reshape(-1), dense(*rows.shape)
        if trained is not None:
            router = dataclasses.replace(router, params=trained[0], temperature=trained[1])
            given = dataclasses.replace(route, router=router)
        if isinstance(router, XLoRA):
            given = router.route(transformer.apply(cfg, params, flat, layout).hidden)
        hidden = transformer.apply(cfg, params, flat, layout, bank=bank, route=given).hidden
        return jnp.sum(y * hidden), hidden

    if trained is None:
        return loss(None)[1], None
    (_, hidden), grad = jax.value_and_grad(loss, has_aux=True)(trained)
    return hidden, grad


def compare(name: str) -> tuple:
    """((hidden, its reference), (directional derivative, its reference) or None)."""
    row = ROWS[name]
    cfg, params, adapters, library = world(row.sites)
    router, rows, bank = row.make(cfg), tokens(cfg), library.bank
    y = np.random.default_rng(5).standard_normal((N, cfg.width))
    if row.tied:
        bank, adapters = settings.tie_down(bank), tuple(tied(adapter, adapters[0]) for adapter in adapters)
    route = FIXED[name] if router is None else dataclasses.replace(row.given, router=router)
    if router is not None:
        router = dataclasses.replace(router, placement=dataclasses.replace(router.placement, size=5))
        route = dataclasses.replace(row.given, router=router)
    trained = (router.params, jnp.float32(0.9)) if row.trained else None
    unrolled = transformer.unstack(dict(params))
    bank = dataclasses.replace(bank, layers=[bank.at(i) for i in range(L)])
    hidden, grad = run(cfg, unrolled, rows, bank, route, y.astype(np.float32), trained)

    def reference(values):
        return decode(cfg, params, adapters, rows, row.weigh(*values), factored=row.factored)

    if not row.trained:
        return (hidden, reference((None if router is None else wide(router.params), 1.0))), None
    values, grad = wide(trained), wide(grad)
    want = reference(values)
    size = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(grad)))
    rng = np.random.default_rng(6)
    along = jax.tree.map(lambda g: g / size + rng.standard_normal(g.shape) / np.sqrt(g.size) / 10, grad)
    moved = lambda step: jax.tree.map(lambda v, d: v + step * d, values, along)
    slope = ((reference(moved(1e-5)) - reference(moved(-1e-5))) * y).sum() / 2e-5
    got = sum((g * d).sum() for g, d in zip(jax.tree.leaves(grad), jax.tree.leaves(along), strict=True))
    return (hidden, want), (got, slope)


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def tied(adapter, first):
    """The adapter with as many rows of the first one's A as it has ranks."""

    def cut(weights, path, layer):
        column = first.sites.get(path)
        return dataclasses.replace(weights, a=column[layer].a[: weights.rank] if column else 0 * weights.a)

    sites = {path: tuple(cut(w, path, i) for i, w in enumerate(column)) for path, column in adapter.sites.items()}
    return dataclasses.replace(adapter, sites=sites)


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients(name):
    (hidden, want), slopes = compare(name)
    assert_close(hidden, want, "model")
    if slopes is not None:
        got, slope = slopes
        assert abs(slope) > 1e-3
        assert abs(got - slope) <= 2e-4 * abs(slope)
