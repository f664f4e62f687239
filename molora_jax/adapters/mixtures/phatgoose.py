"""PHATGOOSE: a gate for each expert and site, trained alone on that expert's data, then compared with the others'."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from molora_jax.adapters.route import Choice
from molora_jax.adapters.router import DATA, SETTINGS, Router, score
from molora_jax.adapters.selection import Placement, Rule
from molora_jax.config import UserError


@functools.partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=[*SETTINGS, "training"])
@dataclasses.dataclass(frozen=True)
class Phatgoose(Router):
    """Scores v̄_e·x̄ / √D of standardised gate vectors and inputs (Muqeeth et al. 2024, §3.2).

    An expert without a gate vector at a site (it is zero) is not chosen there.

    Attributes:
      training: instead, the given experts' updates are multiplied by σ(v_e·x), to train v_e with the expert frozen
        (§3.1 there).
    """

    training: bool = False

    def judge(self, key, x, site):
        gates = self.params[key]["out"]["weight"]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scores = score({"out": {"weight": _standardised(gates)}}, _standardised(wide)) / x.shape[-1] ** 0.5
        return scores, jnp.broadcast_to(jnp.any(gates != 0, axis=-1), scores.shape)

    def decide(self, key, x, site, given, layout, pool=None):
        if not self.training:
            return super().decide(key, x, site, given, layout, pool)
        if given is None or given.ids is None:
            raise UserError(f"phatgoose: got no ids at {key}, expected the expert whose gate trains: Route.of(ids)")
        logits = self.scores(x.T, key)
        mine = given.ids[:, None] == self.placement.slots
        own = jnp.sum(jnp.where(mine, jax.nn.sigmoid(logits), 0), axis=-1)
        return Choice(ids=given.ids, gate=jnp.where(jnp.any(mine, axis=-1), own, 1), scores=logits)


def phatgoose(widths: Mapping[str, int], experts: int, layers: int, *, k: int = 2, training: bool = False) -> Phatgoose:
    """Gate vectors of zero, to train; the softmax is over the k best.

    Args:
      widths: D of each site by its name.
    """
    return Phatgoose(
        params={site: {"out": {"weight": jnp.zeros((layers, experts, d))}} for site, d in widths.items()},
        placement=Placement(jnp.arange(experts, dtype=jnp.int32), experts),
        rule=Rule("top_k", k=k),
        per_layer=True,
        per_site=True,
        training=training,
    )


def _standardised(v):
    """Mean 0 and variance 1 over the last axis; constants become zero."""
    v = v - jnp.mean(v, axis=-1, keepdims=True)
    square = jnp.mean(v**2, axis=-1, keepdims=True)
    return v * jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1)), 0)
