"""What a composition does with texts whose domains are known: how sure its router is, and whom it chooses."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import router_metrics
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.route import LAYER, Choice
from molora_jax.adapters.selection import Placement
from molora_jax.checkpoints.model import Model
from molora_jax.config import ModelConfig
from molora_jax.data.batch import Batch
from molora_jax.data.document import from_example
from molora_jax.data.example import Example
from molora_jax.data.packing import assemble
from molora_jax.data.token_domains import token_domains
from molora_jax.training import mixture
from molora_jax.training.batch import layout
from molora_jax.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class Routing:
    """Averages over the tokens of some examples.

    Attributes:
      by_layer: "top_mass", "margin", "entropy", "switch_rate", "weight" (of the strongest expert as it is applied: 1
        for a hard choice), each a number a layer. Of a router that decides at every site, the mean over sites.
      domains, experts: names of the rows and columns of `confusion`.
      confusion: of each domain's tokens, the share whose strongest expert it is, over all layers.
    """

    by_layer: dict[str, list[float]]
    domains: tuple[str, ...]
    experts: tuple[str, ...]
    confusion: Float[np.ndarray, "K J"]

    def mean(self, name: str) -> float:
        """Over the layers."""
        return float(np.mean(self.by_layer[name]))


def routing(model: Model, found: Composition, examples: Sequence[Example], *, rows: int = 16, length: int = 128):
    """The `Routing` of a composition on worked examples, prompts included.

    Raises:
      UserError: an example of more than `length` tokens, or a router without scores.
    """
    tree = mixture.tree(model.params, found.experts, found.mixer, found.attention)
    named = [token_domains(model.tokenizer, example) for example in examples]
    domains = tuple(sorted({name for names in named for name in names}))
    experts = len(found.experts)
    totals, sums, counts, weight = np.zeros((len(domains), experts)), {}, np.zeros(len(domains)), 0
    for at in range(0, len(examples), rows):
        part = examples[at : at + rows]
        documents = [[from_example(model.tokenizer, example)] for example in part]
        batch = assemble(documents + [[]] * (rows - len(part)), length)
        measured, shares = _measured(model.cfg, tree, batch, found.mixer)
        tokens = int(batch.valid.sum())
        weight += tokens
        for name, values in measured.items():
            sums[name] = sums.get(name, 0) + tokens * np.asarray(values)
        own = _domain_ids(named[at : at + rows], domains, batch.tokens.shape)
        for i in range(len(domains)):
            mine = own.reshape(-1) == i
            totals[i] += np.asarray(shares)[mine].sum(axis=0)
            counts[i] += mine.sum()
    by_layer = {name: (value / weight).tolist() for name, value in sums.items()}
    names = tuple(expert.name for expert in found.experts)
    return Routing(by_layer, domains, names, totals / np.maximum(counts, 1)[:, None])


def _domain_ids(named: Sequence[Sequence[str]], domains: tuple[str, ...], shape) -> np.ndarray:
    """Number of each token's domain by the rows' names, -1 for pads."""
    ids = np.full(shape, -1)
    for i, names in enumerate(named):
        ids[i, : len(names)] = [domains.index(name) for name in names]
    return ids


@functools.partial(jax.jit, static_argnums=0)
def _measured(cfg: ModelConfig, tree: Any, batch: Batch, mixer: Any) -> tuple[dict[str, Array], Float[Array, "N J"]]:
    """(numbers by layer, how often each expert was each token's strongest: shares over layers and sites)."""
    trace = mixture.forward(cfg, tree, batch, mixer).trace
    places, placement = layout(batch), mixer.placement
    found = [_of(choice, placement, places) for choice in ([trace[LAYER]] if LAYER in trace else trace.values())]
    mean = lambda *leaves: sum(leaves) / len(leaves)
    return jax.tree.map(mean, *[numbers for numbers, _ in found]), mean(*[shares for _, shares in found])


def _of(choice: Choice, placement: Placement, places) -> tuple[dict[str, Array], Float[Array, "N J"]]:
    numbers = {}
    if choice.scores is not None:
        numbers = router_metrics.measure(choice, placement, places)
        del numbers["load"]
    valid = places.valid.reshape(-1)
    top = jnp.max(choice.weights, axis=-1) if choice.ids is None else jnp.ones(choice.ids.shape)
    top = top if choice.gate is None else top * choice.gate
    numbers["weight"] = jnp.sum(jnp.where(valid, top, 0), axis=-1) / jnp.maximum(jnp.sum(valid), 1)
    mine = router_metrics.strongest(choice)[..., None] == placement.slots
    return numbers, jnp.mean(mine.astype(jnp.float32).reshape(-1, *mine.shape[-2:]), axis=0)
