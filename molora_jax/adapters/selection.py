"""From the scores of experts to a choice of one, straight through or not, or to a mixture."""

import dataclasses
import functools
import itertools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from molora_jax.adapters.route import NONE, ROUTED, Choice
from molora_jax.config import UserError
from molora_jax.typing import Array, Bool, Float, Int

Mode = Literal["hard", "hard_dense", "switch", "gumbel", "soft", "top_k", "equal"]
ONE = ("hard", "hard_dense", "switch", "gumbel")
"""The modes that choose one expert; the others mix."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How scores become a choice, with p = softmax(scores / temperature).

    Attributes:
      mode: `hard`: the best expert at unit scale; its gradient is that of the factor p_e (sparse straight-through, as
        released with Molavi et al. 2026, where the factor is stop_gradient(1 - p_e) + p_e).
        `hard_dense`: the same value; the gradient is that of the mixture Σ p_e Δ_e over all experts.
        `switch`: the best expert times p_e (Fedus et al. 2021, eq. 2).
        `gumbel`: `hard_dense` of scores + Gumbel noise, so that an expert is drawn with its probability at temperature
        1 (Jang et al. 2016, §2.2); without a key there is no noise.
        `soft`: Σ p_e Δ_e.
        `top_k`: a softmax over the k best scores. That is p normalised over the k best: normalised top-2 is k=2.
        `equal`: 1/k each for the k best, or drawn without replacement if there is noise (Qiu et al. 2026, ReMix); no
        gradient passes, `log_prob` is what a policy gradient needs.
      k: experts at a time, of `top_k` and `equal`.
      factored: mix the factors A and B apart (see `Choice`).
    """

    mode: Mode = "hard"
    k: int | None = None
    factored: bool = False

    def __post_init__(self):
        if self.mode not in get_args(Mode):
            raise UserError(f"router: got mode {self.mode!r}, expected one of {', '.join(get_args(Mode))}")
        if (self.k is not None) != (self.mode in ("top_k", "equal")) or self.k is not None and self.k < 1:
            raise UserError(f"router: got k={self.k} for {self.mode}, expected 1 or more for top_k and equal alone")
        if self.factored and self.mode in ONE:
            raise UserError(f"router: got factored for {self.mode}, expected a mode that mixes: soft, top_k or equal")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["slots"], meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a router's J experts are.

    Attributes:
      slots: in the bank; `NONE` where the expert is the base alone.
      size: E, slots of the bank.
    """

    slots: Int[Array, "J"]
    size: int

    def spread(self, weights: Float[Array, "N J"]) -> Float[Array, "N E"]:
        """Weights of the bank's slots; what falls on the base is dropped."""
        to = jnp.where(self.slots < 0, self.size, self.slots)
        return jnp.zeros((len(weights), self.size), weights.dtype).at[:, to].add(weights, mode="drop")

    def gather(self, weights: Float[Array, "N E"]) -> Float[Array, "N J"]:
        """Of weights of the slots, those of the router's experts."""
        return jnp.where(self.slots < 0, 0, weights[:, jnp.maximum(self.slots, 0)])


def select(
    rule: Rule,
    scores: Float[Array, "N J"],
    placement: Placement,
    given: Choice | None = None,
    *,
    temperature: Float[Array, ""] | float = 1.0,
    eligible: Bool[Array, "N J"] | None = None,
    noise: Float[Array, "N J"] | None = None,
) -> Choice:
    """The choice that a rule makes of scores.

    What is given keeps its value, to the bit, and beside it the gradient of the scores is that of the given route:
    given ids but `ROUTED`, with given gates where there are some (else `switch` computes them anew); or given weights,
    whose zeros mark what was left out.

    Args:
      eligible: experts to choose from; a token without any has none.
    """
    mask = jnp.ones(scores.shape, bool) if eligible is None else eligible
    noisy = scores if noise is None else scores + noise
    if rule.mode in ONE:
        if given is not None and given.ids is None:
            return given
        choice = _one(rule, noisy, placement, given, mask, temperature)
    else:
        choice = _mixture(rule, noisy, placement, given, mask, temperature)
    return dataclasses.replace(choice, scores=scores)


def _one(rule: Rule, scores, placement: Placement, given, mask, temperature) -> Choice:
    p = softmax(scores / temperature, mask)
    best = jnp.argmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    ids = jnp.where(jnp.any(mask, axis=-1), placement.slots[best], NONE)
    routed = jnp.ones(ids.shape, bool) if given is None else given.ids == ROUTED
    ids = ids if given is None else jnp.where(routed, ids, given.ids)
    mine = ids[:, None] == placement.slots
    own = jnp.sum(jnp.where(mine, p, 0), axis=-1)
    value = jnp.where(jnp.any(mine, axis=-1), own, 1) if rule.mode == "switch" else jnp.ones_like(own)
    if given is not None and given.gate is not None:
        value = jnp.where(routed, value, given.gate)
    if rule.mode in ("hard", "switch"):
        return Choice(ids=ids, gate=with_gradient(value, own))
    gated = given is not None and given.gate is not None
    return Choice(ids=ids, weights=placement.spread(p), gate=value if gated else None)


def _mixture(rule: Rule, scores, placement: Placement, given, mask, temperature) -> Choice:
    recorded = given is not None and given.ids is None
    if recorded:
        own = placement.gather(given.weights) != 0
        short = jnp.sum(own, axis=-1, keepdims=True) < (rule.k or scores.shape[-1])  # the base had a share, if it may
        mask = mask & (own | (short & (placement.slots < 0)))
    elif rule.k is not None:
        mask = mask & best_k(jnp.where(mask, scores, -jnp.inf), rule.k)
    if rule.mode == "equal":
        weights = mask / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1).astype(scores.dtype)
    else:
        weights = softmax(scores / temperature, mask)
    return with_given(placement.spread(weights), given, factored=rule.factored)


def with_given(weights: Float[Array, "*L N E"], given: Choice | None, *, factored: bool = False) -> Choice:
    """The mixture by `weights` of the tokens for which nothing is given; of the others what is, as `select` says."""
    if given is None:
        return Choice(weights=weights, factored=factored)
    if given.ids is None:
        return Choice(weights=with_gradient(given.weights, weights), gate=given.gate, factored=given.factored)
    whole = (given.ids[:, None] == jnp.arange(weights.shape[-1])).astype(weights.dtype)
    return Choice(weights=jnp.where((given.ids == ROUTED)[:, None], weights, whole), factored=factored)


def with_gradient(value: Array, through: Array) -> Array:
    """`value` to the bit, with the gradient of `through`: adds an exact zero."""
    return jax.lax.stop_gradient(value) + (through - jax.lax.stop_gradient(through))


def softmax(scores: Float[Array, "*N J"], mask: Bool[Array, "*N J"] | None = None) -> Float[Array, "*N J"]:
    """Probabilities of the experts in `mask`; all zero where there is none."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    powers = jnp.where(mask, jnp.exp(jnp.where(mask, scores - jnp.where(jnp.isfinite(top), top, 0), 0)), 0)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers / jnp.where(total == 0, 1, total)


def best_k(scores: Float[Array, "*N J"], k: int) -> Bool[Array, "*N J"]:
    """The k best; of equals, the first."""
    _, best = jax.lax.top_k(scores, min(k, scores.shape[-1]))
    return jnp.any(best[..., None] == jnp.arange(scores.shape[-1]), axis=-2)


def log_prob(
    scores: Float[Array, "*N J"], chosen: Bool[Array, "*N J"], k: int, temperature: Float[Array, ""] | float = 1.0
) -> Float[Array, "*N"]:
    """log P of drawing the k `chosen` experts one after another without replacement, in whatever order.

    What `equal` draws from, and so what a policy gradient needs: REINFORCE with a leave-one-out baseline in Qiu et al.
    2026 (ReMix). Every order's probability is a product of softmaxes over those that are left (Plackett-Luce).
    """
    if not 1 <= k <= 4:
        raise UserError(f"log_prob: got k={k}, expected 1 to 4: it sums over the k! orders")
    scores = scores / temperature
    _, members = jax.lax.top_k(chosen.astype(scores.dtype), k)
    picks = [members[..., i, None] == jnp.arange(scores.shape[-1]) for i in range(k)]
    orders = []
    for order in itertools.permutations(picks):
        left, total = jnp.ones(scores.shape, bool), 0
        for pick in order:
            among = jax.nn.logsumexp(jnp.where(left, scores, -jnp.inf), axis=-1)
            total = total + jnp.sum(jnp.where(pick, scores, 0), axis=-1) - among
            left = left & ~pick
        orders.append(total)
    return jax.nn.logsumexp(jnp.stack(orders), axis=0)
