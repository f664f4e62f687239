"""Layers computed once more in the backward pass: the same gradient from less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, write
from molora_jax.models import transformer
from molora_jax.training.batch import batch, layout
from tests import fakes
from tests.numerics import assert_close


@pytest.mark.parametrize("unrolled", [False, True])
def test_rematerialised_layers_give_the_same_gradient(unrolled):
    stacked = fakes.model("llama_untied")
    cfg, params = fakes.weights("llama_untied", unrolled=unrolled)
    new = fresh(*stacked, "new", rank=2, sites=("attn.q_proj", "mlp.down_proj"), spread=0.1)
    spec = BankSpec.holding([new])
    bank = write(new_bank(spec, params), 0, pack(spec, params, new))
    b = batch(np.random.default_rng(0).integers(0, 97, (2, 64)))

    def loss(bank, remat):
        route = Route.of(jnp.zeros(b.tokens.size, jnp.int32))
        tokens = b.tokens.reshape(-1)
        return jnp.sum(
            transformer.apply(cfg, params, tokens, layout(b), bank=bank, route=route, remat=remat).hidden ** 2
        )

    programs = [jax.jit(jax.grad(loss, allow_int=True), static_argnums=1).lower(bank, r).compile() for r in (0, 1)]
    plain, again = (program(bank) for program in programs)
    jax.tree.map(lambda a, b: assert_close(a, b, "model"), again, plain)
    if not unrolled:
        before, after = (program.memory_analysis().temp_size_in_bytes for program in programs)
        assert after < before / 2
