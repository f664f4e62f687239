"""X-LoRA: a first pass of the base decides the weights of the experts in a second."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.adapters.route import LAYER, Choice, Route
from molora_jax.adapters.router import Scorer, score
from molora_jax.adapters.selection import Placement, best_k, with_given
from molora_jax.config import UserError
from molora_jax.typing import Array, Float, Int, Params


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "placement", "temperature"],
    meta_fields=["layers", "sites", "layerwise", "k"],
)
@dataclasses.dataclass(frozen=True)
class XLoRA:
    """Weights softmax(MLP(h)/τ) from the hidden state h after the base's last layer (Buehler & Buehler 2024, eq. 3).

    Attributes:
      params: of the scorer; one layer is linear.
      placement: where the experts are.
      temperature: τ.
      layers: L.
      sites: the projections that have weights of their own, as each has in PEFT; () for one set a layer.
      layerwise: other weights in every layer; else the same in all, and at all sites.
      k: keep the k largest weights, as they are; None for all.
    """

    params: Params
    placement: Placement
    temperature: Float[Array, ""] | float = 1.0
    layers: int = 1
    sites: tuple[str, ...] = ()
    layerwise: bool = True
    k: int | None = None

    def placed(self, slots: Int[Array, "J"], size: int) -> "XLoRA":
        """The same with its experts in these slots of a bank of `size`."""
        return dataclasses.replace(self, placement=Placement(jnp.asarray(slots, jnp.int32), size))

    def weights(self, hidden: Float[Array, "N D"]) -> dict[str, Float[Array, "*L N J"]]:
        """Of the experts, by decision."""
        scores = score(self.params, hidden) / self.temperature
        experts, names = len(self.placement.slots), self.sites or (LAYER,)
        if not self.layerwise:
            return {LAYER: self._kept(jax.nn.softmax(scores, axis=-1))}
        scores = scores.reshape(len(hidden), self.layers, len(names), experts)
        p = jnp.transpose(self._kept(jax.nn.softmax(scores, axis=-1)), (2, 1, 0, 3))
        return dict(zip(names, p, strict=True))

    def route(self, hidden: Float[Array, "N D"], given: Choice | None = None) -> Route:
        """The route of the second pass, from `transformer.apply(...).hidden` of the first, run without a bank.

        In decoding, the first pass keeps a state of its own. Tokens with `given` ids but `ROUTED` keep those.
        """
        spread = lambda w: self.placement.spread(w) if w.ndim == 2 else jax.vmap(self.placement.spread)(w)
        return Route({name: with_given(spread(w), given) for name, w in self.weights(hidden).items()})

    def _kept(self, p):
        return p if self.k is None else jnp.where(best_k(p, self.k), p, 0)


def xlora(
    width: int,
    experts: int,
    layers: int,
    *,
    sites: tuple[str, ...] = (),
    hidden: int = 0,
    layerwise: bool = True,
    k: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> XLoRA:
    """A random scorer; `hidden` is the width of its hidden layer, 0 for none."""
    if k is not None and not 1 <= k <= experts:
        raise UserError(f"xlora: got k={k} of {experts} experts, expected 1 to as many")
    outputs = experts * layers * max(len(sites), 1) if layerwise else experts
    scorer = Scorer(width, outputs, hidden=hidden, bias=True, rngs=nnx.Rngs(seed), dtype=jnp.float32)
    return XLoRA(
        params=nnx.to_pure_dict(nnx.state(scorer, nnx.Param)),
        placement=Placement(jnp.arange(experts, dtype=jnp.int32), experts),
        temperature=temperature,
        layers=layers,
        sites=tuple(sites),
        layerwise=layerwise,
        k=k,
    )
