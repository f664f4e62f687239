"""How the tests run a backend, and compare it with the oracle."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.selective_scan import selective_scan
from tests.pallas_kernels.selective_scan import oracle

MEDIUM = (2, 129, 5, 3)  # B T C N of most tests, so that it is compiled once: more than one chunk, nothing divides
LONG = (2, 1000, 5, 3)


def value_and_gradients(ops, dy, dlast, *, backend, interpret):
    """((y, h_T), gradients of ⟨y, dy⟩ + ⟨h_T, dlast⟩ of every float operand that is there)."""
    moving = {name: ops[name] for name in oracle.FLOATS if ops.get(name) is not None}
    masks = {name: ops[name] for name in ("valid", "reset") if ops.get(name) is not None}

    def run(moving):
        return selective_scan(**moving, **masks, backend=backend, interpret=interpret)

    out, pull_back = jax.vjp(run, moving)
    return out, pull_back((dy, dlast.astype(out[1].dtype)))[0]


def value(ops, *, backend, interpret):
    return selective_scan(**ops, backend=backend, interpret=interpret)


def jitted(fn):
    """fn compiled without LLVM's optimisation, as all tests are, and with it."""
    static = dict(static_argnames=("backend", "interpret"))
    return jax.jit(fn, **static), jax.jit(fn, **static, compiler_options={"xla_backend_optimization_level": 3})


RUN_VALUE_AND_GRADIENTS = jitted(value_and_gradients)
RUN_VALUE = jitted(value)


def rounded(ops, dtype):
    """(the operands in `dtype`, the same numbers in float64)."""
    fixed = lambda x: x is None or x.dtype == bool
    low = {name: x if fixed(x) else jnp.asarray(x, dtype) for name, x in ops.items()}
    return low, {name: x if fixed(x) else np.asarray(x, np.float64) for name, x in low.items()}


def shapes(spec, *, state="float32", sharding=None):
    """(operands with every option, cotangent of y, of h_T) of a `specs.Spec`, as shapes; `state` is the wide dtype."""
    B, T, C, N = spec.sizes
    array = lambda *shape, dtype=spec.dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    ops = dict(u=array(B, T, C), dt=array(B, T, C, dtype=state), A=array(C, N, dtype=state))
    ops |= dict(Bm=array(B, T, N), Cm=array(B, T, N), D=array(C, dtype=state), z=array(B, T, C))
    ops |= dict(h0=array(B, C, N, dtype=state), valid=array(B, T, dtype=bool), reset=array(B, T, dtype=bool))
    return ops, array(B, T, C), array(B, C, N, dtype=state)


def segment(ops, start, stop):
    """The tokens [start, stop) of every operand that has tokens."""
    fixed = ("A", "D", "h0")
    return {name: x if x is None or name in fixed else x[:, start:stop] for name, x in ops.items()}


class Core:
    """A backend under test; a subclass names it."""

    backend: str
    interpret = False
    optimised = False

    def run(self, ops, dy, dlast):
        run = RUN_VALUE_AND_GRADIENTS[self.optimised]
        return run(ops, dy, dlast, backend=self.backend, interpret=self.interpret)

    def value(self, ops):
        run = RUN_VALUE[self.optimised]
        return run(rounded(ops, "float32")[0], backend=self.backend, interpret=self.interpret)

    def check(self, ops, dtype="float32", *, tolerance=None):
        """Value and gradients against the oracle, on operands rounded to `dtype`; returns (y, h_T), gradients."""
        with jax.enable_x64(dtype == "float64"):
            (B, T, C), N = ops["u"].shape, ops["A"].shape[1]
            low, exact = rounded(ops, dtype)
            ends, exact_ends = rounded(oracle.cotangents(B, T, C, N), dtype)
            (y, last), grads = self.run(low, **ends)
            state = "float32" if dtype == "bfloat16" else dtype
            assert (y.dtype, last.dtype) == (dtype, state)
            want = oracle.value(exact)
            oracle.assert_close(y, want[0], dtype, "y", tolerance)
            oracle.assert_close(last, want[1], state, "h_T", tolerance)
            for name, grad in oracle.gradients(exact, **exact_ends).items():
                assert grads[name].dtype == dtype
                oracle.assert_close(grads[name], grad, dtype, f"gradient of {name}", tolerance)
            return (y, last), grads
