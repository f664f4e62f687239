"""Taking a gate's memory, or its whole dependence on tokens, away; and looking at its scales."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import ablation, bank_gates
from molora_jax.adapters import gate as gates
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, unpack, write
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.nn.layout import dense, ragged
from tests import fakes
from tests.numerics import assert_close

NAME, T = "llama_untied", 5
SITES = ("attn.q_proj", "attn.k_proj", "mlp.up_proj", "mlp.down_proj")
LOUD = GateConfig(start="published", states=3)
TOKENS = np.random.default_rng(1).integers(0, 97, 2 * T)
both = pytest.mark.parametrize("unrolled", [False, pytest.param(True, marks=pytest.mark.slow)])


def gated(config: GateConfig = LOUD, change=lambda out: out | {"weight": out["weight"] * 30}, **kw):
    """An expert of rank 2 whose gates read out what `change` makes of their heads."""
    made = fresh(*fakes.model(NAME), "gated", rank=2, sites=SITES, spread=0.3, gate=config, **kw)
    groups = tuple(
        dataclasses.replace(g, cores=tuple(core | {"out": change(core["out"])} for core in g.cores)) for g in made.gates
    )
    return dataclasses.replace(made, gates=groups)


def bank_of(*adapters, unrolled: bool = False):
    lib = Library(BankSpec.holding(adapters), fakes.weights(NAME, unrolled=unrolled)[1])
    for adapter in adapters:
        lib.add(adapter)
        lib.acquire(adapter.name)
    return lib.bank


@functools.partial(jax.jit, static_argnums=(1, 2))
def run(bank, shape=(2, T), unrolled: bool = False, ids=0, valid=None):
    cfg, params = fakes.weights(NAME, unrolled=unrolled)
    route = Route.of(jnp.broadcast_to(ids, shape[0] * shape[1]))
    return transformer.apply(
        cfg, params, TOKENS, dense(*shape, valid=valid), bank=bank, route=route, taps=("gates", "hidden")
    )


@both
def test_a_tap_shows_the_scales_of_each_layer_and_site(unrolled):
    cfg, params = fakes.model(NAME)
    adapter, plain = gated(), fresh(*fakes.model(NAME), "plain", rank=3, sites=SITES)
    out = run(bank_of(adapter, plain, unrolled=unrolled), unrolled=unrolled)
    assert set(out.taps["gates"]) == set(SITES)
    x = np.asarray(params["embed"]["weight"])[TOKENS]
    for layer in range(cfg.layers):
        normed = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + cfg.norm_eps)
        normed = normed * np.asarray(params["layers"]["attn_norm"]["weight"][layer])
        own, _ = gates.apply(LOUD, adapter.gates[0].cores[layer], jnp.asarray(normed.reshape(2, T, -1)))
        lam = out.taps["gates"]["attn.q_proj"]
        assert lam.shape == (cfg.layers, 2 * T, 2)
        assert_close(lam[layer, :, 0], np.asarray(own).reshape(-1), "model")
        assert np.std(lam[layer, :, 0]) > 1e-2
        np.testing.assert_array_equal(lam[..., 1], 1)  # a plain expert
        x = np.asarray(out.taps["hidden"][layer])


def test_without_gates_there_is_no_scale_and_an_unknown_tap_is_refused():
    plain = fresh(*fakes.model(NAME), "plain", rank=3, sites=SITES)
    assert run(bank_of(plain)).taps["gates"] == {}
    cfg, params = fakes.model(NAME)
    with pytest.raises(UserError, match="got the tap 'gate', expected one of hidden, gates"):
        transformer.apply(cfg, params, TOKENS, dense(2, T), taps=("gate",))


def test_without_memory_every_token_is_the_first():
    """In the first layer, what q and k read does not depend on the tokens before."""
    bank = bank_of(gated())
    forgetful = run(ablation.without_memory(bank)).taps["gates"]
    alone = run(bank, (2 * T, 1)).taps["gates"]
    for site in SITES[:2]:
        assert_close(forgetful[site][0], alone[site][0], "model")
        assert np.abs(forgetful[site][0] - run(bank).taps["gates"][site][0]).max() > 1e-2


@pytest.mark.slow
def test_without_memory_a_carried_state_is_not_looked_at():
    bank = bank_of(gated())
    layer = jax.tree.map(lambda leaf: leaf[0], bank.layers["gates"])
    name, stack = next(iter(layer.items()))
    tables = jnp.zeros((1, 2, 2), jnp.int32)
    laid = ragged(jnp.array([3, 4]), jnp.array([1, 2]), tables, tokens=4, tile=1, page_size=4)
    x = np.random.default_rng(3).standard_normal((fakes.model(NAME)[0].width, 4)).astype(np.float32)
    empty = jax.tree.map(lambda leaf: leaf[0], bank_gates.new_state(bank.gates, bank.layers, 2)[name])
    full = jax.tree.map(lambda leaf: leaf + 3, empty)

    @jax.jit
    def scales(bank, state):
        found, _ = bank_gates.scales(bank.gates, name, stack, jnp.asarray(x), None, laid, state)
        return found["attn.q_proj"][:3]

    forgetful = ablation.without_memory(bank)
    np.testing.assert_array_equal(scales(forgetful, empty), scales(forgetful, full))
    assert np.abs(scales(bank, empty) - scales(bank, full)).max() > 1e-2


@both
@pytest.mark.parametrize("output", ["scalar", pytest.param("diagonal", marks=pytest.mark.slow)])
def test_frozen_scales_are_a_gate_that_says_the_same_of_every_token(output, unrolled):
    """λ = 1 + tanh(b/2) is 1.6 in one direction of rank space and 0.3 in the other."""
    constants = np.array([1.6, 0.3] if output == "diagonal" else [1.6], np.float32)
    bias = lambda out: out | {"bias": np.broadcast_to(2 * np.arctanh(constants - 1), out["bias"].shape)}
    adapter = gated(GateConfig(activation="bounded", output=output, states=3), bias, share="input")
    plain = fresh(*fakes.model(NAME), "plain", rank=3, sites=SITES, spread=0.3, seed=4)
    bank, valid = bank_of(adapter, plain, unrolled=unrolled), np.arange(2 * T).reshape(2, T) % T > 1
    ids = np.arange(2 * T) % 2
    real = run(bank, unrolled=unrolled, ids=ids, valid=valid)
    found = ablation.means(real.taps["gates"], valid.reshape(-1))
    for lam in found.values():
        want = np.ones(lam.shape)
        want[:, 0] = constants if output == "diagonal" else constants[0]
        np.testing.assert_allclose(lam, want, rtol=1e-5)
    bare = ablation.frozen(bank, found)
    assert bare.gates is None
    got = run(bare, unrolled=unrolled, ids=ids, valid=valid)
    assert got.taps["gates"] == {}
    seen = valid.reshape(-1)
    assert_close(got.hidden[seen], np.asarray(real.hidden)[seen], "model")
    unscaled = ablation.frozen(bank, jax.tree.map(jnp.ones_like, found))
    assert np.abs(run(unscaled, unrolled=unrolled, ids=ids, valid=valid).hidden - real.hidden)[seen].max() > 1e-2


def test_means_leave_out_what_does_not_count():
    lam = np.arange(12, dtype=np.float32).reshape(1, 6, 2)
    counts = np.array([0, 1, 0, 0, 1, 1], bool)
    got = ablation.means({"attn.q_proj": lam}, counts)["attn.q_proj"]
    np.testing.assert_allclose(got, [[20 / 3, 23 / 3]], rtol=1e-6)


def test_what_cannot_be_ablated_is_refused():
    plain = bank_of(fresh(*fakes.model(NAME), "plain", rank=3, sites=SITES))
    for ablate in (ablation.without_memory, lambda bank: ablation.frozen(bank, {})):
        with pytest.raises(UserError, match="got a bank without gates"):
            ablate(plain)
    with pytest.raises(UserError, match=r"got constants for \['attn.o_proj'\], expected \['attn.k_proj'"):
        ablation.frozen(bank_of(gated()), {"attn.o_proj": jnp.ones((1, 1))})


@both
@pytest.mark.parametrize("share", ["matrix", "layer"])
def test_trained_gates_come_out_of_their_slot(share, unrolled):
    found = gated(share=share)
    _, params = fakes.weights(NAME, unrolled=unrolled)
    spec = BankSpec.holding([found], slots=2)
    bank = write(new_bank(spec, params), 1, pack(spec, params, found))
    back = unpack(bank, 1, params, found)
    jax.tree.map(np.testing.assert_array_equal, [g.cores for g in back.gates], [g.cores for g in found.gates])
    louder = lambda layer: layer | {"gates": jax.tree.map(lambda v: v if v.dtype == bool else v + 1, layer["gates"])}
    layers = [louder(layer) for layer in bank.layers] if unrolled else louder(bank.layers)
    back = unpack(dataclasses.replace(bank, layers=layers), 1, params, found)
    plus = jax.tree.map(lambda leaf: leaf + np.float32(1), [g.cores for g in found.gates])
    jax.tree.map(np.testing.assert_array_equal, [g.cores for g in back.gates], plus)
    with pytest.raises(UserError, match="got a bank without gates at attn.q_proj"):
        unpack(dataclasses.replace(bank, gates=None), 1, params, found)
