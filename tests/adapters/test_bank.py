"""Experts of every kind side by side in one bank, against merging each into the base, and against plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import adapter as adapters
from molora_jax.adapters import lora
from molora_jax.adapters.adapter import EMBED, Adapter
from molora_jax.adapters.bank import Site, adapt, embed
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import NONE, Choice, Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, size
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests import experts, fakes
from tests.numerics import assert_close

T = 7
NAME = "llama_untied"


@functools.cache
def library(unrolled: bool) -> Library:
    cfg, params = fakes.model(NAME)
    found = [experts.adapter(cfg, params, kind, seed) for seed, kind in enumerate(experts.KINDS)]
    made = Library(BankSpec.holding(found, slots=len(found) + 1), fakes.weights(NAME, unrolled=unrolled)[1])
    for adapter in found:
        made.add(adapter)
        made.acquire(adapter.name)
    return made


@functools.partial(jax.jit, static_argnums=0)
def run(cfg, params, tokens, bank, ids):
    """Logits of rows [B, T]; ids [B·T] or None."""
    route = None if bank is None else Route.of(ids)
    out = transformer.apply(cfg, params, tokens.reshape(-1), dense(*tokens.shape), bank=bank, route=route)
    return transformer.logits(cfg, params, out.hidden, bank=bank, ids=ids).reshape(*tokens.shape, -1)


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 97, (count, T))


@pytest.mark.parametrize("unrolled", [False, True])
def test_every_row_gets_what_its_own_merged_model_gives(unrolled):
    cfg, params = fakes.model(NAME)
    lib, tokens = library(unrolled), rows(len(experts.KINDS) + 1)
    slots = [*(lib.resident[kind] for kind in experts.KINDS), NONE]
    got = run(cfg, fakes.weights(NAME, unrolled=unrolled)[1], tokens, lib.bank, np.repeat(slots, T))
    for row, kind in enumerate(experts.KINDS):
        found = experts.adapter(cfg, params, kind, row)
        if kind == "bias":  # a projection without a bias cannot hold it: the base gets zeros to add it to
            continue
        merged = adapters.merge(cfg, params, found)
        assert_close(got[row], run(*merged, tokens[row : row + 1], None, None)[0], "model")
    base = run(cfg, fakes.weights(NAME, unrolled=unrolled)[1], tokens[-1:], None, None)[0]
    assert np.abs(got[0] - run(cfg, params, tokens[:1], None, None)[0]).max() > 0.1
    assert_close(got[-1], base, "model")


@pytest.mark.parametrize("unrolled", [False, True])
def test_without_an_expert_the_base_is_kept_to_the_bit(unrolled):
    """The base is the same program over an empty bank; without any bank XLA may fuse, and so round, otherwise."""
    cfg, params = fakes.weights(NAME, unrolled=unrolled)
    tokens, lib = rows(3), library(unrolled)
    nobody = np.full(3 * T, NONE)
    got = run(cfg, params, tokens, lib.bank, nobody)
    np.testing.assert_array_equal(got, run(cfg, params, tokens, new_bank(lib.spec, params), nobody))
    assert_close(got, run(cfg, params, tokens, None, None), "model")


def test_a_token_without_an_expert_keeps_its_projection_to_the_bit():
    rng = np.random.default_rng(0)
    s = jax.tree.map(jnp.asarray, site(rng))
    y, x = jnp.asarray(rng.standard_normal((6, 9)), jnp.float32), jnp.ones((5, 9))
    ids = jnp.asarray([0, 3, NONE, 1, 1, NONE, 2, 0, NONE])
    kept = np.asarray(ids) == NONE
    got = jax.jit(adapt)(y, x, s, Choice(ids=ids))
    np.testing.assert_array_equal(np.asarray(got)[:, kept], np.asarray(y)[:, kept])
    assert (np.asarray(got) != np.asarray(y))[:, ~kept].any(axis=0).all()


def test_experts_in_other_slots_change_nothing():
    cfg, params = fakes.model(NAME)
    tokens, lib = rows(4), library(False)
    ids = np.random.default_rng(0).integers(-1, len(experts.KINDS), 4 * T)
    order = np.random.default_rng(1).permutation(len(experts.KINDS) + 1)
    place = np.argsort(order)
    moved = jax.tree.map(lambda leaf: leaf[:, order], lib.bank.layers)
    ends = jax.tree.map(lambda leaf: leaf[order], (lib.bank.ends, lib.bank.whole))
    bank = type(lib.bank)(moved, *ends)
    got = run(cfg, params, tokens, bank, np.where(ids < 0, NONE, place[ids]))
    assert_close(got, run(cfg, params, tokens, lib.bank, ids), "model")


def site(rng, *, e=4, r=3, d=5, f=6) -> Site:
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return Site(draw(e, r, d), draw(e, r, f), draw(e), draw(e, f), 1 + draw(e, f) / 4)


def naive(y, x, s: Site, n: int, weights: np.ndarray, gate: float) -> np.ndarray:
    """One token, in fp64."""
    wide = lambda v: np.asarray(v, np.float64)
    for e, w in enumerate(weights):
        y = y + gate * w * wide(s.scale[e]) * (wide(s.b[e]).T @ (wide(s.a[e]) @ x) + wide(s.bias[e]))
    return y


@pytest.mark.parametrize("kind", ["ids", "weights", "factored"])
def test_a_projection_is_its_formula(kind):
    rng = np.random.default_rng(0)
    s, n = site(rng), 9
    x, y = rng.standard_normal((n, 5)), rng.standard_normal((n, 6))
    gate, soft = rng.uniform(0.5, 2, n), rng.uniform(0, 1, (n, 4))
    ids = np.array([0, 3, NONE, 1, 1, NONE, 2, 0, 3])
    f32 = lambda v: jnp.asarray(v, jnp.float32)
    if kind == "ids":
        hard = np.eye(4)[np.maximum(ids, 0)] * (ids >= 0)[:, None]
        want = np.stack([naive(y[i], x[i], s, i, hard[i], gate[i]) for i in range(n)])
        want = np.where((ids >= 0)[:, None], s.growth.astype(np.float64)[ids] * want, want)
        choice = Choice(ids=jnp.asarray(ids), gate=f32(gate))
    elif kind == "weights":
        s = Site(s.a, s.b, s.scale, s.bias)
        want = np.stack([naive(y[i], x[i], s, i, soft[i], gate[i]) for i in range(n)])
        choice = Choice(weights=f32(soft), gate=f32(gate))
    else:
        s = Site(s.a, s.b, s.scale)
        a = np.einsum("ne,erd->nrd", soft, s.a)
        b = np.einsum("ne,e,erf->nrf", soft, s.scale, s.b)
        want = y + np.einsum("nrf,nrd,nd->nf", b, a, x)
        choice = Choice(weights=f32(soft), factored=True)
    got = adapt(f32(y.T), f32(x.T), jax.tree.map(jnp.asarray, s), choice).T
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_mixture_over_dora_is_refused():
    s = jax.tree.map(jnp.asarray, site(np.random.default_rng(0)))
    with pytest.raises(UserError, match="got weights for a bank with DoRA, expected ids"):
        adapt(jnp.zeros((6, 2)), jnp.zeros((5, 2)), s, Choice(weights=jnp.ones((2, 4))))


def test_a_trace_replays_to_the_bit():
    cfg, params = fakes.model(NAME)
    bank = library(False).bank
    rng = np.random.default_rng(5)
    ids = rng.integers(-1, len(experts.KINDS), (cfg.layers, 2 * T))
    tokens = rows(2).reshape(-1)
    bank = type(bank)(bank.layers)
    go = jax.jit(lambda choices: transformer.apply(cfg, params, tokens, dense(2, T), bank=bank, route=Route(choices)))
    first = go({"layer": Choice(ids=ids)})
    np.testing.assert_array_equal(first.trace["layer"].ids, ids)
    np.testing.assert_array_equal(go(first.trace).hidden, first.hidden)


def test_dora_of_an_embedding_is_that_of_the_merged_one():
    cfg, params = fakes.model(NAME)
    plain = fresh(cfg, params, "e", rank=2, sites=("embed",), seed=1, spread=0.3)
    (weights,) = plain.sites[EMBED]
    norm = np.asarray(lora.norms(params["embed"]["weight"].T, weights.a, weights.b, weights.scale))
    magnitude = (norm * np.random.default_rng(0).uniform(0.7, 1.3, norm.shape)).astype(np.float32)
    found = dataclasses.replace(plain, sites={EMBED: (dataclasses.replace(weights, magnitude=magnitude),)})
    slots = pack(BankSpec.holding([found, plain]), params, found), pack(BankSpec.holding([found, plain]), params, plain)
    filled = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(slot.ends for slot in slots))
    bank = dataclasses.replace(new_bank(BankSpec.holding([found, plain]), params), ends=filled)
    ids, tokens = np.array([0, 1, NONE, 0, 1]), np.array([3, 3, 3, 8, 8])
    got = embed(bank, ids, tokens, params["embed"]["weight"][tokens])
    tables = [adapters.merge(cfg, params, one)[1]["embed"]["weight"] for one in (found, plain)] + [
        params["embed"]["weight"]
    ]
    want = np.stack([tables[i][token] for i, token in zip(ids, tokens, strict=True)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(want[0] - want[1]).max() > 0.05


SPEC = BankSpec(slots=2, ranks={"attn.q_proj": 3})
REFUSED = {
    "another site": ("plain", SPEC, r"adapts attn.k_proj, expected one of attn.q_proj: add it to ranks"),
    "a higher rank": (
        "rslora",
        BankSpec(slots=1, ranks={"attn.q_proj": 3, "attn.o_proj": 5}),
        "got rank 5 at attn.q_proj, expected at most 3: raise the bank's rank",
    ),
    "a bias": ("bias", BankSpec(slots=1, ranks={"attn.k_proj": 1, "mlp.up_proj": 1}), "make the bank with biases=True"),
    "dora": ("dora", BankSpec(slots=1, ranks={"mlp.down_proj": 2, "attn.v_proj": 2}), "with magnitudes=True"),
    "a head": ("whole", SPEC, r"replaces head.weight, expected one of nothing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case):
    kind, spec, message = REFUSED[case]
    cfg, params = fakes.model(NAME)
    with pytest.raises(UserError, match=message) as caught:
        pack(spec, params, experts.adapter(cfg, params, kind))
    assert "\n" not in str(caught.value)
    assert kind in str(caught.value)


def test_an_adapter_of_another_base_is_refused():
    cfg, params = fakes.model(NAME)
    found = experts.adapter(*fakes.model("qwen3"), "plain")
    with pytest.raises(UserError, match="it is of another base|expected the model's"):
        pack(BankSpec.holding([found]), params, found)


@pytest.mark.parametrize("unrolled", [False, True])
def test_weights_of_the_base_that_an_adapter_carries_must_be_the_banks(unrolled):
    """One base serves all experts: a bias that was trained in place would be lost without a word."""
    _, params = fakes.weights("qwen2_window", unrolled=unrolled)
    layers = fakes.model("qwen2_window")[1]["layers"]
    biases = tuple(np.asarray(leaf) for leaf in layers["attn"]["q_proj"]["bias"])
    path, table = ("layers", "attn", "q_proj", "bias"), np.asarray(params["embed"]["weight"])
    carried = {path: biases, ("embed", "weight"): (table,), ("head", "weight"): (table,)}
    plain = Adapter(name="x", sites={}, base=carried if "head" not in params else {path: biases})
    pack(BankSpec(slots=1, ranks={}), params, plain)
    moved = dataclasses.replace(plain, base={path: (None, *(leaf + 0.1 for leaf in biases[1:]))})
    with pytest.raises(UserError, match="adapter 'x': got layers.attn.q_proj.bias other than the base's.*merge the"):
        pack(BankSpec(slots=1, ranks={}), params, moved)


def test_a_site_that_the_model_has_not_is_refused():
    with pytest.raises(UserError, match="got site 'attn.w_proj'"):
        new_bank(BankSpec(slots=1, ranks={"attn.w_proj": 1}), fakes.model(NAME)[1])


def test_an_unrolled_model_needs_an_unrolled_bank():
    cfg, params = fakes.weights(NAME, unrolled=True)
    with pytest.raises(UserError, match="got a stacked bank for unrolled layers"):
        transformer.apply(
            cfg, params, rows(1)[0], dense(1, T), bank=library(False).bank, route=Route.of(np.zeros(T, int))
        )


def test_a_spec_tells_its_bytes_beforehand():
    for unrolled in (False, True):
        params = fakes.weights(NAME, unrolled=unrolled)[1]
        spec = library(unrolled).spec
        assert size(spec, params) == sum(leaf.nbytes for leaf in jax.tree.leaves(library(unrolled).bank))


def test_an_empty_adapter_is_the_base():
    cfg, params = fakes.model(NAME)
    lib = Library(SPEC, params)
    lib.add(Adapter(name="", sites={}))
    slot = lib.acquire("")
    tokens = rows(1)
    got = run(cfg, params, tokens, lib.bank, np.full(T, slot))
    np.testing.assert_array_equal(got, run(cfg, params, tokens, lib.bank, np.full(T, NONE)))
