"""Next token from logits: greedy, or temperature with top-k, top-p and min-p, without a sort.

A sort of the vocabulary is slow on a CPU and takes half a minute to compile for TPU. Both cuts only need the score of
the last token kept, found by bisection over the ordered integers that floats map to: exact in as many turns as bits.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from molora_jax.typing import Array, Bool, Float, Int, Key, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each of B requests samples; the cuts apply in the order of the fields, as in transformers.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep so many of the likeliest tokens (and what ties with the last); 0 keeps all.
      top_p: keep the likeliest tokens until their mass reaches this; 1 keeps all.
      min_p: drop tokens less likely than this fraction of the likeliest; 0 drops none.
      seed: of the request; a token depends on it, its position and the model alone.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    seed: UInt32[Array, "B"]

    @classmethod
    def greedy(cls, rows: int) -> "Sampling":
        full = lambda value, dtype: jnp.full((rows,), value, dtype)
        f32 = jnp.float32
        return cls(full(0, f32), full(0, jnp.int32), full(1, f32), full(0, f32), full(0, jnp.uint32))


SAMPLE = 0
"""Purpose of a random draw, folded into its key last; `routing.program` has those of verification and routing."""


def keys(
    seed: UInt32[Array, "B"], position: Int[Array, "B"], model: int | Int[Array, "B"], purpose: int
) -> Key[Array, "B"]:
    """A key for each request, the same in whatever batch, bucket or order it runs."""

    def one(seed, *parts):
        key = jax.random.key(seed)
        for part in (*parts, purpose):
            key = jax.random.fold_in(key, part)
        return key

    return jax.vmap(one)(seed, position, jnp.broadcast_to(jnp.asarray(model, jnp.int32), seed.shape))


def draw(
    seed: UInt32[Array, "B"], position: Int[Array, "B"], *, model: int | Int[Array, "B"], purpose: int
) -> Float[Array, "B"]:
    """One uniform number in [0, 1) for each request."""
    return jax.vmap(jax.random.uniform)(keys(seed, position, model, purpose))


def argmax(scores: Float[Array, "B V"]) -> Int[Array, "B"]:
    """First index of the highest score. Two plain reductions: XLA's CPU argmax is not vectorised.

    They run vocabulary-major, the way that the head's matmul leaves its result: see `only_if`.
    """
    columns = scores.T
    index = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    best = columns == jnp.max(columns, axis=0, keepdims=True)
    return jnp.min(jnp.where(best, index, columns.shape[0] - 1), axis=0)


def only_if(wanted: Bool[Array, ""], compute: Callable[[Array], Array], otherwise: Array, scores: Float[Array, "B V"]):
    """`compute(scores)` if it is wanted, else `otherwise`.

    The scores cross the branch transposed, so that XLA cancels this with the transpose at the end of `logits`, and
    copies 6 MB of them (a tenth of a step of 32 rows on a CPU) only when the branch is taken.
    """
    return jax.lax.cond(wanted, lambda columns: compute(columns.T), lambda _: otherwise, scores.T)


def log_prob(
    scores: Float[Array, "B V"], token: Int[Array, "B"], temperature: Float[Array, "B"] | None = None
) -> Float[Array, "B"]:
    """log softmax(scores / temperature)[token]; a temperature of 0, as none, is 1."""
    if temperature is not None:
        scores = scores / jnp.where(temperature > 0, temperature, 1)[:, None].astype(scores.dtype)
    chosen = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(scores, axis=-1)


def sample(
    scores: Float[Array, "B V"], sampling: Sampling, position: Int[Array, "B"], *, model: int | Int[Array, "B"] = 0
) -> Int[Array, "B"]:
    """The token at `position` of each request; `model` is who writes it."""
    greedy = argmax(scores)

    def random(scores):
        uniform = draw(sampling.seed, position, model=model, purpose=SAMPLE)
        token = _inverse_cdf(jnp.exp(_cut(scores, sampling)), uniform)
        return jnp.where(sampling.temperature > 0, token, greedy)

    return only_if(jnp.any(sampling.temperature > 0), random, greedy, scores)


def distribution(scores: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """What `sample` draws from: probabilities after temperature and cuts; the greedy token has them all."""
    mass = jax.nn.softmax(_cut(scores, sampling), axis=-1)
    greedy = argmax(scores)[:, None] == jnp.arange(scores.shape[1])
    return jnp.where(sampling.temperature[:, None] > 0, mass, greedy.astype(mass.dtype))


def _cut(scores: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Scores over temperature, the highest exactly 0; -inf for the tokens that top-k, top-p and min-p drop."""

    def top_k(scores):
        wanted = jnp.where(sampling.top_k > 0, sampling.top_k, scores.shape[1])
        return _keep(scores, jnp.ones_like(scores), jnp.minimum(wanted, scores.shape[1]).astype(scores.dtype))

    def top_p(scores):
        mass = jnp.exp(scores)
        wanted = jnp.where(sampling.top_p < 1, sampling.top_p.astype(mass.dtype) * jnp.sum(mass, axis=-1), jnp.inf)
        return _keep(scores, mass, wanted)

    # in this order: a fused multiply-add would not give 0 for the highest if the division came first
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    scores = scores / jnp.maximum(sampling.temperature, 1e-6)[:, None].astype(scores.dtype)
    scores = jax.lax.cond(jnp.any(sampling.top_k > 0), top_k, lambda s: s, scores)
    scores = jax.lax.cond(jnp.any(sampling.top_p < 1), top_p, lambda s: s, scores)
    return jnp.where(scores < jnp.log(sampling.min_p)[:, None].astype(scores.dtype), -jnp.inf, scores)


def _keep(scores: Float[Array, "B V"], mass: Float[Array, "B V"], wanted: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Keeps the fewest highest scores whose mass reaches `wanted`, with all that tie with the last of them."""
    order = _ordered(scores)
    info = jnp.iinfo(order.dtype)

    def halve(_, bounds):
        low, high = bounds  # mass at or above `low` reaches `wanted` (or low is the least), above `high` it does not
        middle = (low & high) + ((low ^ high) >> 1)
        middle = middle + ((low ^ high) & 1)  # round up, so that the bounds meet
        enough = jnp.sum(jnp.where(order >= middle[:, None], mass, 0), axis=-1) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    start = jnp.full(scores.shape[:1], info.min, order.dtype), jnp.full(scores.shape[:1], info.max, order.dtype)
    last, _ = jax.lax.fori_loop(0, info.bits, halve, start)
    return jnp.where(order >= last[:, None], scores, -jnp.inf)


def _ordered(scores: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Integers in the order of the floats: IEEE bits, the negatives flipped."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int64 if scores.dtype == jnp.float64 else jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _inverse_cdf(mass: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """The token at which the running sum of `mass` passes `uniform` of its total: first a run of tokens, then in it."""
    B, V = mass.shape
    run = 256
    runs = jnp.pad(mass, ((0, 0), (0, -V % run))).reshape(B, -1, run)
    sums = jnp.sum(runs, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform.astype(mass.dtype) * ends[:, -1]
    nth = _first(ends > target[:, None], sums)
    inside = jnp.take_along_axis(runs, nth[:, None, None], axis=1)[:, 0]
    before = jnp.take_along_axis(ends - sums, nth[:, None], axis=1)
    return (nth * run + _first(before + jnp.cumsum(inside, axis=-1) > target[:, None], inside)).astype(jnp.int32)


def _first(passed: Bool[Array, "B N"], mass: Float[Array, "B N"]) -> Int[Array, "B"]:
    """First index that has passed, or else the last; never one without mass, wherever rounding puts the target."""
    index = jax.lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1, keepdims=True)
    return jnp.min(jnp.where(passed & (mass > 0), index, last), axis=-1)
