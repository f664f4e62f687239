"""What the public function refuses and chooses, and what its compiled program holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import NotSupported
from pallas_kernels.selective_scan import gpu, selective_scan, specs, tpu
from tests.pallas_kernels.selective_scan import oracle
from tests.pallas_kernels.selective_scan.run import rounded, shapes, value_and_gradients


def operands(*sizes, dtype="float32"):
    return rounded(oracle.operands(*sizes), dtype)[0]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (dict(u=jnp.zeros((4, 5))), "got u (4, 5)"),
        (dict(A=jnp.zeros((5, 0))), "N of at least 1"),
        (dict(A=jnp.zeros((3, 5))), "got A [3, 5], expected [5, 5]"),
        (dict(Bm=jnp.zeros((2, 4, 5))), "got Bm [2, 4, 5], expected [2, 4, 3]"),
        (dict(D=jnp.zeros(3)), "got D [3], expected [5]"),
        (dict(h0=jnp.zeros((2, 3, 5))), "got h0 [2, 3, 5], expected [2, 5, 3]"),
        (dict(u=jnp.zeros((2, 4, 5), int)), "got u of dtype int32, expected a float"),
        (dict(valid=jnp.ones((2, 4))), "got valid [2, 4] of float32, expected [2, 4] of bool"),
        (dict(reset=jnp.ones(4, bool)), "got reset [4] of bool"),
        (dict(backend="triton"), "got backend='triton', expected one of auto"),
    ],
)
def test_operands_that_do_not_fit_end_in_one_line(change, line):
    with pytest.raises(ValueError, match=".") as error:
        selective_scan(**operands(2, 4, 5, 3) | change)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_a_kernel_that_cannot_run_says_what_can(backend):
    with pytest.raises(NotSupported, match="use backend='auto' or 'xla'"):
        selective_scan(**operands(2, 4, 5, 3), backend=backend)


@pytest.mark.parametrize("module", [tpu, gpu])
@pytest.mark.parametrize(
    ("sizes", "dtype", "why"), [((1, 2, 3, 257), "float32", "got 257"), ((1, 2, 3, 4), "float64", "")]
)
def test_kernels_name_what_they_do_not_take(module, sizes, dtype, why):
    name = module.__name__.rpartition(".")[2]
    with jax.enable_x64(dtype == "float64"), pytest.raises(NotSupported, match=why or "float64"):
        selective_scan(**operands(*sizes, dtype=dtype), backend=name, interpret=True)


def test_auto_is_xla_on_a_cpu():
    ops = operands(2, 9, 5, 3)
    program = lambda backend: str(jax.make_jaxpr(lambda ops: selective_scan(**ops, backend=backend))(ops))
    assert program("auto") == program("xla") != program("reference")


def test_a_single_token_is_no_loop():
    lower = lambda name: jax.jit(lambda ops: selective_scan(**ops)).lower(shapes(specs.CPU[name])[0]).as_text()
    assert "while" not in lower("decode")
    assert "while" in lower("gate")


def test_rows_of_more_than_65536_tokens_have_no_tail_that_is_skipped():
    """flash-linear-attention #906: with a decay of 1/2 and inputs of 1 the state settles at 2, to the last token."""
    T = 65_536 + 65
    ones, A = jnp.ones((1, T, 1)), jnp.full((1, 1), -jnp.log(2.0))
    y, pull_back = jax.vjp(jax.jit(lambda u: selective_scan(u, ones, A, ones, ones)[0]), ones)
    np.testing.assert_allclose(y[0, 40:, 0], 2, rtol=1e-6)
    (slope,) = pull_back(ones)
    np.testing.assert_allclose(slope[0, -50:, 0], 2 - 0.5 ** np.arange(49, -1, -1.0), rtol=1e-6)


def test_the_backward_keeps_no_state_of_every_token():
    run = jax.jit(value_and_gradients, static_argnames=("backend", "interpret"))
    lowered = run.lower(*shapes(specs.CPU["gate"]), backend="xla", interpret=False)
    B, T, C, N = specs.CPU["gate"].sizes
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * B * T * C * N / 1.5
