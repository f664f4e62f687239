"""Learned routers: a linear or two-layer scorer of the experts, for each token or each row, once a layer or a site."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from molora_jax.adapters.bank import Site
from molora_jax.adapters.route import Choice
from molora_jax.adapters.selection import Placement, Rule, select, softmax
from molora_jax.config import UserError
from molora_jax.nn.layout import Dense, Layout
from molora_jax.nn.linear import Linear
from molora_jax.typing import Array, Bool, Float, Int, Params

Pooling = Literal["scores", "probabilities"]


class Scorer(nnx.Module):
    """Declares one scorer of J experts, or a stack of them, one a layer; `scorer(x)` gives scores [N J]."""

    def __init__(
        self, width: int, experts: int, *, hidden: int = 0, bias: bool = False, stack=(), rngs: nnx.Rngs, dtype
    ):
        kw = dict(rngs=rngs, stack=stack, dtype=dtype)
        if hidden:
            self.hidden = Linear(width, hidden, axes=(None, "embed"), bias=True, **kw)
        self.out = Linear(hidden or width, experts, axes=(None, None if hidden else "embed"), bias=bias, **kw)

    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N J"]:
        return score(nnx.to_pure_dict(nnx.state(self, nnx.Param)), x)


def score(params: Params, x: Float[Array, "N D"]) -> Float[Array, "N J"]:
    """W x, or W_o relu(W_h x + b) (Shah & Wagle 2026, MoLoRA: two layers), in fp32 or wider."""
    if "hidden" in params:
        x = jax.nn.relu(_linear(params["hidden"], x))
    return _linear(params["out"], x)


def _linear(params: Params, x):
    wide = jnp.promote_types(jnp.promote_types(x.dtype, params["weight"].dtype), jnp.float32)
    y = jnp.einsum("nd,jd->nj", x.astype(wide), params["weight"].astype(wide), precision="highest")
    return y + params["bias"].astype(wide) if "bias" in params else y


DATA = ["params", "placement", "temperature", "key"]
SETTINGS = ["rule", "pooling", "per_layer", "per_site"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=SETTINGS)
@dataclasses.dataclass(frozen=True)
class Router:
    """Decides from the input of a block or a site; made by `new_router`. As `Route.router` it runs inside the decoder.

    Attributes:
      params: what trains: of one scorer, or of one for each site by its name; leaves lead with L if `per_layer`.
      placement: where the experts are.
      rule: how scores become a choice.
      temperature: of the softmax.
      key: of the noise, if there is to be any; each layer, site, row and position has its own.
      pooling: None decides for each token; else one choice for all tokens of a row (of each document, where rows are
        packed), from their mean scores or from their mean probabilities.
      per_layer: every layer has a scorer of its own; else one serves all, on each layer's own input.
      per_site: a decision for each projection, from its own input; else one a layer.
    """

    params: Params
    placement: Placement
    rule: Rule = Rule()
    temperature: Float[Array, ""] | float = 1.0
    key: Array | None = None
    pooling: Pooling | None = None
    per_layer: bool = False
    per_site: bool = False

    def at(self, layer: Int[Array, ""] | int) -> "Router":
        """The router of one layer."""
        params = jax.tree.map(lambda leaf: leaf[layer], self.params) if self.per_layer else self.params
        key = None if self.key is None else jax.random.fold_in(self.key, layer)
        return dataclasses.replace(self, params=params, key=key)

    def placed(self, slots: Int[Array, "J"], size: int) -> "Router":
        """The same router with its experts in these slots of a bank of `size`."""
        slots, experts = jnp.asarray(slots, jnp.int32), len(self.placement.slots)
        if slots.shape != (experts,):
            raise UserError(f"router: got slots of shape {slots.shape}, expected one for each of {experts} experts")
        return dataclasses.replace(self, placement=Placement(slots, size))

    def scores(self, x: Float[Array, "N D"], site: str | None = None) -> Float[Array, "N J"]:
        """Of each expert for each token, before any pooling."""
        return score(self.params[site] if self.per_site else self.params, x)

    def judge(
        self, key: str, x: Float[Array, "N D"], site: Site | None
    ) -> tuple[Float[Array, "N J"], Bool[Array, "N J"] | None]:
        """The scores of one decision, and which experts it may choose, if not all; kinds of routers differ in it."""
        return self.scores(x, key), None

    def decide(
        self,
        key: str,
        x: Float[Array, "D N"],
        site: Site | None,
        given: Choice | None,
        layout: Layout,
        pool: Bool[Array, "N"] | None = None,
    ) -> Choice:
        """The choice of one decision; `bank.LayerExperts` calls it."""
        scores, eligible = self.judge(key, x.T, site)
        if self.pooling is not None:
            scores, some = pooled(self.pooling, scores, layout, pool, self.temperature)
            eligible = jnp.broadcast_to(some[:, None], scores.shape) if eligible is None else some[:, None] & eligible
        noise = None
        if self.key is not None:
            own = jax.random.fold_in(self.key, zlib.crc32(key.encode()))
            noise = gumbel_noise(own, layout, scores, each_token=self.pooling is None)
        how = dict(temperature=self.temperature, eligible=eligible, noise=noise)
        return select(self.rule, scores, self.placement, given, **how)


def new_router(
    width: int | Mapping[str, int],
    experts: int,
    *,
    rule: Rule = Rule(),
    hidden: int = 0,
    bias: bool = False,
    layers: int = 0,
    pooling: Pooling | None = None,
    seed: int = 0,
    dtype=jnp.float32,
) -> Router:
    """A router with normal weights of variance 1/fan-in, its experts in the first slots of a bank of as many.

    Args:
      width: D of what it reads; of each site, if it decides for each (see `spec.projection_shape`).
      experts: J.
      hidden: width of the hidden layer; 0 for none.
      layers: L for a scorer in each layer; 0 for one that all share.
    """
    if experts < 1 or rule.k is not None and rule.k > experts:
        raise UserError(f"router: got {experts} experts and k={rule.k}, expected at least one, and k of them at most")
    rngs = nnx.Rngs(seed)
    how = dict(hidden=hidden, bias=bias, stack=(layers,) if layers else (), rngs=rngs, dtype=dtype)
    own = lambda d: nnx.to_pure_dict(nnx.state(Scorer(d, experts, **how), nnx.Param))
    per_site = isinstance(width, Mapping)
    return Router(
        params={site: own(d) for site, d in width.items()} if per_site else own(width),
        placement=Placement(jnp.arange(experts, dtype=jnp.int32), experts),
        rule=rule,
        pooling=pooling,
        per_layer=layers > 0,
        per_site=per_site,
    )


def restricted(router: Router, experts: Sequence[int]) -> Router:
    """The router of some of its experts, which it judges as before, in the first slots of a bank of as many."""
    kept = jnp.asarray(experts, jnp.int32)
    params = over_experts(lambda leaf, axis: jnp.take(leaf, kept, axis=axis), router.params)
    return dataclasses.replace(router, params=params, placement=Placement(jnp.arange(len(kept)), len(kept)))


def over_experts(change: Callable[..., Array], params: Params, *others: Params) -> Params:
    """The params with change(leaf, *leaves of the others, axis) for each leaf that has an axis of J experts."""

    def at(path, leaf, *rest):
        names = [entry.key for entry in path]
        return change(leaf, *rest, axis=-1 if names[-1] == "bias" else -2) if "out" in names else leaf

    return jax.tree_util.tree_map_with_path(at, params, *others)


def cooled(step: Int[Array, ""], steps: int, *, start=1.0, end=0.1, shape: Literal["cosine", "exponential"] = "cosine"):
    """Temperature at a step of `steps`: from `start` to `end`, and `end` from then on."""
    done = jnp.clip(step / max(steps, 1), 0, 1)
    if shape == "exponential":
        return start * (end / start) ** done
    return end + (start - end) * (1 + jnp.cos(jnp.pi * done)) / 2


def pooled(
    how: Pooling, scores: Float[Array, "N J"], layout: Layout, pool: Bool[Array, "N"] | None, temperature=1.0
) -> tuple[Float[Array, "N J"], Bool[Array, "N"]]:
    """Scores of each token's row, and whether it has any: the mean over its valid tokens, or those in `pool`.

    For `probabilities` they are the logarithms of the mean of softmax(scores / temperature), times the temperature.
    """
    if not isinstance(layout, Dense):
        raise UserError(
            "router: got rows in parts for a router that decides once a row, expected whole rows (Dense): decide there "
            "beforehand, and give the choices (router.of_rows, router.for_tokens)"
        )
    rows = row_of_token(layout)
    seen = layout.valid.reshape(-1) if pool is None else layout.valid.reshape(-1) & pool
    values = scores if how == "scores" else softmax(scores / temperature)
    total = lambda v: jax.ops.segment_sum(v, rows, len(rows))
    count = total(seen.astype(scores.dtype))
    mean = total(jnp.where(seen[:, None], values, 0)) / jnp.maximum(count, 1)[:, None]
    if how == "probabilities":
        mean = jnp.log(jnp.maximum(mean, jnp.finfo(mean.dtype).tiny)) * temperature
    return mean[rows], (count > 0)[rows]


def row_of_token(layout: Dense) -> Int[Array, "N"]:
    """A number below N for each row, and for each document of it where several are packed."""
    rows, length = layout.shape
    first = jax.vmap(lambda s: jnp.searchsorted(jnp.sort(s), s))(layout.segments)
    return (first + jnp.arange(rows)[:, None] * length).reshape(-1)


def of_rows(trace: Mapping[str, Choice], layout: Dense) -> dict[str, Choice]:
    """The choices of B rows, at the first valid token of each, of a trace of all their tokens."""
    rows, length = layout.shape
    at = jnp.argmax(layout.valid, axis=1) + jnp.arange(rows) * length
    return for_tokens(trace, at)


def for_tokens(choices: Mapping[str, Choice], rows: Int[Array, "N"]) -> dict[str, Choice]:
    """The choices of tokens by the number of their row; the last row's where there is none (padding)."""
    axes = dict(ids=-1, gate=-1, weights=-2, scores=-2)

    def spread(choice: Choice) -> Choice:
        leaves = {name: getattr(choice, name) for name in axes}
        taken = {n: jnp.take(v, rows, axis=axes[n], mode="clip") for n, v in leaves.items() if v is not None}
        return dataclasses.replace(choice, **taken)

    return {name: spread(choice) for name, choice in choices.items()}


def gumbel_noise(key: Array, layout: Layout, scores: Float[Array, "N J"], *, each_token: bool) -> Float[Array, "N J"]:
    """Standard Gumbel noise that depends on a token's row, document and position, so that no padding moves it."""
    if isinstance(layout, Dense):
        rows, length = layout.shape
        rows, documents = jnp.repeat(jnp.arange(rows), length), layout.segments.reshape(-1)
    else:
        rows, documents = layout.rows, jnp.zeros_like(layout.rows)
    positions = layout.token_positions if each_token else jnp.zeros_like(rows)

    def draw(*numbers):
        own = functools.reduce(jax.random.fold_in, numbers, key)
        return jax.random.gumbel(own, scores.shape[1:], scores.dtype)

    return jax.vmap(draw)(rows, documents, positions)
