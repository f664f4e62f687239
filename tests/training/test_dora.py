"""DoRA in a bank against the plain formula, layer by layer, and through training into an adapter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import lora
from molora_jax.adapters.bank import adapt
from molora_jax.adapters.route import Choice
from molora_jax.adapters.spec import BankSpec, new_bank, pack, unpack, write
from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.training.dora import decomposed, magnitudes
from tests import experts, fakes
from tests.numerics import assert_close

NAME = "llama_untied"
BLOCK, LEAF = "mlp", "down_proj"


def setup(dtype=jnp.float32):
    cfg, params = fakes.model(NAME, dtype)
    found = experts.adapter(*fakes.model(NAME), "dora")
    spec = BankSpec.holding([found], slots=2, dtype=dtype)
    return params, write(new_bank(spec, params), 1, pack(spec, params, found)), found


def test_magnitudes_are_the_adapters_and_give_the_growth_back():
    params, bank, found = setup()
    m = magnitudes(params, bank)
    for path, layer, weights in found.weights():
        assert_close(m[path[1]][path[2]][layer, 1], weights.magnitude)
    back = decomposed(params, bank, m)
    assert_close(back.layers[BLOCK][LEAF].growth[:, 1], bank.layers[BLOCK][LEAF].growth[:, 1])


def test_gradients_are_those_of_the_formula_with_its_norm_detached():
    with jax.enable_x64(True):
        params, bank, _ = setup(jnp.float64)
        rng = np.random.default_rng(0)
        weight = params["layers"][BLOCK][LEAF]["weight"]
        x, out = (jnp.asarray(rng.standard_normal((width, 5))) for width in weight.shape[:0:-1])
        m = jax.tree.map(lambda leaf: leaf * jnp.asarray(rng.uniform(0.8, 1.2, leaf.shape)), magnitudes(params, bank))
        site = bank.layers[BLOCK][LEAF]
        scale = float(site.scale[0, 1])

        def ours(a, b, own):
            sites = bank.layers[BLOCK] | {LEAF: dataclasses.replace(site, a=a, b=b)}
            made = dataclasses.replace(bank, layers=bank.layers | {BLOCK: sites})
            made = decomposed(params, made, m | {BLOCK: m[BLOCK] | {LEAF: own}}).at(0)[BLOCK][LEAF]
            return jnp.sum(out * adapt(weight[0] @ x, x, made, Choice(ids=jnp.ones(5, jnp.int32))))

        def formula(a, b, own):
            y = lora.apply(x.T, weight[0], a[0, 1], b[0, 1].T, scale, magnitude=own[0, 1])
            return jnp.sum(out * y.T)

        operands = site.a, site.b, m[BLOCK][LEAF]
        got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*operands) for f in (ours, formula))
        jax.tree.map(lambda a, b: assert_close(a, b, "model"), got, want)
        assert all(np.abs(leaf).max() > 0 for leaf in want[1])


def test_a_trained_magnitude_comes_out_of_its_slot():
    params, bank, found = setup()
    m = jax.tree.map(lambda leaf: leaf * 1.25, magnitudes(params, bank))
    moved = jax.tree.map(lambda leaf: leaf, bank.layers[BLOCK][LEAF])
    moved = dataclasses.replace(moved, b=moved.b * 0.5)
    bank = dataclasses.replace(bank, layers=bank.layers | {BLOCK: bank.layers[BLOCK] | {LEAF: moved}})
    back = unpack(decomposed(params, bank, m), 1, params, found)
    for (*_, new), (*_, old) in zip(back.weights(), found.weights(), strict=True):
        assert_close(new.magnitude, old.magnitude * np.float32(1.25))


def test_a_bank_without_dora_is_refused():
    cfg, params = fakes.model(NAME)
    bank = new_bank(BankSpec(slots=1, ranks={"attn.q_proj": 1}), params)
    with pytest.raises(UserError, match="got a bank without magnitudes, expected room for them"):
        magnitudes(params, bank)
    unrolled = transformer.unstack(dict(params))
    with pytest.raises(UserError, match="got a bank of unrolled layers"):
        magnitudes(unrolled, new_bank(BankSpec(slots=1, ranks={"attn.q_proj": 1}, magnitudes=True), unrolled))
