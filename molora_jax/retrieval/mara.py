"""MaRA's router: scores segments by a state-space model over their encodings from the first layers of a backbone.

The published system (Dokme & Heck 2026, as in its released code) with its defaults; in addition any number of
candidates, mixers that read in both directions or in no order, anchors that enter the mixer instead of being
encoded again, and channels beside the encodings (`channels`).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx, traverse_util

from molora_jax.config import UserError
from molora_jax.retrieval import mixers
from molora_jax.typing import Array, Bool, Float, Int, Params

WEIGHTS, CONFIG = "mara.safetensors", "mara.json"
POOLINGS = ("attention", "mean", "last")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaraConfig:
    """Architecture of a router; the defaults are the published one, of 2,864,149 parameters at `encoding` 3584.

    Attributes:
      encoding: D, width of the backbone.
      width: W of the mixer.
      pool_width: of the attention pooling.
      pooling: of a segment's tokens: by attention, their mean, or the last one.
      mixer: one of `mixers.KINDS`.
      layers: of the mixer; 0 scores every segment by itself.
      states, taps, expand: of the Mamba blocks.
      slots: candidates that the auxiliary global head has an output for; 0 is no such head, as order-free mixers want.
      chained: has a mark for anchors, which `score` then takes.
      channels: F, inputs of a segment beside its encoding.
      links: C, inputs of a pair of an anchor and a segment; the router must be `chained`.
      standard: shifts and scales the encodings, each feature by itself; by nothing until `standardised` says by what.
    """

    encoding: int
    width: int = 256
    pool_width: int = 256
    pooling: Literal["attention", "mean", "last"] = "attention"
    mixer: mixers.Kind = "mamba"
    layers: int = 2
    states: int = 64
    taps: int = 4
    expand: int = 2
    slots: int = 20
    chained: bool = False
    channels: int = 0
    links: int = 0
    standard: bool = False

    def __post_init__(self):
        if self.pooling not in POOLINGS:
            raise UserError(f"mara: got pooling {self.pooling!r}, expected one of {', '.join(POOLINGS)}")
        if self.mixer not in mixers.KINDS:
            raise UserError(f"mara: got mixer {self.mixer!r}, expected one of {', '.join(mixers.KINDS)}")
        if self.slots and self.mixer in mixers.ORDER_FREE:
            raise UserError(f"mara: got {self.slots} slots with the order-free mixer {self.mixer}, expected slots=0")
        if self.links and not self.chained:
            raise UserError("mara: got links for a router without anchors, expected chained=True")
        if self.mixer == "transformer" and self.width % mixers.HEADS:
            raise UserError(f"mara: got width {self.width}, expected a multiple of the transformer's {mixers.HEADS}")


class Router(nnx.Module):
    """Declares a router's parameters, in fp32: projections uniform by Xavier's rule with gain 0.1, biases zero."""

    def __init__(self, cfg: MaraConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.cfg = cfg

        def xavier(d_out: int, d_in: int) -> Array:
            bound = 0.1 * (6 / (d_in + d_out)) ** 0.5
            return jax.random.uniform(rngs.params(), (d_out, d_in), dtype, -bound, bound)

        if cfg.pooling == "attention":
            self.pool = nnx.Dict(
                weight=nnx.Param(xavier(cfg.pool_width, cfg.encoding)), query=nnx.Param(xavier(1, cfg.pool_width)[0])
            )
        self.proj = nnx.Param(xavier(cfg.width, cfg.encoding))
        if cfg.layers:
            ssm = dict(states=cfg.states, taps=cfg.taps, expand=cfg.expand)
            self.mixer = mixers.Mixer(cfg.mixer, cfg.width, cfg.layers, **ssm, rngs=rngs, dtype=dtype)
        if cfg.mixer == "sorted":
            self.first = nnx.Param(xavier(1, cfg.width)[0])
        self.local = nnx.Dict(weight=nnx.Param(xavier(1, cfg.width)[0]), bias=nnx.Param(jnp.zeros((), dtype)))
        if cfg.slots:
            weight, bias = nnx.Param(xavier(cfg.slots, cfg.width)), nnx.Param(jnp.zeros(cfg.slots, dtype))
            self.slots = nnx.Dict(weight=weight, bias=bias)
        if cfg.chained:
            self.anchor = nnx.Param(xavier(1, cfg.width)[0])
        if cfg.standard:
            shift, scale = nnx.Param(jnp.zeros(cfg.encoding, dtype)), nnx.Param(jnp.ones(cfg.encoding, dtype))
            self.standard = nnx.Dict(shift=shift, scale=scale)
        for name in ("channels", "links"):
            if count := getattr(cfg, name):
                mixed, direct = nnx.Param(xavier(cfg.width, count)), nnx.Param(jnp.zeros(count, dtype))
                setattr(self, name, nnx.Dict(weight=mixed, direct=direct))

    def __call__(self, segments: Float[Array, "B G D"], valid: Bool[Array, "B G"] | None = None):
        """Scores of pooled segments, for a notebook; programs use `init` and `score`."""
        return score(self.cfg, nnx.to_pure_dict(nnx.state(self, nnx.Param)), segments, valid)


def init(cfg: MaraConfig, seed: int = 0, dtype=jnp.float32) -> Params:
    """Random parameters."""
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(Router(cfg, rngs=nnx.Rngs(seed), dtype=dtype), nnx.Param)))()


def standardised(params: Params, encodings: Float[Array, "N D"]) -> Params:
    """The parameters with shifts and scales by which these encodings have mean 0 and variance 1."""
    spread = jnp.std(encodings, axis=0)
    return params | {"standard": dict(shift=jnp.mean(encodings, axis=0), scale=1 / jnp.maximum(spread, 1e-6))}


def abstract(cfg: MaraConfig) -> Params:
    """The tree that `init` makes, with `jax.ShapeDtypeStruct` leaves."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Router(cfg, rngs=nnx.Rngs(0))), nnx.Param))


def pool(
    cfg: MaraConfig, params: Params, tokens: Float[Array, "*B T D"], valid: Bool[Array, "*B T"]
) -> Float[Array, "*B D"]:
    """One vector a segment, in fp32 (or wider): e = Σ_i a_i h_i over its valid tokens; zero where there are none.

    By attention a = softmax_i(v · tanh(W h_i)); by mean a is uniform; by last it is 1 at the last valid token.
    """
    h = jnp.where(valid[..., None], tokens, 0).astype(jnp.promote_types(tokens.dtype, jnp.float32))
    if cfg.pooling == "attention":
        weight, query = (params["pool"][name].astype(h.dtype) for name in ("weight", "query"))
        logits = jnp.tanh(jnp.einsum("...td,pd->...tp", h, weight)) @ query
        a = jax.nn.softmax(jnp.where(valid, logits, jnp.finfo(h.dtype).min), axis=-1) * valid
    elif cfg.pooling == "mean":
        a = valid / jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True), 1)
    else:
        a = valid & (jnp.cumsum(valid, axis=-1) == jnp.sum(valid, axis=-1, keepdims=True))
    return jnp.einsum("...t,...td->...d", a.astype(h.dtype), h)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """Logits that a segment is evidence.

    Attributes:
      local: of each segment from its own state; -inf at pads.
      slots: of each segment from the last state, by its place among the valid ones; None without slots.
    """

    local: Float[Array, "B G"]
    slots: Float[Array, "B G"] | None


def score(
    cfg: MaraConfig,
    params: Params,
    segments: Float[Array, "B G D"],
    valid: Bool[Array, "B G"] | None = None,
    anchors: Int[Array, "B A"] | None = None,
    *,
    channels: Float[Array, "B G F"] | None = None,
    links: Float[Array, "B G G C"] | None = None,
) -> Scores:
    """Scores of segments from their encodings, in fp32 (or wider); pure, and pads change nothing.

    z_t = P e_t + Q c_t; s = mixer(z_a1 + m, …, z_aA + m, z_1 + R l_1, …, z_G + R l_G) with the mark m of anchors;
    local_t = w · s_t + b + u · c_t + v · l_t, where c_t are the channels of t and l_t = max_a links[a, t] over the
    anchors, each link by itself, or 0.

    Args:
      segments: what `pool` makes.
      valid: false at pads, wherever they lie; None is all.
      anchors: indices of the segments picked so far, in that order, -1 for none; the router must be `chained`.
      channels, links: what the router was made for.

    Raises:
      UserError: anchors for a router without a mark for them, more segments than slots, or channels or links of
        another number than the router's.
    """
    batch, count, _ = segments.shape
    if anchors is not None and not cfg.chained:
        raise UserError("mara: got anchors for a router that has no mark for them, expected chained=True")
    if cfg.slots and count > cfg.slots:
        raise UserError(f"mara: got {count} segments, expected at most the {cfg.slots} of the global head")
    for name, given in dict(channels=channels, links=links).items():
        if (0 if given is None else given.shape[-1]) != getattr(cfg, name):
            got = "none" if given is None else given.shape[-1]
            raise UserError(f"mara: got {got} of {name}, expected the router's {getattr(cfg, name)}")
    valid = jnp.ones((batch, count), bool) if valid is None else jnp.asarray(valid)
    x = segments.astype(jnp.promote_types(segments.dtype, jnp.float32))
    if cfg.standard:
        x = (x - params["standard"]["shift"]) * params["standard"]["scale"]
    x = jnp.where(valid[:, :, None], x, 0)
    anchors = jnp.zeros((batch, 0), jnp.int32) if anchors is None else anchors
    z = jnp.einsum("bgd,wd->bgw", x, params["proj"].astype(x.dtype))
    beside = {}
    if channels is not None:
        beside["channels"] = jnp.where(valid[:, :, None], channels, 0).astype(x.dtype)
        z = z + beside["channels"] @ params["channels"]["weight"].T
    first = z @ params["first"] if cfg.mixer == "sorted" else None
    moved = z
    if links is not None:
        beside["links"] = _linked(links.astype(x.dtype), anchors)
        moved = z + beside["links"] @ params["links"]["weight"].T
    s = _mix(cfg, params, z, moved, valid, anchors, first) if cfg.layers else moved
    local = s @ params["local"]["weight"] + params["local"]["bias"]
    local = local if first is None else local + first
    local = sum((value @ params[name]["direct"] for name, value in beside.items()), local)
    local = jnp.where(valid, local, -jnp.inf)
    return Scores(local, _slots(params["slots"], s, valid) if cfg.slots else None)


def _linked(links: Float[Array, "B G G C"], anchors: Int[Array, "B A"]) -> Float[Array, "B G C"]:
    """The strongest link of each kind that any anchor has to a segment; 0 without anchors."""
    if not anchors.shape[1]:
        return jnp.zeros((links.shape[0], *links.shape[2:]), links.dtype)
    own = jnp.take_along_axis(links, jnp.maximum(anchors, 0)[:, :, None, None], axis=1)
    own = jnp.where((anchors >= 0)[:, :, None, None], own, -jnp.inf)
    return jnp.where(jnp.any(anchors >= 0, axis=1)[:, None, None], jnp.max(own, axis=1), 0)


def _mix(cfg: MaraConfig, params: Params, z, candidates, valid, anchors, first) -> Float[Array, "B G W"]:
    """The candidates' states after the anchors, as they are in z, were read."""
    real = valid
    if first is not None:
        order = jnp.argsort(jnp.where(valid, -first, jnp.inf), axis=1)
        candidates, real = (
            jnp.take_along_axis(candidates, order[:, :, None], axis=1),
            jnp.take_along_axis(valid, order, axis=1),
        )
    taken = jnp.take_along_axis(z, jnp.maximum(anchors, 0)[:, :, None], axis=1)
    taken = taken + params["anchor"] if cfg.chained else taken
    x = jnp.concatenate([taken, candidates], axis=1)
    count = anchors.shape[1]
    s = mixers.mix(cfg.mixer, params["mixer"], x, jnp.concatenate([anchors >= 0, real], axis=1), count)[:, count:]
    return s if first is None else jnp.take_along_axis(s, jnp.argsort(order, axis=1)[:, :, None], axis=1)


def _slots(params: Params, s: Float[Array, "B G W"], valid: Bool[Array, "B G"]) -> Float[Array, "B G"]:
    """The global head on the state of the last valid segment; the n-th valid segment has slot n."""
    nth = jnp.cumsum(valid, axis=1) - 1
    last = jnp.argmax(jnp.where(valid, nth + 1, 0), axis=1)
    read = jnp.take_along_axis(s, last[:, None, None], axis=1)[:, 0]
    logits = read @ params["weight"].T + params["bias"]
    return jnp.where(valid, jnp.take_along_axis(logits, jnp.maximum(nth, 0), axis=1), -jnp.inf)


def save(folder: Path, cfg: MaraConfig, params: Params, about: Mapping[str, Any]) -> None:
    """Writes `mara.safetensors` and `mara.json`; `about` says what else a user must know, such as the backbone."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = {key: np.asarray(leaf) for key, leaf in traverse_util.flatten_dict(params, sep=".").items()}
    (folder / WEIGHTS).write_bytes(safetensors.numpy.save(flat))
    (folder / CONFIG).write_text(json.dumps(dict(router=dataclasses.asdict(cfg), about=dict(about)), indent=2))


def load(folder: Path) -> tuple[MaraConfig, Params, dict[str, Any]]:
    """Reads what `save` wrote: (architecture, parameters, about).

    Raises:
      UserError: a file is missing or broken, or the weights are not those of the architecture.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: got no {name}, expected the folder of a trained MaRA router")
    try:
        fields = json.loads((folder / CONFIG).read_text())
        cfg, about = MaraConfig(**fields["router"]), dict(fields["about"])
        found = safetensors.numpy.load_file(folder / WEIGHTS)
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
        raise UserError(f"{folder}: got a router that cannot be read ({e}), expected what mara.save writes") from None
    wanted = traverse_util.flatten_dict(abstract(cfg), sep=".")
    for key in sorted(wanted.keys() | found.keys()):
        got, shape = getattr(found.get(key), "shape", "nothing"), getattr(wanted.get(key), "shape", "no such tensor")
        if got != shape:
            raise UserError(f"{folder / WEIGHTS}: got {got} for {key}, expected {shape}")
    return cfg, traverse_util.unflatten_dict({key: jnp.asarray(leaf) for key, leaf in found.items()}, sep="."), about
