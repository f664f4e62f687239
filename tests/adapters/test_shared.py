"""An adapter that every token has, against the same update merged into the weights by numpy."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import LAYER, Route
from molora_jax.adapters.router import new_router
from molora_jax.adapters.shared import shared, with_shared
from molora_jax.adapters.spec import BankSpec, new_bank
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from tests import fakes
from tests.numerics import assert_close

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = ("attn.q_proj", "attn.v_proj", "attn.o_proj")
TOKENS = jnp.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


def _made(unrolled: bool):
    cfg, params = fakes.weights("llama_tied", unrolled=unrolled)
    new = lambda name, sites, seed: fresh.fresh(cfg, params, name, rank=3, sites=sites, seed=seed, spread=0.3)
    return cfg, params, [new("one", MLP, 1), new("two", MLP[1:], 2)], new("all", ATTENTION, 3)


def _merged(params, adapter):
    """The parameters with W + s B A, in float64."""
    params = copy.copy(params)
    layers = params["layers"]
    stacked = isinstance(layers, dict)
    layers = jax.tree.map(np.array, layers)
    for path, i, update in adapter.weights():
        _, block, name = path
        delta = update.scale * update.b.astype(np.float64) @ update.a.astype(np.float64)
        leaf = layers if stacked else layers[i]
        (leaf[block][name]["weight"][i] if stacked else leaf[block][name]["weight"])[...] += delta
    return params | {"layers": jax.tree.map(jnp.asarray, layers)}


@pytest.mark.parametrize("unrolled", [False, True])
def test_it_adds_to_whatever_expert_a_token_has(unrolled):
    cfg, params, experts, every = _made(unrolled)
    library = Library.holding(experts, params, shared=every)
    bare = Library.holding(experts, params)
    route = Route.of(jnp.array([0, 1, -1, -1, 0, 1, 1, 0, -1, 0]))
    layout = dense(1, len(TOKENS))
    got = transformer.apply(cfg, params, TOKENS, layout, bank=library.bank, route=route).hidden
    want = transformer.apply(cfg, _merged(params, every), TOKENS, layout, bank=bare.bank, route=route).hidden
    assert_close(got, want)
    without = transformer.apply(cfg, params, TOKENS, layout, bank=bare.bank, route=route).hidden
    assert np.max(np.abs(got - without)) > 1e-2


def test_the_router_reads_the_input_of_the_block_that_the_experts_adapt():
    cfg, params, experts, every = _made(False)
    router = new_router(cfg.width, 2, seed=5)
    layout = dense(1, len(TOKENS))
    run = lambda params, library: transformer.apply(
        cfg, params, TOKENS, layout, bank=library.bank, route=Route(router=router)
    )
    got = run(params, Library.holding(experts, params, shared=every))
    want = run(_merged(params, every), Library.holding(experts, params))
    assert_close(got.trace[LAYER].scores, want.trace[LAYER].scores)
    assert np.array_equal(got.trace[LAYER].ids, want.trace[LAYER].ids)
    assert len(np.unique(got.trace[LAYER].ids)) == 2


@pytest.mark.parametrize("unrolled", [False, True])
def test_it_comes_back_to_the_bit_and_no_swap_touches_it(unrolled):
    cfg, params, experts, every = _made(unrolled)
    library = Library(BankSpec.holding(experts, slots=1), params, shared=every)
    for adapter in experts:
        library.add(adapter)
        library.release(library.acquire(adapter.name))
    assert library.swaps == 2
    back = shared(library.bank, params, every)
    for (_, _, got), (_, _, want) in zip(back.weights(), every.weights(), strict=True):
        assert np.array_equal(got.a, want.a)
        assert np.array_equal(got.b, want.b)
        assert got.scale == want.scale


def test_what_cannot_be_shared_is_refused():
    cfg, params, experts, every = _made(False)
    bank = new_bank(BankSpec.holding(experts), params)
    with pytest.raises(UserError, match="second adapter"):
        with_shared(with_shared(bank, params, every), params, every)
    head = fresh.fresh(cfg, params, "head", rank=2, sites=("head",))
    with pytest.raises(UserError, match="expected plain LoRA in the layers"):
        with_shared(bank, params, head)
