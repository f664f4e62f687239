"""Gates against fp64 numpy, where they start, what they refuse, and how large they are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import gate
from molora_jax.adapters.gate import GateConfig
from molora_jax.config import UserError
from tests.adapters.gate_reference import CONFIGS, HEADS, D, R, inputs, params, reference, width
from tests.numerics import assert_close

run = jax.jit(gate.apply, static_argnums=0)
every = pytest.mark.parametrize("name", CONFIGS)


@every
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_values(name, tokens):
    cfg = CONFIGS[name]
    tree, x = params(cfg), inputs(cfg, 2, tokens)
    lam, _ = run(cfg, tree, x)
    assert lam.shape == (2, tokens, HEADS, *([R] if cfg.output == "diagonal" else []))
    assert_close(lam, reference(cfg, tree, x), "model")
    assert tokens < 6 or np.ptp(lam) > 0.01


def along(cfg, tree, x, dlam, path, direction, step=1e-5):
    """Slope of ⟨λ, dlam⟩ in fp64 as one leaf, or x, moves along a direction."""

    def value(size):
        move = lambda at, leaf: np.asarray(leaf, np.float64) + size * direction if at == path else leaf
        return np.sum(reference(cfg, jax.tree.map_with_path(move, tree), move("x", x)) * dlam)

    return (value(step) - value(-step)) / (2 * step)


@every
def test_gradients(name):
    cfg = dataclasses.replace(CONFIGS[name], clamp=None)
    tree, x = params(cfg), inputs(cfg, 1, 5)
    rng = np.random.default_rng(2)
    dlam = rng.standard_normal(reference(cfg, tree, x).shape)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def grads(tree, x):
        return jnp.sum(gate.apply(cfg, tree, x)[0] * dlam)

    found, dx = grads(tree, x)
    for path, grad in [*jax.tree.leaves_with_path(found), ("x", dx)]:
        for _ in range(2):
            direction = rng.standard_normal(grad.shape)
            want = along(cfg, tree, x, dlam, path, direction)
            size = np.linalg.norm(grad) * np.linalg.norm(direction)
            assert abs(np.sum(np.asarray(grad) * direction) - want) <= 1e-5 * size, path
            assert size > 0, path


def test_a_clamp_stops_values_and_gradients():
    cfg = GateConfig(kind="linear", clamp=1.5)
    tree = {"proj": {"weight": jnp.ones((1, 1))}, "out": {"bias": jnp.zeros((1, 1))}}
    x = jnp.asarray([[[-3.0], [0.0], [0.5], [3.0]]])
    lam, slope = jax.vmap(jax.value_and_grad(lambda x: gate.apply(cfg, tree, x.reshape(1, 1, 1))[0][0, 0, 0]))(x[0])
    assert_close(lam, np.minimum(np.log1p((np.e - 1) * np.exp([-3, 0, 0.5, 3])), 1.5))
    assert lam[3] == 1.5
    np.testing.assert_array_equal(np.asarray(slope)[:, 0] > 0, [True, True, True, False])


def started(cfg, dtype=jnp.float32, heads=HEADS):
    return jax.jit(lambda key: gate.init(cfg, key, d_in=D, rank=R, heads=heads, dtype=dtype))(jax.random.key(3))


@every
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_gate_starts_at_exactly_one(name, dtype):
    activation = {"sigmoid": "bounded"}.get(CONFIGS[name].activation, CONFIGS[name].activation)
    cfg = dataclasses.replace(CONFIGS[name], start="one", activation=activation)
    lam, _ = run(cfg, started(cfg, dtype), jnp.asarray(inputs(cfg, 2, 9), dtype))
    assert lam.dtype == jnp.float32
    np.testing.assert_array_equal(lam, 1)


@pytest.mark.parametrize("name", ["mamba", "lstm", "linear", "toplora"])
def test_gates_can_leave_their_start(name):
    """The gradient of a scale at exactly one is that of the formula, not of a corner in the way it is computed."""
    cfg = dataclasses.replace(CONFIGS[name], clamp=None)
    x = inputs(cfg, 1, 3)
    slope = {"softplus": 1 - 1 / np.e, "bounded": 0.5, "exp": 1}[cfg.activation]
    grads = jax.jit(jax.grad(lambda tree: jnp.sum(gate.apply(cfg, tree, x)[0])))(started(cfg, heads=1))["out"]
    if "bias" in grads:
        assert_close(grads["bias"], np.full(grads["bias"].shape, 3 * slope))
    else:
        assert np.abs(grads["gain"]).min() > 0


def test_softplus_is_exact_far_from_its_start():
    cfg, z = GateConfig(), np.array([-90, -30, -5, -1e-3, -1e-7, 0, 1e-7, 1e-3, 5, 30, 90, 1e4])
    lam, slope = jax.vmap(jax.value_and_grad(lambda z: gate.activate(cfg, z)))(jnp.asarray(z, jnp.float32))
    shifted = z + np.log(np.e - 1)
    np.testing.assert_allclose(lam, np.logaddexp(0, shifted), rtol=3e-7, atol=2e-7)
    np.testing.assert_allclose(slope, np.exp(shifted - np.logaddexp(0, shifted)), rtol=2e-6, atol=1e-7)


def test_the_published_start_is_near_one_and_blind_to_tokens():
    """At width 3,584 λ varies by a few 1e-4 from token to token, and by 0.06 from gate to gate; the norm mends that."""
    x, cfg = jax.random.normal(jax.random.key(1), (1, 64, 3584)), gate.PUBLISHED["malora"]
    make = lambda key: gate.init(cfg, key, d_in=3584, rank=16)
    trees = jax.jit(jax.vmap(make))(jax.random.split(jax.random.key(0), 8))
    stack = jax.jit(gate.apply_stack, static_argnums=0)
    lam, _ = stack(cfg, trees, x)
    assert 1e-4 < lam.std(1).mean() < 1e-3
    assert 0.02 < lam.mean(1).std() < 0.15
    assert abs(lam.mean() - 1) < 0.1
    assert stack(dataclasses.replace(cfg, norm=True), trees, x)[0].std(1).mean() > 4 * lam.std(1).mean()


def test_toplora_starts_as_published():
    cfg = gate.PUBLISHED["toplora"]
    tree = gate.init(cfg, jax.random.key(0), d_in=400, rank=R)
    theta = np.asarray(tree["proj"]["weight"])
    assert np.abs(theta).max() <= 400**-0.5
    assert np.isclose(theta.std(), (1200) ** -0.5, rtol=0.05)
    np.testing.assert_array_equal(tree["out"]["gain"], 1)


def test_only_the_projection_follows_the_dtype_of_the_adapter():
    for cfg in CONFIGS.values():
        for path, leaf in jax.tree.leaves_with_path(gate.abstract(cfg, d_in=D, rank=R, dtype=jnp.bfloat16)):
            assert leaf.dtype == (jnp.bfloat16 if path[0].key == "proj" else jnp.float32), path


def test_entropy():
    lam = np.array([0, 0.2, 0.5, 1])
    want = np.mean([0, -(0.2 * np.log(0.2) + 0.8 * np.log(0.8)), np.log(2), 0])
    assert_close(gate.entropy(jnp.asarray(lam, jnp.float32)), want)


QWEN = dict(q=(3584, 3584), k=(3584, 512), v=(3584, 512), up=(3584, 18944), down=(18944, 3584))
LORA = 27_066_368


def count(cfg):
    return 28 * sum(gate.parameters(cfg, d_in=d_in, rank=16) for d_in, _ in QWEN.values())


def test_parameters_are_those_of_the_released_adapters_of_qwen():
    """MaLoRA there has 15 biases a gate that nothing reads."""
    assert 16 * 28 * sum(map(sum, QWEN.values())) == LORA
    assert count(gate.PUBLISHED["malora"]) + 15 * 140 == 42_450_688 - LORA == 15_384_320
    assert count(gate.PUBLISHED["toplora"]) == 41_978_048 - LORA
    assert count(gate.PUBLISHED["scalar"]) == 27_998_348 - LORA
    block = gate.parameters(GateConfig(reads="h"), d_in=1, rank=16) - 17
    assert block == 3360
    for kind in ("gru", "lstm"):
        assert 0.95 < gate.parameters(GateConfig(kind=kind, reads="h"), d_in=1, rank=16) / (block + 17) < 1.05


def test_the_lora_rank_of_equal_size():
    alone = [[sizes] for sizes in QWEN.values()] * 28
    shared = [[QWEN["q"], QWEN["k"], QWEN["v"]], [QWEN["up"]], [QWEN["down"]]] * 28
    assert gate.equal_rank(gate.PUBLISHED["malora"], 16, alone) == 25
    assert gate.equal_rank(GateConfig(), 16, shared) == 23
    assert gate.equal_rank(GateConfig(kind="linear"), 16, alone) == 17


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (dict(kind="rwkv"), "got kind='rwkv', expected one of mamba, gru, lstm, linear, toplora"),
        (dict(output="matrix"), "got output='matrix'"),
        (dict(kind="toplora"), "expected output='diagonal'"),
        (dict(activation="sigmoid"), "use activation='bounded'"),
        (dict(clamp=0.5), "got clamp=0.5, expected at least 1"),
        (dict(clamp=float("nan")), "got clamp=nan"),
        (dict(taps=1), "fewer than 2 taps"),
        (dict(kind="gru", hidden=0), "size below 1"),
    ],
)
def test_configs_that_make_no_gate(fields, line):
    with pytest.raises(UserError, match="^gate: ") as caught:
        GateConfig(**fields)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mamba", "mamba-of-h", "gru-of-h", "linear"])
def test_an_input_of_another_width_is_refused(name):
    cfg = CONFIGS[name]
    line = rf"got {cfg.reads} \[1, 2, 9\], expected \[B T {width(cfg)}\]"
    with pytest.raises(UserError, match=line):
        gate.apply(cfg, params(cfg), jnp.zeros((1, 2, 9)))
    with pytest.raises(UserError, match="expected"):
        gate.apply_stack(cfg, params(cfg, stack=(3,)), jnp.zeros((1, 2, 3, 9) if cfg.reads == "h" else (1, 2, 9)))
