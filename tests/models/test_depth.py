"""A model without some layers is the block loop that skips them, on the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.models import transformer
from molora_jax.models.depth import without_layers
from molora_jax.nn.layout import dense
from tests import fakes

TOKENS = jnp.array([5, 9, 1, 77, 23, 4, 60])


def residual(cfg, params):
    """The stream after every layer: [L, N, D]."""
    return transformer.apply(cfg, params, TOKENS, dense(1, 7), taps=("hidden",)).taps["hidden"]


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("drop", [(0, 0), (1, 1), (2, 2), (0, 1), (1, 2)])
def test_what_stays_is_what_was(unrolled, drop):
    cfg, params = fakes.weights("gemma3", unrolled=unrolled)  # of two kinds of layers: a window, all, a window
    small, kept = without_layers(cfg, params, *drop)
    left = [i for i in range(cfg.layers) if not drop[0] <= i <= drop[1]]
    assert small.layers == len(left)
    assert small.windows == tuple(cfg.windows[i] for i in left)
    want, layers = dict(params), fakes.weights("gemma3", unrolled=True)[1]["layers"]
    want["layers"] = [layers[i] for i in left]
    run = lambda params: transformer.apply(small, params, TOKENS, dense(1, 7)).hidden
    np.testing.assert_allclose(run(kept), run(want), rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(kept), transformer.apply(cfg, params, TOKENS, dense(1, 7)).hidden, atol=1e-2)


def test_leaving_out_the_last_layers_ends_the_stream_early():
    cfg, params = fakes.weights("gemma3", unrolled=True)
    small, kept = without_layers(cfg, params, 1, 2)
    np.testing.assert_allclose(residual(small, kept)[0], residual(cfg, params)[0], rtol=1e-6, atol=1e-6)


def test_unrolled_layers_are_shared():
    cfg, params = fakes.weights("gemma3", unrolled=True)
    _, kept = without_layers(cfg, params, 1, 1)
    own = {id(leaf) for leaf in jax.tree.leaves(params)}
    assert {id(leaf) for leaf in jax.tree.leaves(kept)} < own
    assert len(params["layers"]) == 3


@pytest.mark.parametrize("drop", [(-1, 1), (2, 1), (1, 3), (0, 2)])
def test_layers_that_cannot_go_are_one_line(drop):
    with pytest.raises(UserError, match="drop_layers: got .*, expected FIRST-LAST within 0-2, and a layer left"):
        without_layers(*fakes.weights("gemma3", unrolled=True), *drop)
