"""What the benchmarks measure with."""

import subprocess
import sys

import pytest

_CALL = """
import numpy as np
from molora_jax import benchmarking

def call():
    first = np.ones(24 << 20, np.uint8)
    del first
    return np.ones(8 << 20, np.uint8).sum()

print(benchmarking.peak_bytes(call))
"""


def test_the_peak_of_a_call_is_what_it_held_at_most():
    # In a process of its own: pages that other tests gave back would be used again without being counted.
    run = subprocess.run([sys.executable, "-c", _CALL], capture_output=True, text=True, check=True)
    if run.stdout.strip() == "None":
        pytest.skip("this system does not tell a process's peak memory: Linux does")
    assert 20 << 20 < int(run.stdout) < 40 << 20
