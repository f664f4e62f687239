"""The memory of a gate: any cut of a sequence, pads, packed rows, rows moved about, many cores, long decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import gate
from molora_jax.adapters.gate import GateConfig
from tests.adapters.gate_reference import CONFIGS, RECURRENT, D, R, inputs, params, reference
from tests.numerics import assert_close

run = jax.jit(gate.apply, static_argnums=0)
run_stack = jax.jit(gate.apply_stack, static_argnums=0)
KINDS = ["mamba", "gru", "lstm"]
kinds = pytest.mark.parametrize("name", KINDS)
mixed = pytest.mark.parametrize("name", [*KINDS, "linear-diagonal-of-h", "toplora"])


def same(got, want):
    jax.tree.map(functools.partial(assert_close, kind="model"), got, want)


def rows(state, index):
    return jax.tree.map(lambda leaf: leaf[index], state)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_leads_with_rows_and_is_empty_without_memory(name):
    cfg = CONFIGS[name]
    state = gate.new_state(cfg, params(cfg, stack=(4,)), 3)
    leaves = jax.tree.leaves(state)
    assert bool(leaves) == cfg.recurrent
    assert all(leaf.shape[:2] == (3, 4) and leaf.dtype == jnp.float32 for leaf in leaves)


@kinds
@pytest.mark.parametrize("prompt", [0, 1, 2, 5, 7])
def test_prefill_then_single_tokens_equals_the_whole(name, prompt):
    """mamba #641, #500, fla #285; the released decoder forgets the state and so fails this."""
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 2, 8)
    whole, last = run(cfg, tree, x)
    lam, state = run(cfg, tree, x[:, :prompt]) if prompt else (whole[:, :0], gate.new_state(cfg, tree, 2))
    parts = [lam]
    for t in range(prompt, 8):
        lam, state = run(cfg, tree, x[:, t : t + 1], state)
        parts.append(lam)
    same((jnp.concatenate(parts, axis=1), state), (whole, last))


@kinds
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100])
def test_a_prompt_in_parts_equals_the_whole_off_every_chunk_boundary(name, cut):
    """transformers #47250, sglang #31833, fla #1142: the scan works in chunks of 64."""
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 1, 130)
    whole = run(cfg, tree, x)
    first, state = run(cfg, tree, x[:, :cut])
    second, state = run(cfg, tree, x[:, cut:], state)
    same((jnp.concatenate([first, second], axis=1), state), whole)


@kinds
def test_losing_the_state_would_be_noticed(name):
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 1, 8)
    alone, _ = run(cfg, tree, x[:, 7:])
    assert np.abs(alone - run(cfg, tree, x)[0][:, 7:]).max() > 1e-3


PADS = {"none": [], "left": [0, 1, 2], "right": [6, 7, 8], "middle": [3, 4, 6], "around": [0, 5, 8]}


@mixed
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("place", PADS)
def test_pads_never_change_a_real_token(name, batch, place):
    """mamba #66, #783, transformers #31540, #32677, and #46773: also in a batch of one."""
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, batch, 9)
    valid = np.ones((batch, 9), bool)
    valid[-1, PADS[place]] = False
    lam, state = run(cfg, tree, np.where(valid[:, :, None], x, 50.0).astype(np.float32), valid=valid)
    assert_close(lam, reference(cfg, tree, x, valid), "model")
    np.testing.assert_array_equal(np.asarray(lam)[~valid], 1)
    for b in range(batch):
        alone, last = run(cfg, tree, x[b : b + 1, valid[b]])
        same((lam[b : b + 1, valid[b]], rows(state, slice(b, b + 1))), (alone, last))


@kinds
def test_a_row_of_pads_keeps_its_state_to_the_bit(name):
    cfg = CONFIGS[name]
    tree = params(cfg)
    _, before = run(cfg, tree, inputs(cfg, 2, 3))
    for tokens in (1, 3):
        _, after = run(cfg, tree, inputs(cfg, 2, tokens), before, valid=np.array([[True], [False]]).repeat(tokens, 1))
        jax.tree.map(np.testing.assert_array_equal, rows(after, 1), rows(before, 1))


@kinds
def test_gradients_through_pads_are_finite_and_those_without_them(name):
    """The gradient of where(mask, exp(d), 0) is NaN if d is masked too late."""
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 2, 9)
    valid = np.ones((2, 9), bool)
    valid[:, PADS["around"]] = False
    loss = lambda tree, x, valid: jnp.sum((gate.apply(cfg, tree, x, valid=valid)[0] - 1) ** 2)
    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    padded, dx = grad(tree, np.where(valid[:, :, None], x, 50.0).astype(np.float32), valid)
    alone, dx_alone = grad(tree, x[:, valid[0]], valid[:, valid[0]])
    same((padded, dx[:, valid[0]]), (alone, dx_alone))
    np.testing.assert_array_equal(np.asarray(dx)[~valid], 0)


@mixed
@pytest.mark.parametrize("pads", [[], [0, 4, 5, 9]])
def test_packed_equals_separate(name, pads):
    """slime #1686: the convolution must be told of the segments like the recurrence; fla #838: and of the pads."""
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 1, 10)
    valid, reset = np.ones((1, 10), bool), np.zeros((1, 10), bool)
    valid[0, pads] = False
    reset[0, [3, 5, 8]] = True
    start = run(cfg, tree, inputs(cfg, 1, 4, seed=9))[1]
    lam, state = run(cfg, tree, x, start, valid=valid, reset=reset)
    for begin, end in ((3, 5), (5, 8), (8, 10)):
        real = [t for t in range(begin, end) if t not in pads]
        alone, last = run(cfg, tree, x[:, real])
        same(lam[:, real], alone)
    same(state, last)


@kinds
def test_beams_reorder_with_their_rows(name):
    """transformers #29730, #46612: beam search that leaves the state in place."""
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 3, 6)
    order = np.array([2, 0, 2])
    _, state = run(cfg, tree, x[:, :4])
    lam, state = run(cfg, tree, x[:, 4:], rows(state, order))
    moved = np.concatenate([x[order, :4], x[:, 4:]], axis=1)
    whole, last = run(cfg, tree, moved)
    same((lam, state), (whole[:, 4:], last))


@kinds
def test_a_rejected_draft_is_undone_by_its_snapshot(name):
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 2, 6)
    _, snapshot = run(cfg, tree, x[:, :3])
    _, drafted = run(cfg, tree, inputs(cfg, 2, 4, seed=8), snapshot)
    kept = jnp.asarray([True, False])  # of row 0
    pick = lambda new, old: jnp.where(kept.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    lam, _ = run(cfg, tree, x[:, 3:], jax.tree.map(pick, drafted, snapshot))
    same(lam[1], run(cfg, tree, x)[0][1, 3:])
    assert np.abs(lam[0] - run(cfg, tree, x)[0][0, 3:]).max() > 1e-4


@pytest.mark.parametrize("name", ["mamba", "mamba-of-h", "gru-of-h", "lstm", "linear", "toplora"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_stack_equals_its_cores_one_by_one(name, tokens):
    cfg = CONFIGS[name]
    trees, valid = params(cfg, stack=(3,)), np.ones((2, tokens), bool)
    valid[0, :1] = False
    x = np.stack([inputs(cfg, 2, tokens, seed) for seed in range(3)], axis=2)
    x = x if cfg.reads == "h" else x[:, :, 0]
    state = gate.new_state(cfg, trees, 2)
    state = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(0), leaf.shape), state)
    lam, last = run_stack(cfg, trees, x, state, valid=valid)
    for g in range(3):
        tree, mine = jax.tree.map(lambda leaf, g=g: leaf[g], trees), x[:, :, g] if cfg.reads == "h" else x
        alone, end = run(cfg, tree, mine, jax.tree.map(lambda leaf, g=g: leaf[:, g], state), valid=valid)
        same((lam[:, :, g], jax.tree.map(lambda leaf, g=g: leaf[:, g], last)), (alone, end))


def test_a_large_stack_goes_through_in_parts_with_its_gradients():
    """Six cores of 2 rows, 8 channels and 48 states: four fit into a step, and two are left."""
    big = GateConfig(states=48)
    trees, x = params(big, stack=(6,), heads=1), inputs(big, 2, 5)
    assert gate._at_once(6, gate.new_state(big, trees, 2), 5) == 4
    assert gate._at_once(6, gate.new_state(big, trees, 2), 1) == 6
    loss = lambda apply: lambda trees, x: jnp.sum(apply(big, trees, x)[0] ** 2)
    found, dx = jax.jit(jax.grad(loss(gate.apply_stack), argnums=(0, 1)))(trees, x)
    grad = jax.jit(jax.grad(loss(gate.apply), argnums=(0, 1)))
    alone = [grad(jax.tree.map(lambda leaf, g=g: leaf[g], trees), x) for g in range(6)]
    same(found, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree for tree, _ in alone)))
    same(dx, sum(dx for _, dx in alone))


def test_a_stack_is_one_scan():
    cfg = CONFIGS["mamba"]
    text = lambda stack, tokens: run_stack.lower(cfg, params(cfg, stack=(stack,)), inputs(cfg, 1, tokens)).as_text()
    assert text(4, 9).count("stablehlo.while") == text(1, 9).count("stablehlo.while") > 0
    assert "stablehlo.while" not in text(4, 1)


def decaying(dt, states=3):
    """A Mamba gate whose step sizes are about dt."""
    cfg = GateConfig(states=states, taps=2, norm=True)
    tree = params(cfg)
    tree["cell"]["dt_proj"] = {
        "weight": 0 * tree["cell"]["dt_proj"]["weight"],
        "bias": jnp.full_like(tree["cell"]["dt_proj"]["bias"], np.log(np.expm1(dt)) if dt < 50 else dt),
    }
    return cfg, tree


@pytest.mark.parametrize("dt", [1e-4, 0.5, 160.0])
def test_long_rows_stay_right_however_fast_the_state_decays(dt):
    """A scan of products of decays is infinite from 176 tokens on at exp(-0.5) each; mamba-mini #1, cuLA #89."""
    cfg, tree = decaying(dt)
    x = inputs(cfg, 1, 200)
    assert_close(run(cfg, tree, x)[0], reference(cfg, tree, x), "model")
    grads = jax.jit(jax.grad(lambda tree: jnp.sum(gate.apply(cfg, tree, x)[0])))(tree)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_slow_state_survives_a_thousand_bfloat16_tokens():
    """A state kept in bf16 would be off by percents; it is fp32 whatever the dtype of the activations."""
    cfg, tree = decaying(1e-3)
    x = jnp.asarray(inputs(cfg, 1, 1000), jnp.bfloat16)
    state = gate.new_state(cfg, tree, 1)

    def step(state, token):
        lam, state = gate.apply(cfg, tree, token[:, None], state)
        return state, lam[:, 0]

    state, lam = jax.jit(lambda state, x: jax.lax.scan(step, state, x.swapaxes(0, 1)))(state, x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    assert_close(lam.swapaxes(0, 1), reference(cfg, tree, np.asarray(x).astype(np.float32)), "model")


def test_huge_inputs_give_no_nan():
    """TopLoRA's exp diverged in training; a bounded or clamped gate cannot."""
    for activation, clamp in (("exp", 4.0), ("softplus", 4.0), ("bounded", None)):
        cfg = GateConfig(kind="linear", activation=activation, clamp=clamp)
        x = 1e4 * inputs(cfg, 1, 6)
        lam, grads = jax.value_and_grad(lambda tree, cfg=cfg, x=x: jnp.sum(gate.apply(cfg, tree, x)[0]))(params(cfg))
        assert lam <= 6 * 2 * (clamp or 2)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)), activation


def test_results_are_the_same_in_every_run():
    """mamba #1024: a step that gave other numbers each time."""
    cfg = CONFIGS["mamba"]
    tree, x = params(cfg), inputs(cfg, 2, 9)
    grad = jax.jit(jax.grad(lambda tree: jnp.sum(gate.apply(cfg, tree, x)[0] ** 2)))
    jax.tree.map(np.testing.assert_array_equal, (run(cfg, tree, x), grad(tree)), (run(cfg, tree, x), grad(tree)))


def test_every_recurrent_kind_is_tried():
    assert {CONFIGS[name].kind for name in KINDS} == {CONFIGS[name].kind for name in RECURRENT}
    assert (D, R) != (R, D)
