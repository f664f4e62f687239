"""Gated experts in a bank beside plain ones: each projection against its own gate run alone, row by row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import bank_gates
from molora_jax.adapters import gate as gates
from molora_jax.adapters.bank import LayerExperts, Site, update
from molora_jax.adapters.fresh import ALL_LINEAR, fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import NONE, Choice, Route
from molora_jax.adapters.spec import BankSpec
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests import fakes

NAME, T = "llama_untied", 6
LOUD = GateConfig(start="published", states=3)
KINDS = {
    "mamba": LOUD,
    "diagonal": dataclasses.replace(LOUD, output="diagonal"),
    "reads_h": dataclasses.replace(LOUD, reads="h"),
    "lstm": GateConfig(kind="lstm", start="published", hidden=5),
    "linear": GateConfig(kind="linear", start="published"),
}


FAST = ("mamba", "diagonal")


def gated(kind: str = "mamba", share: str = "matrix", seed: int = 0, name: str = "gated"):
    """Loud enough for its scales to matter."""
    config = KINDS[kind]
    made = fresh(*fakes.model(NAME), name, rank=2, seed=seed, spread=0.3, gate=config, share=share)
    louder = lambda leaf: leaf * 20 if leaf.ndim > 1 and leaf.dtype != bool else leaf
    groups = tuple(
        dataclasses.replace(g, cores=tuple({**core, "out": jax.tree.map(louder, core["out"])} for core in g.cores))
        for g in made.gates
    )
    return dataclasses.replace(made, gates=groups)


def library(*adapters) -> Library:
    made = Library(BankSpec.holding(adapters, slots=len(adapters) + 1), fakes.model(NAME)[1])
    for adapter in adapters:
        made.add(adapter)
        made.acquire(adapter.name)
    return made


def plain(name: str = "plain"):
    return fresh(*fakes.model(NAME), name, rank=3, seed=5, spread=0.3)


@pytest.mark.parametrize("share", ["matrix", "input", "layer"])
@pytest.mark.parametrize("kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_each_projection_is_scaled_by_its_own_gate_over_its_own_row(kind, share):
    cfg, _ = fakes.model(NAME)
    adapters = [gated(kind, share), plain(), gated(kind, share, seed=3, name="other")]
    lib, layer, rng = library(*adapters), 1, np.random.default_rng(0)
    valid = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]], bool)
    ids = rng.integers(-1, 3, 2 * T)
    inputs = {
        "attn": cfg.width,
        "attn.o_proj": cfg.heads * cfg.head_width,
        "mlp": cfg.width,
        "mlp.down_proj": cfg.mlp_width,
    }
    inputs = {name: rng.standard_normal((width, 2 * T)).astype(np.float32) for name, width in inputs.items()}
    width = lambda site: adapters[0].sites["layers", *site.split(".")][layer].b.shape[0]

    @jax.jit
    def project(bank, inputs):
        experts, found = LayerExperts(bank.at(layer), Route.of(ids), bank.gates, dense(2, T, valid=valid), {}), {}
        for site in ALL_LINEAR:
            block, leaf = site.split(".")
            if leaf in ("q_proj", "gate_proj"):
                experts.see(block, inputs[block])
            x = inputs.get(site, inputs[block])
            found[site] = experts.project(block, leaf, jnp.zeros((width(site), 2 * T)), x)
        return found

    for site, got in project(lib.bank, inputs).items():
        block, leaf = site.split(".")
        x = inputs.get(site, inputs[block])
        want = np.zeros((2 * T, width(site)))
        for e, adapter in enumerate(adapters):
            lam = alone(adapter, site, layer, inputs, valid)
            w = adapter.sites["layers", block, leaf][layer]
            mine = (ids == e)[:, None] * w.scale * ((x.T @ w.a.T) * lam @ w.b.T)
            want += mine
        real = valid.reshape(-1)
        np.testing.assert_allclose(np.asarray(got).T[real], want[real], rtol=2e-4, atol=2e-5)


run_gate = jax.jit(gates.apply, static_argnums=0)


def alone(adapter, site: str, layer: int, inputs, valid) -> np.ndarray:
    """λ of one expert at one site, [N, 1] or [N, R], from its own core on rows of their own without pads."""
    path = ("layers", *site.split("."))
    for group in adapter.gates:
        if path in group.sites:
            first = ".".join(group.sites[0][1:])
            x = inputs.get(first, inputs[first.split(".")[0]]).T
            if adapter.gate.reads == "h":
                x = x @ adapter.sites[group.sites[0]][layer].a.T
            lam = np.ones((len(x), adapter.sites[path][layer].rank if adapter.gate.output == "diagonal" else 1))
            for row in range(len(valid)):
                at = row * T + np.flatnonzero(valid[row])
                own, _ = run_gate(adapter.gate, group.cores[layer], jnp.asarray(x[at][None]))
                lam[at] = np.asarray(own)[0, :, group.sites.index(path)].reshape(len(at), -1)
            assert lam.std() > 1e-3
            return lam
    return np.ones((valid.size, 1))


@functools.partial(jax.jit, static_argnums=3)
def _hidden(bank, route, tokens, shape, layout):
    cfg, params = fakes.model(NAME)
    return transformer.apply(cfg, params, tokens, dense(*shape, **layout), bank=bank, route=route).hidden


TOKENS = np.random.default_rng(1).integers(0, 97, 2 * T)


def run(lib: Library, ids, **layout):
    return _hidden(lib.bank, Route.of(ids), TOKENS, (2, T), layout)


def test_a_new_gate_leaves_its_expert_as_it_is_to_the_bit():
    fresh_gate = lambda name, **kw: fresh(*fakes.model(NAME), name, rank=2, seed=4, spread=0.3, **kw)
    lib = library(fresh_gate("gated", gate=GateConfig()), fresh_gate("bare"))
    slots = lib.resident
    one = run(lib, np.full(2 * T, slots["gated"]))
    np.testing.assert_array_equal(one, run(lib, np.full(2 * T, slots["bare"])))
    assert np.abs(one - run(lib, np.full(2 * T, NONE))).max() > 0.1


def test_packed_neighbours_do_not_enter_a_gate():
    lib = library(gated())
    ids = np.zeros(2 * T, int)
    segments = np.array([[0, 0, 1, 1, 1, 1], [3, 3, 3, 3, 5, 5]])
    packed = run(lib, ids, segments=segments)
    for start, stop in ((0, 2), (2, 6), (6, 10), (10, 12)):
        own = _hidden(lib.bank, Route.of(ids[start:stop]), TOKENS[start:stop], (1, stop - start), {})
        np.testing.assert_allclose(packed[start:stop], own, rtol=1e-4, atol=2e-5)


def test_a_mixture_scales_every_expert_by_its_own_gate():
    """A mixture with all the weight on one expert is that expert."""
    lib = library(gated(), plain())
    ids = np.random.default_rng(2).integers(0, 2, 2 * T)
    soft = Route.mixture(jnp.asarray(np.eye(3)[ids], jnp.float32))
    got = _hidden(lib.bank, soft, TOKENS, (2, T), {})
    np.testing.assert_allclose(got, run(lib, ids), rtol=1e-4, atol=2e-5)


def test_the_dense_gradient_of_a_hard_choice_knows_every_experts_gate():
    """Beside ids, weights have the gradient of Σ_e w_e λ_e Δ_e: that of the mixture of gated experts."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    site, x, up = Site(draw(3, 2, 5), draw(3, 2, 4), draw(3)), draw(5, 7), draw(4, 7)
    ids, weights, lam = jnp.array([0, 2, 1, 1, 0, 2, 2]), draw(7, 3), jnp.exp(draw(7, 3))
    score = lambda choice: jnp.sum(up * update(x, site, bank_gates.scaled(choice, lam, 2)))
    got = jax.grad(lambda w: score(Choice(ids=ids, weights=w)))(weights)
    want = jax.grad(lambda w: score(Choice(weights=w)))(weights)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(score(Choice(ids=ids, weights=weights)), score(Choice(ids=ids)))
    wide = lam[:, :, None]  # of one rank: it acts as it should, without a gradient that it cannot have
    acts = lambda w: update(x, site, bank_gates.scaled(Choice(ids=ids, weights=w), wide, 2))
    np.testing.assert_array_equal(acts(weights), acts(None))
    assert bank_gates.scaled(Choice(ids=ids, weights=weights), wide, 2).weights is None


def test_sites_that_experts_group_differently_are_refused():
    shared, own = gated(share="input"), gated(share="matrix", name="other")
    with pytest.raises(UserError, match="got gates that group attn.k_proj.* in different experts"):
        BankSpec.holding([shared, own])
    lib = library(shared)
    turned = tuple(
        dataclasses.replace(group, sites=group.sites[::-1]) if len(group.sites) > 1 else group for group in shared.gates
    )
    with pytest.raises(UserError, match="adapter 'turned': got mamba gates at"):
        lib.add(dataclasses.replace(shared, name="turned", gates=turned))


def test_a_group_reads_what_its_first_site_reads():
    """In whatever order a user names them: those that run first come first."""
    base = fakes.model(NAME)
    made = fresh(*base, "x", rank=2, sites=("mlp.up_proj", "attn.o_proj", "attn.q_proj"), gate=LOUD, share="layer")
    (group,) = made.gates
    assert [".".join(path[1:]) for path in group.sites] == ["attn.q_proj", "attn.o_proj", "mlp.up_proj"]
    late = dataclasses.replace(made, gates=(dataclasses.replace(group, sites=group.sites[::-1]),))
    with pytest.raises(UserError, match="got gates of attn.o_proj that read the input of mlp.up_proj, which"):
        BankSpec.holding([late])


def test_a_mixture_of_factors_over_gates_is_refused():
    with pytest.raises(UserError, match="got a mixture of factors over gated experts"):
        bank_gates.scaled(Choice(weights=jnp.ones((2, 3)), factored=True), jnp.ones((2, 3)), 2)


def test_what_a_bank_has_no_room_for_is_refused():
    base = fakes.model(NAME)
    other = fresh(*base, "b", rank=2, gate=GateConfig(kind="gru"))
    with pytest.raises(UserError, match="got gates of 2 configs over the ranks"):
        BankSpec.holding([gated(), other])
    lib = library(gated())
    with pytest.raises(UserError, match=r"adapter 'b': got gru gates at attn.q_proj, expected"):
        lib.add(other)
    with pytest.raises(UserError, match="got gates over ranks \\[1\\], expected 2"):
        lib.add(fresh(*base, "b", rank=1, gate=LOUD))
    diagonal, soft = library(gated("diagonal")), Route.mixture(jnp.ones((2 * T, 2)))
    with pytest.raises(UserError, match="got weights for experts with diagonal gates"):
        _hidden(diagonal.bank, soft, TOKENS, (2, T), {})
