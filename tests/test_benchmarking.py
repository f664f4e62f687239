"""What the benchmarks measure with."""

import numpy as np
import pytest

from molora_jax import benchmarking


def test_the_peak_of_a_call_is_what_it_held_at_most():
    def call():
        first = np.ones(24 << 20, np.uint8)
        del first
        return np.ones(8 << 20, np.uint8).sum()

    peak = benchmarking.peak_bytes(call)
    if peak is None:
        pytest.skip("this system does not tell a process's peak memory: Linux does")
    assert 20 << 20 < peak < 40 << 20
