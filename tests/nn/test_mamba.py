"""The Mamba block: parity with mambapy, equality of all ways to cut a sequence, pads and packed rows."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

from molora_jax.config import UserError
from molora_jax.nn import mamba as nn
from tests.numerics import assert_close

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "mamba"
WIDTH, TAPS = 7, 3


def golden(name):
    """(arrays by name, parameter tree)."""
    with np.load(GOLDENS / f"{name}.npz", allow_pickle=False) as file:
        arrays = dict(file)
    return arrays, tree(arrays, "weights/")


def tree(arrays, prefix):
    flat = {key.removeprefix(prefix): jnp.asarray(x) for key, x in arrays.items() if key.startswith(prefix)}
    return traverse_util.unflatten_dict(flat, sep=".")


PARAMS = golden("odd")[1]
run = jax.jit(nn.mamba)


def declared(width, **options):
    """The initial parameters of a block."""
    make = lambda: nnx.to_pure_dict(nnx.state(nn.Mamba(width, rngs=nnx.Rngs(0), **options), nnx.Param))
    return jax.jit(make)()


def inputs(rows, length, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, length, WIDTH)), dtype)


def some_state(rows, seed=5):
    """The state after three tokens."""
    return run(PARAMS, inputs(rows, 3, seed))[1]


def same(got, want):
    jax.tree.map(functools.partial(assert_close, kind="model"), got, want)


@pytest.mark.parametrize("name", ["default", "odd"])
def test_outputs_gradients_and_state_are_those_of_mambapy(name):
    arrays, params = golden(name)

    def loss(params, x):
        y, state = nn.mamba(params, x)
        return jnp.sum(y * arrays["dy"]), (y, state)

    (grads, dx), (y, state) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, arrays["x"])
    same((y, dx, state.conv, state.ssm), tuple(arrays[key] for key in ("y", "dx", "conv", "ssm")))
    same(grads, tree(arrays, "gradients/"))


def test_declared_parameters_have_the_names_and_shapes_of_checkpoints():
    _, params = golden("default")
    made = declared(12, states=5, dtype=jnp.float32)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)


def test_a_block_can_be_called():
    block = nn.Mamba(WIDTH, states=3, rngs=nnx.Rngs(0), dtype=jnp.float32)
    x, valid = inputs(2, 1), jnp.asarray([[True], [False]])
    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    same(block(x, valid=valid), run(params, x, valid=valid))


def test_blocks_start_as_the_paper_says():
    params = declared(64, dtype=jnp.bfloat16)
    dt = jax.nn.softplus(params["dt_proj"]["bias"].astype(jnp.float32))
    assert (dt > 0.9e-3).all()
    assert (dt < 1.1e-1).all()
    assert 5e-3 < jnp.exp(jnp.mean(jnp.log(dt))) < 2e-2
    assert jnp.max(jnp.abs(params["dt_proj"]["weight"])) <= 0.5
    np.testing.assert_allclose(jnp.exp(params["A_log"]), np.tile(np.arange(1, 17), (128, 1)), rtol=1e-6)
    assert params["A_log"].dtype == params["D"].dtype == jnp.float32
    assert (params["D"] == 1).all()


def test_stacked_blocks_differ_and_have_a_leading_axis():
    params = declared(WIDTH, states=3, stack=(4,), dtype=jnp.float32)
    assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(params))
    y, _ = jax.jit(jax.vmap(nn.mamba, in_axes=(0, None)))(params, inputs(2, 6))
    assert y.shape == (4, 2, 6, WIDTH)
    one = jax.tree.map(lambda leaf: leaf[2], params)
    assert_close(y[2], run(one, inputs(2, 6))[0], "model")
    assert jnp.max(jnp.abs(y[2] - y[1])) > 0.01


@pytest.mark.parametrize("cut", range(7))
def test_two_parts_equal_the_whole(cut):
    x, start = inputs(2, 6), some_state(2)
    first, state = run(PARAMS, x[:, :cut], start)
    second, state = run(PARAMS, x[:, cut:], state)
    same((jnp.concatenate([first, second], axis=1), state), run(PARAMS, x, start))


def test_single_tokens_equal_the_whole():
    x, state, ys = inputs(2, 8), None, []
    for t in range(8):
        y, state = run(PARAMS, x[:, t : t + 1], state)
        ys.append(y)
    same((jnp.concatenate(ys, axis=1), state), run(PARAMS, x))


def test_a_single_token_is_no_loop():
    text = run.lower(PARAMS, inputs(2, 1), some_state(2)).as_text()
    assert "while" not in text
    assert "while" in run.lower(PARAMS, inputs(2, 2), some_state(2)).as_text()


PADS = {"left": [0, 1, 2], "right": [6, 7, 8], "middle": [3, 4, 6], "around": [0, 5, 8], "most": [0, 1, 3, 5, 6, 8]}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("place", PADS)
def test_pads_are_passed_over(place, rows):
    x, start = inputs(rows, 9), some_state(rows)
    valid = np.ones((rows, 9), bool)
    valid[-1, PADS[place]] = False
    real = np.flatnonzero(valid[-1])
    y, state = run(PARAMS, jnp.where(valid[:, :, None], x, 1e3), start, valid=valid)
    row = jax.tree.map(lambda leaf: leaf[-1:], start)
    alone, last = run(PARAMS, x[-1:, real], row)
    same((y[-1:, real], jax.tree.map(lambda leaf: leaf[-1:], state)), (alone, last))
    if rows == 2:
        same(y[:1], run(PARAMS, x[:1], jax.tree.map(lambda leaf: leaf[:1], start))[0])
    assert_close(y[~valid], np.broadcast_to(PARAMS["out_proj"]["bias"], y[~valid].shape), "model")


def test_a_row_of_pads_keeps_its_state_to_the_bit():
    start = some_state(2)
    valid = jnp.asarray([[True] * 4, [False] * 4])
    _, state = run(PARAMS, inputs(2, 4), start, valid=valid)
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[1], old[1]), state, start)
    _, state = run(PARAMS, inputs(2, 1), start, valid=valid[:, :1])
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[1], old[1]), state, start)


def test_pads_take_no_gradient_and_change_none():
    x = inputs(2, 9)
    valid = np.ones((2, 9), bool)
    valid[:, PADS["around"]] = False
    real = np.flatnonzero(valid[0])
    dy = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape), jnp.float32)
    grad = jax.jit(jax.grad(lambda x, dy, valid: jnp.sum(nn.mamba(PARAMS, x, valid=valid)[0] * dy)))
    padded = grad(x, dy, valid)
    assert np.all(np.asarray(padded)[~valid] == 0)
    assert_close(padded[:, real], grad(x[:, real], dy[:, real], valid[:, real]), "model")


@pytest.mark.parametrize("pads", [[], [0, 4, 5, 9]])
def test_packed_segments_equal_separate_ones(pads):
    x = inputs(1, 10)
    valid, reset = np.ones((1, 10), bool), np.zeros((1, 10), bool)
    valid[0, pads] = False
    reset[0, [3, 5, 8]] = True  # the second begins on a pad of the second case
    y, state = run(PARAMS, x, some_state(1), valid=valid, reset=reset)
    for start, stop in ((3, 5), (5, 8), (8, 10)):
        real = [t for t in range(start, stop) if t not in pads]
        alone, last = run(PARAMS, x[:, real])
        same(y[:, real], alone)
    same(state, last)


def test_a_segment_goes_on_in_the_next_part():
    x = inputs(2, 8)
    reset = np.zeros((2, 8), bool)
    reset[:, 4] = True
    whole = run(PARAMS, x, reset=reset)
    first, state = run(PARAMS, x[:, :5], reset=reset[:, :5])
    second, state = run(PARAMS, x[:, 5:], state)
    same((jnp.concatenate([first, second], axis=1), state), whole)


def test_a_reset_after_the_last_token_clears_the_state():
    valid, reset = np.array([[True, True, False]]), np.array([[False, False, True]])
    _, state = run(PARAMS, inputs(1, 3), valid=valid, reset=reset)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(state))


def test_ragged_prefill_then_steps_equals_every_row_alone():
    lengths = np.array([5, 1, 3])
    x = inputs(3, 8)
    _, state = run(PARAMS, x[:, :5], valid=np.arange(5) < lengths[:, None])
    steps = []
    for t in range(2):
        y, state = run(PARAMS, jnp.stack([x[b, lengths[b] + t] for b in range(3)])[:, None], state)
        steps.append(y[:, 0])
    for b, length in enumerate(lengths):
        alone, last = run(PARAMS, x[b : b + 1, : length + 2])
        same(jnp.stack([step[b] for step in steps]), alone[0, length:])
        same(jax.tree.map(lambda leaf, b=b: leaf[b : b + 1], state), last)


@pytest.mark.parametrize("length", [0, 1, 2, 6])
def test_convolution_is_a_sum_over_its_taps(length):
    rng = np.random.default_rng(0)
    x, history = rng.standard_normal((2, length, 4)), rng.standard_normal((2, TAPS - 1, 4))
    weight, bias = rng.standard_normal((4, 1, TAPS)), rng.standard_normal(4)
    layer = {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    y, last = nn.causal_conv(layer, jnp.asarray(x, jnp.float32), jnp.asarray(history, jnp.float32), nn.Rows())
    full = np.concatenate([history, x], axis=1)
    want = np.zeros((2, length, 4)) + bias
    for t in range(length):
        for k in range(TAPS):
            want[:, t] += weight[:, 0, k] * full[:, t + k]
    assert_close(y, want)
    assert_close(last, full[:, length:])


def test_bfloat16_inputs_keep_a_float32_state():
    y, state = run(PARAMS, inputs(2, 6, dtype=jnp.bfloat16))
    assert (y.dtype, state.conv.dtype, state.ssm.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact, _ = run(PARAMS, inputs(2, 6, dtype=jnp.bfloat16).astype(jnp.float32))
    assert_close(y, exact, "model")


def test_float64_stays_float64():
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), PARAMS)
        x = inputs(2, 6, dtype=jnp.float64)
        whole = run(wide, x)
        first, state = run(wide, x[:, :4])
        second, state = run(wide, x[:, 4:], state)
        assert {leaf.dtype for leaf in jax.tree.leaves(whole)} == {np.dtype("float64")}
        same((jnp.concatenate([first, second], axis=1), state), whole)


def test_another_width_ends_in_one_line():
    with pytest.raises(UserError, match=r"got x \[2, 3, 8\], expected \[B T 7\]"):
        nn.mamba(PARAMS, jnp.zeros((2, 3, 8)))
