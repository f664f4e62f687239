"""The contract of `routed_lora` that does not depend on the backend."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import NotSupported
from pallas_kernels.routed_lora import dense, routed_lora
from tests.pallas_kernels.routed_lora import oracle

DIMS = (13, 24, 20, 3, 5)


def arrays(*dims, gate=1):
    ops, g = oracle.operands(*dims, gate=gate)
    cast = lambda v: v if v is None or v.dtype == np.int32 else jnp.asarray(v, jnp.float32)
    return {k: cast(v) for k, v in ops.items()}, cast(g), ops, g


@functools.partial(jax.jit, static_argnames=("backend", "interpret"))
def apply(ops, **kw):
    return routed_lora(ops["x"], ops["a"], ops["b"], ops["route"], ops["scale"], gate=ops["gate"], **kw)


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from all_equations(inner)


def bank_gradients(jaxpr, ops) -> list[str]:
    """Arithmetic whose result has as many elements as a bank, which nothing but a bank's gradient has."""
    sizes = {ops["a"].size, ops["b"].size}
    arithmetic = {"dot_general", "add_any", "add", "mul", "scatter-add", "while", "scan"}
    return [
        eqn.primitive.name
        for eqn in all_equations(jaxpr)
        if eqn.primitive.name in arithmetic and any(v.aval.size in sizes for v in eqn.outvars)
    ]


@pytest.mark.parametrize("backend", ["reference", "xla", "tpu"])
@pytest.mark.parametrize("soft", [False, True])
def test_a_frozen_bank_costs_nothing(backend, soft):
    ops, g, *_ = arrays(37, 24, 22, 4, 5)

    def loss(moving, bank):
        m = {**ops, **moving, **bank}
        route, weights = (m["weights"], None) if soft else (m["route"], m["weights"])
        kw = dict(weights=weights, gate=m["gate"], backend=backend, interpret=backend == "tpu")
        return jnp.sum(routed_lora(m["x"], m["a"], m["b"], route, m["scale"], **kw) * g)

    moving = {k: ops[k] for k in ("x", "weights", "scale", "gate")}
    bank = {k: ops[k] for k in ("a", "b")}
    frozen = jax.make_jaxpr(jax.grad(jax.jit(loss)))(moving, bank)
    trained = jax.make_jaxpr(jax.grad(jax.jit(loss), argnums=(0, 1)))(moving, bank)
    assert bank_gradients(frozen.jaxpr, ops) == []
    assert len(bank_gradients(trained.jaxpr, ops)) >= 2


@pytest.mark.parametrize("backend", ["reference", "xla", "tpu"])
@pytest.mark.parametrize("soft", [False, True])
def test_a_rank_major_bank_gives_the_same(backend, soft):
    ops, g, *_ = arrays(*DIMS, gate=2)

    @functools.partial(jax.jit, static_argnums=1)
    def both(moving, rank_major):
        def run(m):
            route, weights = (m["weights"], None) if soft else (ops["route"], m["weights"])
            kw = dict(weights=weights, gate=m["gate"], rank_major=rank_major)
            return routed_lora(m["x"], m["a"], m["b"], route, m["scale"], **kw, **where)

        y, vjp = jax.vjp(run, moving)
        return y, vjp(g)[0]

    where = dict(backend=backend, interpret=backend == "tpu")
    moving = {k: v for k, v in ops.items() if k != "route"}
    y, grads = both(moving, False)
    other, other_grads = both(dict(moving, b=moving["b"].swapaxes(1, 2)), True)
    np.testing.assert_allclose(other, y, rtol=1e-6, atol=1e-6)
    other_grads["b"] = other_grads["b"].swapaxes(1, 2)
    for name, grad in grads.items():
        np.testing.assert_allclose(other_grads[name], grad, rtol=1e-5, atol=1e-5, err_msg=name)


def test_no_token_gives_no_row():
    ops, *_ = arrays(0, 4, 6, 2, 3)
    y, grads = jax.value_and_grad(lambda x: jnp.sum(apply(dict(ops, x=x))))(ops["x"])
    assert apply(ops).shape == (0, 6)
    assert y == 0
    assert grads.shape == (0, 4)


def test_ids_beyond_the_bank_are_no_adapter():
    ops, *_ = arrays(*DIMS)
    ops["route"] = np.full(13, 3, np.int32)
    assert not np.asarray(apply(ops)).any()
    ops["route"] = np.full(13, -7, np.int64)
    assert not np.asarray(apply(ops)).any()


def test_banks_may_have_another_dtype_than_the_tokens():
    ops, _, exact, _ = arrays(*DIMS)
    want = oracle.value(exact)
    y = apply(dict(ops, x=ops["x"].astype(jnp.bfloat16)))
    assert y.dtype == jnp.bfloat16
    oracle.assert_close(y, want, "bfloat16")
    low = {k: ops[k].astype(jnp.bfloat16) for k in ("a", "b")}
    y = apply(dict(ops, **low))
    assert y.dtype == jnp.float32
    oracle.assert_close(y, want, "bfloat16")


def test_a_gate_of_one_gives_the_sparse_straight_through_gradient():
    ops, g, exact, exact_g = arrays(*DIMS, gate=0)
    p = jnp.asarray(exact["weights"], jnp.float32)
    chosen = lambda p: jnp.take_along_axis(p, jnp.maximum(ops["route"], 0)[:, None], axis=1)[:, 0]

    def loss(p):
        gate = chosen(p) + jax.lax.stop_gradient(1 - chosen(p))
        return jnp.sum(apply(dict(ops, gate=gate)) * g)

    want = oracle.gradients(exact, exact_g, straight_through=True)["weights"]
    want = np.where(np.arange(3) == exact["route"][:, None], want, 0)
    oracle.assert_close(jax.jit(jax.grad(loss))(p), want, "float32")


def test_scan_over_layers_of_banks():
    ops, _, exact, _ = arrays(9, 8, 8, 3, 2)
    scales = np.array([1.0, -0.5, 2.0], np.float32)

    def layer(x, factor):
        return x + apply(dict(ops, x=x, a=ops["a"] * factor)), None

    def through(x):
        return jax.lax.scan(layer, x, scales)[0]

    want, step = exact["x"], 1e-4
    for factor in scales:
        want = want + oracle.value(dict(exact, x=want, a=exact["a"] * factor))
    oracle.assert_close(jax.jit(through)(ops["x"]), want, "float32")
    with jax.enable_x64(True):
        ops = {k: jnp.asarray(v) for k, v in exact.items()}
        grad = jax.jit(jax.grad(lambda x: jnp.sum(through(x))))(ops["x"])
        move = jnp.zeros_like(ops["x"]).at[4, 3].set(step)
        slope = (jnp.sum(through(ops["x"] + move)) - jnp.sum(through(ops["x"] - move))) / (2 * step)
        np.testing.assert_allclose(grad[4, 3], slope, rtol=1e-6)


def test_remat_gives_the_same_gradient():
    ops, g, *_ = arrays(*DIMS)
    loss = lambda x: jnp.sum(apply(dict(ops, x=x)) * g)
    plain, again = jax.jit(jax.grad(loss)), jax.jit(jax.grad(jax.checkpoint(loss)))
    np.testing.assert_array_equal(plain(ops["x"]), again(ops["x"]))


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_tokens_change_nothing(chunk, monkeypatch):
    ops, g, exact, exact_g = arrays(*DIMS, gate=2)
    monkeypatch.setattr(dense, "chunk_rows", lambda pair: chunk)

    def run(m):
        return routed_lora(m["x"], m["a"], m["b"], m["weights"], m["scale"], gate=m["gate"])

    moving = {k: v for k, v in ops.items() if k != "route"}

    def both(moving):
        y, vjp = jax.vjp(run, moving)
        return y, vjp(g)[0]

    y, grads = jax.jit(both)(moving)
    oracle.assert_close(y, oracle.value(exact, soft=True), "float32")
    want = oracle.gradients(exact, exact_g, soft=True)
    for name, grad in grads.items():
        oracle.assert_close(grad, want[name], "float32", name)


@pytest.mark.parametrize(("n", "e", "r"), [(4096, 16, 16), (2048, 64, 64)])
def test_memory_is_bounded(n, e, r):
    d, struct = 256, lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    shapes = (struct(n, d), struct(e, r, d), struct(e, d, r), jax.ShapeDtypeStruct((n,), jnp.int32), struct(e))
    loss = lambda x, w, a, b, ids, scale: jnp.sum(routed_lora(x, a, b, ids, scale, weights=w, backend="xla"))
    x, a, b, ids, scale = shapes
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, struct(n, e), a, b, ids, scale).compile()
    tokens, chunk = 4 * n * d, 4 * dense.CHUNK_LIMIT
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * tokens + 4 * chunk


BAD = {
    "a of another width": (dict(a=jnp.ones((3, 5, 7))), r"got a \[3, 5, 7\], expected \[3, 5, 24\]"),
    "b of another rank": (dict(b=jnp.ones((3, 20, 4))), r"got b \[3, 20, 4\], expected \[3, 20, 5\]"),
    "too few ids": (dict(route=np.zeros(12, np.int32)), r"got ids \[12\], expected \[13\]"),
    "weights of other experts": (dict(route=jnp.ones((13, 2))), r"got weights \[13, 2\], expected \[13, 3\]"),
    "gate of neither shape": (dict(gate=jnp.ones((13, 4))), r"got gate \[13, 4\], expected \[13\] or \[13, 5\]"),
    "scale of other experts": (dict(scale=jnp.ones(2)), r"got scale \[2\], expected \[3\]"),
    "integer tokens": (dict(x=jnp.ones((13, 24), jnp.int32)), "got x of dtype int32, expected a float"),
    "no expert": (dict(a=jnp.ones((0, 5, 24))), "expected at least one expert of rank 1 or more"),
    "batched tokens": (dict(x=jnp.ones((2, 13, 24))), r"expected \[N D\], \[E R D\], \[E F R\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_operand_is_named_in_one_line(case):
    change, message = BAD[case]
    ops, *_ = arrays(*DIMS)
    with pytest.raises(ValueError, match=message) as caught:
        apply(dict(ops, **change))
    assert "\n" not in str(caught.value)


def test_weights_twice_are_refused():
    ops, *_ = arrays(*DIMS)
    with pytest.raises(ValueError, match="got weights twice"):
        routed_lora(ops["x"], ops["a"], ops["b"], ops["weights"], ops["scale"], weights=ops["weights"])


def test_what_a_kernel_cannot_take_is_said():
    ops, *_ = arrays(*DIMS)
    with pytest.raises(NotSupported, match="the gpu kernel takes ids only"):
        apply(dict(ops, route=ops["weights"]), backend="gpu", interpret=True)
    with pytest.raises(NotSupported, match="the tpu kernel takes ranks up to 1024, got 1030"):
        apply(arrays(2, 3, 3, 1, 1030)[0], backend="tpu", interpret=True)
    with jax.enable_x64(True), pytest.raises(NotSupported, match="takes float32 and bfloat16, got float64"):
        apply(
            {k: v if v is None else jnp.asarray(v) for k, v in arrays(*DIMS)[2].items()}, backend="tpu", interpret=True
        )
