"""The TPU kernels in the interpreter that models VMEM: races, reads of memory that nobody wrote, bounds."""

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.selective_scan import tpu, tpu_kernel
from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.run import rounded, value_and_gradients

SIZES = (1, 7, 130, 3)


def test_every_chunk_reads_only_what_was_written_before(monkeypatch, capfd):
    """Two chunks of one group each, two blocks of channels; a NaN from VMEM that nobody wrote would reach a result."""
    monkeypatch.setattr(tpu_kernel, "GROUP", 4)
    monkeypatch.setattr(tpu, "CHUNK", 4)
    monkeypatch.setattr(tpu, "STATES_BYTES", 0)
    ops = oracle.operands(*SIZES)
    ops["reset"][:, 2] = True
    ends = oracle.cotangents(*SIZES)
    low, low_ends = rounded(ops, "float32")[0], rounded(ends, "float32")[0]
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    run = jax.jit(value_and_gradients, static_argnames=("backend", "interpret"))
    (y, last), grads = jax.block_until_ready(run(low, **low_ends, backend="tpu", interpret=interpret))
    pltpu.reset_tpu_interpret_mode_state()
    assert "RACE" not in capfd.readouterr().out.upper()
    want = oracle.value(ops)
    oracle.assert_close(y, want[0])
    oracle.assert_close(last, want[1])
    for name, grad in oracle.gradients(ops, **ends).items():
        oracle.assert_close(grads[name], grad, what=name)
