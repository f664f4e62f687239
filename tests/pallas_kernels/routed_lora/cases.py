"""The tests every backend must pass; a subclass names the backend and how it runs on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.routed_lora import routed_lora
from tests.pallas_kernels.routed_lora import oracle

ODD = (37, 24, 20, 4, 5)  # N D F E R: nothing divides a tile, a lane or a sublane
SHAPES = [((1, 8, 9, 2, 3), 0), ((5, 8, 8, 1, 1), 1), ((48, 128, 256, 2, 8), 2)]
ROUTES = {
    "all_on_one_expert": lambda n, e: np.full(n, e - 1),
    "no_adapter": lambda n, e: np.full(n, -1),
    "empty_experts": lambda n, e: np.where(np.arange(n) % 3, -1, 1),
    "sorted": lambda n, e: np.sort(np.arange(n) % e),
}


def compute(ops, g, *, backend, interpret, soft=False, straight_through=False):
    """(y, gradients of ⟨y, g⟩ of every float operand that enters)."""
    fixed = {"route": ops["route"]}
    moving = {k: v for k, v in ops.items() if v is not None and k != "route"}
    if not (soft or straight_through):
        moving.pop("weights")

    def run(m):
        route, weights = (m["weights"], None) if soft else (fixed["route"], m.get("weights"))
        kw = dict(weights=weights, gate=m.get("gate"), backend=backend, interpret=interpret)
        return routed_lora(m["x"], m["a"], m["b"], route, m["scale"], **kw)

    y, vjp = jax.vjp(run, moving)
    return y, vjp(g)[0]


STATIC = ("backend", "interpret", "soft", "straight_through")
native = jax.jit(compute, static_argnames=STATIC, compiler_options={"xla_backend_optimization_level": 3})
# Interpreted kernels are large programs that run once: to optimise them takes longer than all else here.
unoptimised = jax.jit(compute, static_argnames=STATIC)


class Core:
    """What every algorithm must get right; all on one shape, so that it is compiled once."""

    backend: str
    interpret = False

    @property
    def program(self):
        return unoptimised if self.interpret else native

    def run(self, ops, g, dtype="float32", *, soft=False, straight_through=False):
        """Runs on operands rounded to `dtype`, and returns those too, in float64."""
        with jax.enable_x64(dtype == "float64"):
            cast = lambda v: v if v is None or v.dtype == np.int32 else jnp.asarray(v, dtype)
            ops, g = {k: cast(v) for k, v in ops.items()}, cast(g)
            kw = dict(backend=self.backend, interpret=self.interpret, soft=soft, straight_through=straight_through)
            y, grads = self.program(ops, g, **kw)
            assert y.dtype == dtype
            exact = {k: v if v is None or k == "route" else np.asarray(v, np.float64) for k, v in ops.items()}
            return np.asarray(y, np.float64), grads, exact, np.asarray(g, np.float64)

    def check(self, ops, g, dtype="float32", *, soft=False, straight_through=False):
        kw = dict(soft=soft, straight_through=straight_through)
        y, grads, ops, g = self.run(ops, g, dtype, **kw)
        oracle.assert_close(y, oracle.value(ops, soft=soft), dtype, "value")
        want = oracle.gradients(ops, g, **kw)
        for name, grad in grads.items():
            assert grad.dtype == dtype
            oracle.assert_close(grad, want[name], dtype, name)

    def test_values_and_gradients(self):
        self.check(*oracle.operands(*ODD, gate=1))

    @pytest.mark.parametrize("route", ROUTES)
    def test_distributions_of_tokens(self, route):
        ops, g = oracle.operands(*ODD, gate=1)
        self.check(dict(ops, route=ROUTES[route](ODD[0], ODD[3]).astype(np.int32)), g)

    def test_no_adapter_is_exactly_zero(self):
        ops, g = oracle.operands(*ODD, gate=1)
        y, grads, ops, _ = self.run(ops, g)
        none = ops["route"] < 0
        assert none.any()
        assert not none.all()
        assert not y[none].any()
        assert not np.asarray(grads["x"])[none].any()

    def test_mixed_ranks_padded_with_zeros(self):
        ops, g = oracle.operands(*ODD, gate=1)
        ops["a"][0, 2:], ops["b"][1, :, 3:] = 0, 0
        self.check(ops, g)

    def test_nan_in_other_experts_does_not_leak(self):
        ops, g = oracle.operands(*ODD, gate=1)
        ops["route"] = (np.arange(ODD[0]) % 3 - 1).astype(np.int32)
        want, want_grads = oracle.value(ops), oracle.gradients(ops, g)
        for e in (2, 3):
            ops["a"][e], ops["b"][e] = np.nan, np.inf
        y, grads, *_ = self.run(ops, g)
        oracle.assert_close(y, want, "float32")
        for name in ("x", "gate", "scale"):
            oracle.assert_close(grads[name], want_grads[name], "float32", name)

    def test_nan_of_an_expert_reaches_its_tokens_only(self):
        ops, g = oracle.operands(*ODD, gate=1)
        want = oracle.value(ops)
        ops["b"][1, 3, 2] = np.nan
        y, *_ = self.run(ops, g)
        own = ops["route"] == 1
        assert np.isnan(y[own, 3]).all()
        oracle.assert_close(y[~own], want[~own], "float32")

    def test_nan_in_a_token_does_not_leak(self):
        ops, g = oracle.operands(*ODD, gate=1)
        ops["route"][[3, 36]] = -1
        ops["x"][[3, 36]] = 0
        want, want_grads = oracle.value(ops), oracle.gradients(ops, g)
        ops["x"][[3, 36]] = np.nan
        y, grads, *_ = self.run(ops, g)
        oracle.assert_close(y, want, "float32")
        for name in grads:
            oracle.assert_close(grads[name], want_grads[name], "float32", name)

    def test_every_run_is_the_same(self):
        ops, g = oracle.operands(*ODD, gate=1)
        first, second = self.run(ops, g), self.run(ops, g)
        jax.tree.map(np.testing.assert_array_equal, first[:2], second[:2])

    def test_no_compilation_for_other_ids(self):
        ops, g = oracle.operands(*ODD, gate=1)
        self.run(ops, g)
        before = self.program._cache_size()
        for seed in range(3):
            ops["route"] = np.random.default_rng(seed).integers(-1, ODD[3], ODD[0]).astype(np.int32)
            self.run(ops, g)
        assert self.program._cache_size() == before


class Cases(Core):
    """What every backend must do besides."""

    @pytest.mark.parametrize(("shape", "gate"), SHAPES)
    def test_other_shapes_and_gates(self, shape, gate):
        self.check(*oracle.operands(*shape, gate=gate))

    def test_bfloat16(self):
        self.check(*oracle.operands(*ODD, gate=1), "bfloat16")

    def test_straight_through_weights(self):
        ops, g = oracle.operands(*ODD, gate=1)
        self.check(ops, g, straight_through=True)
        hard, *_ = self.run(ops, g)
        through, *_ = self.run(ops, g, straight_through=True)
        np.testing.assert_array_equal(hard, through)

    @pytest.mark.parametrize("batched", ["x", "a", "b", "route", "scale", "gate"])
    def test_vmap_of_each_operand(self, batched):
        ops, _ = oracle.operands(9, 8, 6, 3, 2, gate=1)
        other, _ = oracle.operands(9, 8, 6, 3, 2, gate=1, seed=1)
        both = np.stack([ops[batched], other[batched]])
        f = lambda v: self.apply(dict(ops, **{batched: v}))
        got = jax.jit(jax.vmap(f))(both.astype(np.int32 if batched == "route" else np.float32))
        want = np.stack([oracle.value(dict(ops, **{batched: v})) for v in both])
        oracle.assert_close(got, want, "float32")

    def test_gradient_of_a_vmap(self):
        ops, g = oracle.operands(9, 8, 6, 3, 2, gate=1)
        other, _ = oracle.operands(9, 8, 6, 3, 2, gate=1, seed=1)
        route = np.stack([ops["route"], other["route"]])
        f = lambda x, r: self.apply(dict(ops, x=x, route=r))
        loss = lambda x: jnp.sum(jax.vmap(f)(x, route) * jnp.asarray(g, jnp.float32))
        got = jax.jit(jax.grad(loss))(np.stack([ops["x"], other["x"]]).astype(np.float32))
        want = [oracle.gradients(o, g)["x"] for o in (ops, dict(ops, x=other["x"], route=other["route"]))]
        oracle.assert_close(got, np.stack(want), "float32")

    def apply(self, ops):
        cast = lambda v: v if v.dtype == np.int32 or isinstance(v, jax.Array) else jnp.asarray(v, jnp.float32)
        x, a, b, route, scale, gate = (cast(ops[k]) for k in ("x", "a", "b", "route", "scale", "gate"))
        return routed_lora(x, a, b, route, scale, gate=gate, backend=self.backend, interpret=self.interpret)


class SoftCases:
    """The tests of a backend that takes weights."""

    @pytest.mark.parametrize("gate", [0, 2])
    def test_soft_weights_with_zeros(self, gate):
        ops, g = oracle.operands(*ODD, gate=gate)
        assert (ops["weights"] == 0).any()
        self.check(ops, g, soft=True)

    def test_soft_weights_in_bfloat16(self):
        self.check(*oracle.operands(*ODD, gate=1), "bfloat16", soft=True)


class Float64Cases:
    """The tests of a backend that keeps float64."""

    def test_float64(self):
        self.check(*oracle.operands(*ODD, gate=1), "float64")
        self.check(*oracle.operands(*ODD, gate=2), "float64", soft=True)
