"""What the gates of an expert do: their scales on given texts, and the expert with less and less of them."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import ablation
from molora_jax.adapters.bank import Bank
from molora_jax.adapters.route import Route
from molora_jax.config import ModelConfig
from molora_jax.data.document import Document
from molora_jax.data.packing import assemble
from molora_jax.models import transformer
from molora_jax.nn.layout import Layout
from molora_jax.training.batch import layout
from molora_jax.typing import Array, Float, Int, Params


@functools.partial(jax.jit, static_argnums=0)
def scales(
    cfg: ModelConfig, params: Params, bank: Bank, tokens: Int[Array, "N"], layout: Layout
) -> dict[str, Float[Array, "L N *R"]]:
    """λ that the expert in slot 0 gives each token in each layer, by site."""
    route = Route.of(jnp.zeros(len(tokens), jnp.int32))
    found = transformer.apply(cfg, params, tokens, layout, bank=bank, route=route, taps=("gates",)).taps["gates"]
    return {site: lam[:, :, 0] for site, lam in found.items()}


def means(
    cfg: ModelConfig, params: Params, bank: Bank, documents: Sequence[Document]
) -> dict[str, Float[Array, "L E *R"]]:
    """The mean λ over all tokens of some documents, by site, as `ablation.frozen` takes it: E is 1."""
    batch = assemble([[document] for document in documents], max(map(len, documents)))
    found = scales(cfg, params, bank, batch.tokens.reshape(-1), layout(batch))
    return ablation.means({site: lam[:, :, None] for site, lam in found.items()}, batch.valid.reshape(-1))


def variants(bank: Bank, constants: Mapping[str, Float[Array, "L E *R"]]) -> dict[str, Bank]:
    """The expert as it is ("gate"); reading each token as if it were the first ("reset"); with constant scales, those
    given ("mean") or 1 ("one").
    """
    ones = {site: np.ones_like(lam) for site, lam in constants.items()}
    return {
        "gate": bank,
        "reset": ablation.without_memory(bank),
        "mean": ablation.frozen(bank, constants),
        "one": ablation.frozen(bank, ones),
    }
