"""Trained routers: small networks on a model's hidden state, declared with nnx, applied as pure functions."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from molora_jax.config import UserError
from molora_jax.typing import Array, Float, Params

WEIGHTS, CONFIG = "head.safetensors", "head.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Architecture and dimensions of a head.

    Attributes:
      kind: `r2r`, the residual classifier of R2R (Fu et al. 2025, §3; 56.3 M parameters at D = 1536); `mlp`, the
        three-layer perceptron of CITER (Zheng et al. 2025, §3); `linear`, the gate of Co-LLM (Shen et al. 2024, §2).
      hidden: D, width of the hidden state.
      width: of the hidden layers.
      top_k: `r2r`: how many of the highest logits it sees.
      blocks: `r2r`: residual blocks.
      expansion: `r2r`: width of a block's inner layer, in multiples of `width`.
      outputs: `linear`: numbers it gives, one for each adapter of a gate that chooses among them.
    """

    kind: Literal["r2r", "mlp", "linear"]
    hidden: int
    width: int = 1024
    top_k: int = 100
    blocks: int = 6
    expansion: int = 4
    outputs: int = 1

    def __post_init__(self):
        if self.kind not in ("r2r", "mlp", "linear"):
            raise UserError(f"head: got kind {self.kind!r}, expected r2r, mlp or linear")


class Affine(nnx.Module):
    """Declares y = W x + b; `stack` copies of it lie on a leading axis."""

    def __init__(self, d_in: int, d_out: int, *, rngs: nnx.Rngs, stack: tuple[int, ...] = ()):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (*stack, d_out, d_in), jnp.float32) * d_in**-0.5)
        self.bias = nnx.Param(jnp.zeros((*stack, d_out), jnp.float32))


class Norm(nnx.Module):
    """Declares the scale and shift of a layer norm."""

    def __init__(self, width: int, *, stack: tuple[int, ...] = ()):
        self.weight = nnx.Param(jnp.ones((*stack, width), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((*stack, width), jnp.float32))


class Blocks(nnx.Module):
    """Declares pre-norm residual blocks, stacked."""

    def __init__(self, cfg: HeadConfig, *, rngs: nnx.Rngs):
        stack, inner = (cfg.blocks,), cfg.expansion * cfg.width
        self.norm = Norm(cfg.width, stack=stack)
        self.up = Affine(cfg.width, inner, rngs=rngs, stack=stack)
        self.down = Affine(inner, cfg.width, rngs=rngs, stack=stack)


class Head(nnx.Module):
    """Declares the parameters of a head of any kind."""

    def __init__(self, cfg: HeadConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        if cfg.kind == "r2r":
            self.logits = Affine(cfg.top_k, cfg.hidden, rngs=rngs)
            self.concat = Affine(3 * cfg.hidden, cfg.width, rngs=rngs)
            self.input = Affine(cfg.width, cfg.width, rngs=rngs)
            self.blocks = Blocks(cfg, rngs=rngs)
            self.norm = Norm(cfg.width)
            self.output = Affine(cfg.width, 1, rngs=rngs)
        elif cfg.kind == "mlp":
            self.input = Affine(cfg.hidden, cfg.width, rngs=rngs)
            self.inner = Affine(cfg.width, cfg.width, rngs=rngs)
            self.output = Affine(cfg.width, 1, rngs=rngs)
        else:
            self.output = Affine(cfg.hidden, cfg.outputs, rngs=rngs)

    def __call__(self, *features: Array) -> Float[Array, ""]:
        """The score, for a notebook; programs use `init` and `score`."""
        return score(self.cfg, nnx.to_pure_dict(nnx.state(self, nnx.Param)), *features)


def init(cfg: HeadConfig, seed: int = 0) -> Params:
    """Random fp32 parameters: normal with variance 1/fan-in, biases zero."""
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(Head(cfg, rngs=nnx.Rngs(seed)), nnx.Param)))()


def score(
    cfg: HeadConfig,
    params: Params,
    hidden: Float[Array, "D"],
    embedding: Float[Array, "D"] | None = None,
    top_logits: Float[Array, "k"] | None = None,
) -> Float[Array, ""]:
    """A probability: σ of the head's output, in fp32 (or wider).

    What it is the probability of is the method's: that the token needs the large model (`r2r`, Co-LLM), or that the
    small one will do (CITER). Only `r2r` takes the embedding of the sampled token and the sorted raw top-k logits.
    """
    return jax.nn.sigmoid(logit(cfg, params, hidden, embedding, top_logits))


def logit(
    cfg: HeadConfig,
    params: Params,
    hidden: Float[Array, "D"],
    embedding: Float[Array, "D"] | None = None,
    top_logits: Float[Array, "k"] | None = None,
) -> Float[Array, ""]:
    """The head's output before the σ of `score`: what a loss needs to stay exact where the probability is 0 or 1."""
    x = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    if cfg.kind == "r2r":
        x = jnp.concatenate([x, embedding.astype(x.dtype), _affine(params["logits"], top_logits.astype(x.dtype))])
        x = _affine(params["input"], _affine(params["concat"], x))
        block = lambda x, w: (x + _affine(w["down"], _gelu(_affine(w["up"], _norm(w["norm"], x)))), None)
        x, _ = jax.lax.scan(block, x, params["blocks"])
        x = _norm(params["norm"], x)
    elif cfg.kind == "mlp":
        x = jax.nn.relu(_affine(params["inner"], jax.nn.relu(_affine(params["input"], x))))
    return _affine(params["output"], x)[0]


def _affine(params: Params, x: Float[Array, "D"]) -> Float[Array, "F"]:
    return params["weight"].astype(x.dtype) @ x + params["bias"].astype(x.dtype)


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _norm(params: Params, x: Float[Array, "D"]) -> Float[Array, "D"]:
    centred = x - jnp.mean(x)
    scale = jax.lax.rsqrt(jnp.mean(centred**2) + 1e-5)
    return centred * scale * params["weight"].astype(x.dtype) + params["bias"].astype(x.dtype)


def save(folder: Path, cfg: HeadConfig, params: Params, threshold: float) -> None:
    """Writes `head.safetensors` and `head.json` (architecture, dimensions, the threshold to route at)."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = {".".join(entry.key for entry in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    (folder / WEIGHTS).write_bytes(safetensors.numpy.save({key: np.asarray(leaf) for key, leaf in flat.items()}))
    (folder / CONFIG).write_text(json.dumps(dataclasses.asdict(cfg) | {"threshold": threshold}, indent=2))


def load(folder: Path) -> tuple[HeadConfig, Params, float]:
    """Reads what `save` wrote: the architecture, its parameters, and the threshold.

    Raises:
      UserError: a file is missing or broken, or the weights are not those of the architecture.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: got no {name}, expected the folder of a trained head")
    try:
        fields = json.loads((folder / CONFIG).read_text())
        threshold = float(fields.pop("threshold"))
        cfg = HeadConfig(**fields)
        found = safetensors.numpy.load_file(folder / WEIGHTS)
    except (KeyError, TypeError, json.JSONDecodeError, safetensors.SafetensorError) as e:
        raise UserError(f"{folder}: got a head that cannot be read ({e}), expected what heads.save writes") from None
    graph = nnx.eval_shape(lambda: Head(cfg, rngs=nnx.Rngs(0)))
    wanted = nnx.to_pure_dict(nnx.state(graph, nnx.Param))

    def read(path, leaf: jax.ShapeDtypeStruct) -> Array:
        key = ".".join(entry.key for entry in path)
        if key not in found or found[key].shape != leaf.shape:
            got = found[key].shape if key in found else "nothing"
            raise UserError(f"{folder / WEIGHTS}: got {got} for {key}, expected shape {leaf.shape}")
        return jnp.asarray(found.pop(key))

    params = jax.tree_util.tree_map_with_path(read, wanted)
    if found:
        raise UserError(
            f"{folder / WEIGHTS}: got unused tensors {', '.join(sorted(found))}, expected a {cfg.kind} head"
        )
    return cfg, params, threshold
