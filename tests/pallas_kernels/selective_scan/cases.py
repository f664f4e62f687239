"""The tests every backend must pass; a subclass names the backend and how it runs on this machine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selective_scan import selective_scan
from tests.pallas_kernels.selective_scan import oracle

SMALL = (2, 40, 5, 3)  # B T C N: what most tests run on, so that it is compiled once
LENGTHS = (1, 3, 127, 128, 129, 1000)
SIZES = [(1, 7, 1, 1), (1, 9, 128, 16), (3, 5, 130, 9), (5, 4, 33, 24)]


@functools.partial(jax.jit, static_argnames=("backend", "interpret"))
def value_and_gradients(ops, dy, dlast, *, backend, interpret):
    """((y, h_T), gradients of ⟨y, dy⟩ + ⟨h_T, dlast⟩ of every float operand that is there)."""
    moving = {name: ops[name] for name in oracle.FLOATS if ops.get(name) is not None}
    masks = {name: ops[name] for name in ("valid", "reset") if ops.get(name) is not None}

    def run(moving):
        return selective_scan(**moving, **masks, backend=backend, interpret=interpret)

    out, pull_back = jax.vjp(run, moving)
    return out, pull_back((dy, dlast.astype(out[1].dtype)))[0]


@functools.partial(jax.jit, static_argnames=("backend", "interpret"))
def value(ops, *, backend, interpret):
    return selective_scan(**ops, backend=backend, interpret=interpret)


def rounded(ops, dtype):
    """(the operands in `dtype`, the same numbers in float64)."""
    cast = lambda x: x if x is None or x.dtype == bool else jnp.asarray(x, dtype)
    exact = lambda x: x if x is None or x.dtype == bool else np.asarray(x, np.float64)
    low = {name: cast(x) for name, x in ops.items()}
    return low, {name: exact(x) for name, x in low.items()}


def segment(ops, start, stop):
    """The tokens [start, stop) of every operand that has tokens."""
    fixed = ("A", "D", "h0")
    return {name: x if x is None or name in fixed else x[:, start:stop] for name, x in ops.items()}


class Core:
    """How a backend is run and compared."""

    backend: str
    interpret = False

    def run(self, ops, dy, dlast):
        return value_and_gradients(ops, dy, dlast, backend=self.backend, interpret=self.interpret)

    def value(self, ops):
        return value(rounded(ops, "float32")[0], backend=self.backend, interpret=self.interpret)

    def check(self, ops, dtype="float32", *, names=oracle.FLOATS):
        """Value and gradients against the oracle, on operands rounded to `dtype`; returns the gradients."""
        with jax.enable_x64(dtype == "float64"):
            (B, T, C), N = ops["u"].shape, ops["A"].shape[1]
            dy, dlast = oracle.cotangents(B, T, C, N)
            low, exact = rounded(ops, dtype)
            (y, last), grads = self.run(low, jnp.asarray(dy, dtype), jnp.asarray(dlast, dtype))
            dy, dlast = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in (dy, dlast))
            state = "float32" if dtype == "bfloat16" else dtype
            assert (y.dtype, last.dtype) == (dtype, state)
            want = oracle.value(exact)
            oracle.assert_close(y, want[0], dtype, "y")
            oracle.assert_close(last, want[1], state, "h_T")
            for name, grad in oracle.gradients(exact, dy, dlast).items():
                assert grads[name].dtype == dtype
                if name in names:
                    oracle.assert_close(grads[name], grad, dtype, f"gradient of {name}")
            return grads


class Cases(Core):
    """Values and gradients of the scan, its masks and its states."""

    @pytest.mark.parametrize("length", LENGTHS)
    def test_lengths(self, length):
        self.check(oracle.operands(2, length, 5, 3))

    @pytest.mark.parametrize("sizes", SIZES)
    def test_sizes(self, sizes):
        self.check(oracle.operands(*sizes))

    def test_bfloat16_operands_keep_a_float32_state(self):
        self.check(oracle.operands(*SMALL), "bfloat16")

    def test_options_may_be_absent(self):
        bare = dict.fromkeys(("D", "z", "h0", "valid", "reset"))
        self.check(oracle.operands(*SMALL) | bare)

    def test_no_tokens_return_the_state(self):
        ops = oracle.operands(2, 0, 5, 3)
        grads = self.check(ops)
        np.testing.assert_array_equal(grads["h0"], np.float32(oracle.cotangents(2, 0, 5, 3)[1]))

    def test_no_rows(self):
        y, last = self.value(oracle.operands(0, 4, 5, 3))
        assert (y.shape, last.shape) == ((0, 4, 5), (0, 5, 3))

    def test_two_runs_are_equal_to_the_bit(self):
        low, _ = rounded(oracle.operands(*SMALL), "float32")
        ends = [np.float32(x) for x in oracle.cotangents(*SMALL)]
        jax.tree.map(np.testing.assert_array_equal, self.run(low, *ends), self.run(low, *ends))

    @pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
    def test_prefill_in_two_parts_equals_one(self, cut):
        ops = oracle.operands(2, 4, 5, 3)
        want = oracle.value(ops)
        first, state = self.value(segment(ops, 0, cut))
        second, last = self.value(segment(ops, cut, 4) | {"h0": np.asarray(state)})
        oracle.assert_close(np.concatenate([first, second], axis=1), want[0])
        oracle.assert_close(last, want[1])

    def test_prefill_in_parts_of_any_length_equals_one(self):
        ops = oracle.operands(1, 200, 5, 3)
        want, ys, state = oracle.value(ops), [], ops["h0"]
        for start, stop in ((0, 129), (129, 130), (130, 197), (197, 200)):
            y, state = self.value(segment(ops, start, stop) | {"h0": np.asarray(state)})
            ys.append(y)
        oracle.assert_close(np.concatenate(ys, axis=1), want[0])
        oracle.assert_close(state, want[1])

    def test_packed_segments_equal_separate_ones(self):
        ops = oracle.operands(*SMALL)
        for row, starts in enumerate(([0, 7, 8], [20, 39])):
            ops["reset"][row, starts] = True
        self.check(ops)
        y, _ = self.value(ops)
        alone, _ = self.value(segment(ops, 20, 39) | {"h0": None, "reset": None})
        oracle.assert_close(y[1, 20:39], alone[1])

    def test_reset_forgets_even_a_state_that_is_not_finite(self):
        ops = oracle.operands(*SMALL)
        ops["reset"][:, 9] = True
        low, _ = rounded(ops, "float32")
        low["h0"] = jnp.full_like(low["h0"], jnp.inf)
        dy, dlast = (jnp.asarray(x, "float32") for x in oracle.cotangents(*SMALL))
        (y, last), grads = self.run(low, dy.at[:, :9].set(0), dlast)
        want = oracle.value(ops)
        oracle.assert_close(y[:, 9:], want[0][:, 9:])
        oracle.assert_close(last, want[1])
        assert np.all(np.asarray(grads["h0"]) == 0)
        assert np.isfinite(np.asarray(grads["u"][:, 9:])).all()

    @pytest.mark.parametrize("place", ["left", "right", "middle", "only one row", "everywhere"])
    def test_pads_change_no_real_token(self, place):
        ops = oracle.operands(*SMALL)
        pads = {
            "left": np.s_[:, :6],
            "right": np.s_[:, -6:],
            "middle": np.s_[:, 10:17],
            "only one row": np.s_[1, ::3],
            "everywhere": np.s_[:],
        }
        ops["valid"][pads[place]] = False
        clean = {name: grad for name, grad in self.check(ops).items() if name in ("u", "dt", "z", "Bm", "Cm")}
        for name, grad in clean.items():
            assert np.all(np.asarray(grad)[~ops["valid"]] == 0), name
            ops[name][~ops["valid"]] = np.nan
        y, last = self.value(ops)
        assert np.all(np.asarray(y)[~ops["valid"]] == 0)
        real = {name: np.where(np.isnan(x), 0, x) if x.dtype != bool else x for name, x in ops.items()}
        oracle.assert_close(y, oracle.value(real)[0])
        oracle.assert_close(last, oracle.value(real)[1])

    def test_padded_row_of_a_batch_of_one(self):
        ops = oracle.operands(1, 9, 5, 3)
        ops["valid"][:, :4] = False
        y, last = self.value(ops)
        alone, last_alone = self.value(segment(ops, 4, 9))
        oracle.assert_close(y[:, 4:], alone)
        oracle.assert_close(last, last_alone)

    def test_vmap(self):
        ops = [oracle.operands(1, 4, 5, 3, seed=seed) for seed in range(3)]
        stacked = {
            name: jnp.asarray(np.stack([o[name] for o in ops]), None if name in ("valid", "reset") else "float32")
            for name in ops[0]
        }
        shared = stacked | {"A": stacked["A"][0]}
        ends = [jnp.asarray(x, "float32") for x in oracle.cotangents(1, 4, 5, 3)]
        axes = {name: None if name == "A" else 0 for name in ops[0]}
        (y, last), grads = jax.vmap(self.run, in_axes=(axes, None, None))(shared, *ends)
        for i, each in enumerate(ops):
            want = oracle.value(each | {"A": ops[0]["A"]})
            oracle.assert_close(y[i], want[0])
            oracle.assert_close(last[i], want[1])
            exact = oracle.gradients(each | {"A": ops[0]["A"]}, *oracle.cotangents(1, 4, 5, 3))
            for name, grad in grads.items():
                oracle.assert_close(grad[i], exact[name], what=name)

    def test_remat(self):
        ops = oracle.operands(*SMALL)
        low, _ = rounded(ops, "float32")

        def loss(u):
            scan = jax.checkpoint(functools.partial(selective_scan, backend=self.backend, interpret=self.interpret))
            return jnp.sum(scan(**low | {"u": u})[0])

        exact = oracle.gradients(ops, np.ones(SMALL[:3]), np.zeros((2, 5, 3)))
        oracle.assert_close(jax.jit(jax.grad(loss))(low["u"]), exact["u"])
