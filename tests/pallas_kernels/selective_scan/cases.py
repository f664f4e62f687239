"""The tests every backend must pass: shapes and dtypes, states passed on, pads and packed rows, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.selective_scan import selective_scan
from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.run import LONG, MEDIUM, Core, rounded, segment


class Lengths(Core):
    @pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 3), (2, 127, 5, 3), (2, 128, 5, 3)])
    def test_short_rows_and_whole_chunks(self, sizes):
        self.check(oracle.operands(*sizes))


class Shapes(Core):
    @pytest.mark.parametrize("sizes", [MEDIUM, LONG, (3, 9, 130, 17)])
    def test_sizes(self, sizes):
        self.check(oracle.operands(*sizes))

    def test_bfloat16_operands_keep_a_float32_state(self):
        self.check(oracle.operands(2, 18, 5, 3), "bfloat16")

    def test_no_tokens_return_the_state(self):
        _, grads = self.check(oracle.operands(2, 0, 5, 3))
        np.testing.assert_array_equal(grads["h0"], np.float32(oracle.cotangents(2, 0, 5, 3)["dlast"]))

    def test_no_rows(self):
        y, last = self.value(oracle.operands(0, 4, 5, 3))
        assert (y.shape, last.shape) == ((0, 4, 5), (0, 5, 3))


class States(Core):
    def test_prefill_in_parts_around_a_chunk_equals_one(self):
        self.check_parts([0, 129, 130, 197, 200])

    def check_parts(self, cuts):
        ops = oracle.operands(2, cuts[-1], 5, 3)
        want, ys, state = oracle.value(ops), [], ops["h0"]
        for start, stop in zip(cuts, cuts[1:], strict=False):
            y, state = self.value(segment(ops, start, stop) | {"h0": np.asarray(state)})
            ys.append(y)
        oracle.assert_close(np.concatenate(ys, axis=1), want[0])
        oracle.assert_close(state, want[1])

    def test_two_runs_are_equal_to_the_bit(self):
        low, _ = rounded(oracle.operands(*MEDIUM), "float32")
        ends = {name: np.float32(x) for name, x in oracle.cotangents(*MEDIUM).items()}
        jax.tree.map(np.testing.assert_array_equal, self.run(low, **ends), self.run(low, **ends))


class Splits(States):
    @pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
    def test_prefill_in_two_parts_equals_one(self, cut):
        self.check_parts([0, cut, 4])


class Options(Core):
    def test_options_may_be_absent(self):
        self.check(oracle.operands(2, 18, 5, 3) | dict.fromkeys(("D", "z", "h0", "valid", "reset")))


class Masks(Core):
    PADS = {
        "left": np.s_[:, :70],
        "right": np.s_[:, -6:],
        "middle": np.s_[:, 50:80],
        "one row only": np.s_[1, ::3],
        "everywhere": np.s_[:],
    }

    @pytest.mark.parametrize("place", PADS)
    def test_pads_change_no_real_token(self, place):
        ops = oracle.operands(*MEDIUM)
        ops["valid"][self.PADS[place]] = False
        _, grads = self.check(ops)
        for name in ("u", "dt", "z", "Bm", "Cm"):
            assert np.all(np.asarray(grads[name])[~ops["valid"]] == 0), name

    def test_pads_may_hold_anything(self):
        ops = oracle.operands(*MEDIUM)
        ops["valid"][self.PADS["middle"]] = False
        want = oracle.value(ops)
        dirty = ops | {name: ops[name].copy() for name in ("u", "dt", "z", "Bm", "Cm")}
        for name in ("u", "dt", "z", "Bm", "Cm"):
            dirty[name][~ops["valid"]] = np.nan
        ends = {name: np.float32(x) for name, x in oracle.cotangents(*MEDIUM).items()}
        (y, last), grads = self.run(rounded(dirty, "float32")[0], **ends)
        oracle.assert_close(y, want[0])
        oracle.assert_close(last, want[1])
        assert np.all(np.asarray(y)[~ops["valid"]] == 0)
        for name, grad in oracle.gradients(ops, **oracle.cotangents(*MEDIUM)).items():
            oracle.assert_close(grads[name], grad, what=name)

    def test_padded_batch_of_one(self):
        ops = oracle.operands(1, 9, 5, 3)
        ops["valid"][:, :4] = False
        y, last = self.value(ops)
        alone, last_alone = oracle.value(segment(ops, 4, 9))
        oracle.assert_close(y[:, 4:], alone)
        oracle.assert_close(last, last_alone)

    def test_packed_segments_equal_separate_ones(self):
        ops = oracle.operands(*MEDIUM)
        starts = [0, 7, 8, 64, 128], [20, 65, 127]
        for row in range(2):
            ops["reset"][row, starts[row]] = True
        (y, last), _ = self.check(ops)
        for start, stop in ((7, 8), (8, 64), (64, 128), (128, 129)):
            alone, last_alone = oracle.value(segment(ops, start, stop) | {"h0": None, "reset": None})
            oracle.assert_close(y[0, start:stop], alone[0])
        oracle.assert_close(last[0], last_alone[0])

    def test_reset_forgets_even_a_state_that_is_not_finite(self):
        ops = oracle.operands(*MEDIUM)
        ops["reset"][:, 9] = True
        want = oracle.value(ops)
        low, _ = rounded(ops, "float32")
        low["h0"] = jnp.full_like(low["h0"], jnp.inf)
        ends = {name: jnp.asarray(x, "float32") for name, x in oracle.cotangents(*MEDIUM).items()}
        ends["dy"] = ends["dy"].at[:, :9].set(0)
        (y, last), grads = self.run(low, **ends)
        oracle.assert_close(y[:, 9:], want[0][:, 9:])
        oracle.assert_close(last, want[1])
        assert np.all(np.asarray(grads["h0"]) == 0)
        assert np.isfinite(np.asarray(grads["u"][:, 9:])).all()


class Vmap(Core):
    def test_vmap(self):
        rows = [oracle.operands(1, 4, 5, 3, seed=seed) for seed in range(3)]
        rows = [row | {"A": rows[0]["A"], "valid": None, "reset": None} for row in rows]
        axes = {name: None if name == "A" or x is None else 0 for name, x in rows[0].items()}
        stacked = {name: np.stack([row[name] for row in rows]) if axes[name] == 0 else x for name, x in rows[0].items()}
        low, _ = rounded(stacked, "float32")
        ends = oracle.cotangents(1, 4, 5, 3)
        run = jax.vmap(self.run, in_axes=(axes, None, None))
        (y, last), grads = run(low, *(jnp.asarray(x, "float32") for x in ends.values()))
        for i, row in enumerate(rows):
            want = oracle.value(row)
            oracle.assert_close(y[i], want[0])
            oracle.assert_close(last[i], want[1])
            for name, grad in oracle.gradients(row, **ends).items():
                oracle.assert_close(grads[name][i], grad, what=name)


class Remat(Core):
    def test_remat(self):
        ops = oracle.operands(2, 3, 5, 3)
        low, _ = rounded(ops, "float32")
        scan = functools.partial(selective_scan, backend=self.backend, interpret=self.interpret)

        def loss(u):
            return jnp.sum(jax.checkpoint(scan)(**low | {"u": u})[0])

        want = oracle.gradients(ops, np.ones((2, 3, 5)), np.zeros((2, 5, 3)))["u"]
        oracle.assert_close(jax.jit(jax.grad(loss))(low["u"]), want)
