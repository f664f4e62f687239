"""Token-dependent scales of a LoRA update: MaLoRA, whose scale has a memory, and its rivals behind one interface.

    y_t = W x_t + scale · B (λ_t ⊙ A x_t)

A gate is one *core*, which reads the tokens, and `heads`, one for each adapted matrix that listens to it: a core of its
own for each matrix, one for the matrices that read the same input, or one for a layer. λ is [B T heads], or
[B T heads R] where every direction of rank space has a scale of its own.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from molora_jax.adapters import gate_cells
from molora_jax.config import UserError
from molora_jax.typing import Array, Bool, Float, Params
from pallas_kernels import common

EPS = float(jnp.finfo(jnp.float32).eps)
"""Of the norms; torch's default in fp32, with which TopLoRA was published."""

AT_ONCE = 3072
"""Elements of state that a CPU advances in one step of a scan over several cores.

From 4,096 on, XLA may hand every step to its thread pool: 24 cores over 2 rows of 512 tokens take 103 ms forward and
backward three at a time, 142 ms four at a time (jax 0.10, two CPU cores).
"""
BLOCK = 2048
"""Elements of state of one core that a step of the scan advances, at most (`selective_scan.xla.CPU_STATE`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig:
    """What a gate computes. The defaults are MaLoRA with its start mended: step 0 is LoRA, to the bit.

    Attributes:
      kind: `mamba` is MaLoRA; `gru` and `lstm` have another memory; `linear` has none: z = w · x + b; `toplora` has
        none either: z = g ⊙ norm(Θ x) (NeurIPS 2025, arXiv 2510.23123).
      output: one scale for all of rank space, or `diagonal`: one a direction.
      activation: λ of z, all 1 at z = 0 but `sigmoid`: `softplus` is softplus(z + ln(e - 1)), `bounded` is 2 σ(z),
        `exp` TopLoRA's, `sigmoid` GateRA's σ(z) (arXiv 2511.17582), which is `bounded` with half the α.
      clamp: largest λ, at least 1; None for no limit.
      norm: divide what the recurrence reads by its root mean square. Without it the published start is almost blind:
        λ varies by 3e-4 from token to token. Of no effect without a recurrence.
      reads: the input x of the matrix, through a projection D to R of the gate's own, or `h` = A x, without one.
      start: `one`: λ is exactly 1 at first; `published`: the draws of the released code.
      hidden: units of `gru` and `lstm`; None is 26 and 22, which at R = 16 have the parameters of the Mamba block.
      states, taps, expand: N, width of the convolution and C/R of `mamba`.
    """

    kind: Literal["mamba", "gru", "lstm", "linear", "toplora"] = "mamba"
    output: Literal["scalar", "diagonal"] = "scalar"
    activation: Literal["softplus", "bounded", "exp", "sigmoid"] = "softplus"
    clamp: float | None = None
    norm: bool = True
    reads: Literal["x", "h"] = "x"
    start: Literal["one", "published"] = "one"
    hidden: int | None = None
    states: int = 16
    taps: int = 4
    expand: int = 2

    def __post_init__(self):
        for field in ("kind", "output", "activation", "reads", "start"):
            choices = GateConfig.__annotations__[field].__args__
            if getattr(self, field) not in choices:
                raise UserError(f"gate: got {field}={getattr(self, field)!r}, expected one of {', '.join(choices)}")
        if self.kind == "toplora" and self.output != "diagonal":
            raise UserError("gate: got kind='toplora' with a scalar output, expected output='diagonal'")
        if self.activation == "sigmoid" and self.start == "one":
            raise UserError("gate: got a sigmoid that starts at one, which it never reaches; use activation='bounded'")
        if self.clamp is not None and not self.clamp >= 1:
            raise UserError(f"gate: got clamp={self.clamp}, expected at least 1, where λ starts")
        if min(self.states, self.expand, self.units) < 1 or self.taps < 2:
            raise UserError("gate: got a size below 1, or a convolution of fewer than 2 taps; expected more")

    @property
    def recurrent(self) -> bool:
        """Whether λ depends on the tokens before; only then is there a state."""
        return self.kind in ("mamba", "gru", "lstm")

    @property
    def units(self) -> int:
        """H of `gru` and `lstm`."""
        return {"gru": 26, "lstm": 22}.get(self.kind, 1) if self.hidden is None else self.hidden


PUBLISHED = {
    "malora": GateConfig(norm=False, start="published"),
    "scalar": GateConfig(kind="linear", norm=False, start="published"),
    "toplora": GateConfig(kind="toplora", output="diagonal", activation="exp", norm=False, start="published"),
    "gatera": GateConfig(kind="linear", activation="sigmoid", norm=False, start="published"),
    "gru": GateConfig(kind="gru", norm=False, start="published"),
    "lstm": GateConfig(kind="lstm", norm=False, start="published"),
}
"""Each method as the released code of MaLoRA runs it."""


def init(cfg: GateConfig, key: Array, *, d_in: int, rank: int, heads: int = 1, dtype=jnp.float32) -> Params:
    """One core and its heads; `jax.vmap` over keys stacks several.

    `proj.weight`, the one large leaf, is in `dtype`; all others in fp32 (or wider): steps of 2e-4 are lost in bf16.

    Args:
      d_in: D, width of the x that the core reads; not looked at where it reads h.
      rank: R of the matrices that listen; all the same where the output is diagonal.
      heads: how many matrices listen.
    """
    keys, d_in = jax.random.split(key, 4), rank if cfg.reads == "h" else d_in
    params, each, wide = {}, rank if cfg.output == "diagonal" else 1, gate_cells.wide()
    rows = heads * each if cfg.kind == "linear" else rank
    if not (cfg.recurrent and cfg.reads == "h"):
        params["proj"] = {"weight": _projection(cfg, keys[0], rows, d_in, each).astype(dtype)}
    if cfg.kind == "toplora":
        return params | {"out": {"gain": jnp.full((heads, rank), float(cfg.start == "published"), wide)}}
    bias = jnp.zeros((heads, each), wide)
    if cfg.recurrent:
        sizes = dict(expand=cfg.expand, states=cfg.states, taps=cfg.taps)
        mamba = cfg.kind == "mamba"
        make = gate_cells.init_mamba if mamba else functools.partial(gate_cells.init_rnn, cfg.kind, hidden=cfg.units)
        params["cell"] = make(keys[1], rank, **(sizes if mamba else {}))
        width = rank if mamba else cfg.units
        params["out"] = {"weight": _readout(cfg, keys[2], (heads, each, width))}
        if cfg.start == "published":
            bias = 0.1 * jax.random.normal(keys[3], bias.shape, wide)
    return params | {"out": params.get("out", {}) | {"bias": bias}}


def _xavier(key, shape: tuple[int, ...], fans: int) -> Array:
    """Uniform with a gain of 0.1 (Glorot & Bengio 2010, eq. 16); `fans` is fan-in + fan-out."""
    bound = 0.1 * math.sqrt(6 / fans)
    return jax.random.uniform(key, shape, gate_cells.wide(), -bound, bound)


def _projection(cfg: GateConfig, key, rows: int, d_in: int, each: int) -> Array:
    if cfg.kind == "toplora":
        return jax.random.uniform(key, (rows, d_in), gate_cells.wide(), -(d_in**-0.5), d_in**-0.5)
    if cfg.kind == "linear" and cfg.start == "one":
        return jnp.zeros((rows, d_in), gate_cells.wide())
    return _xavier(key, (rows, d_in), d_in + (each if cfg.kind == "linear" else rows))


def _readout(cfg: GateConfig, key, shape: tuple[int, int, int]) -> Array:
    _, each, width = shape
    if cfg.start == "one":
        return jnp.zeros(shape, gate_cells.wide())
    if cfg.kind == "mamba" and cfg.output == "diagonal":  # the released block's output is z itself
        return jnp.broadcast_to(jnp.eye(each, width, dtype=gate_cells.wide()), shape)
    return _xavier(key, shape, width + each)


def new_state(cfg: GateConfig, params: Params, rows: int):
    """The state before the first token: leaves [rows, ...], fp32 (or wider); {} where there is no memory.

    Of stacked params, [rows, *stack, ...]: rows always lead, so that one index reorders, snapshots and restores them.
    """
    return gate_cells.new_state(cfg.kind, params["cell"], rows) if cfg.recurrent else {}


def apply(
    cfg: GateConfig,
    params: Params,
    x: Float[Array, "B T D"],
    state=None,
    *,
    valid: Bool[Array, "B T"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B T heads *R"], Params]:
    """λ of every token and head, in fp32 (or wider), and the state after the last one.

        u = P x (or h)    s = memory(norm(u))    z_k = w_k · s + b_k    λ_k = activation(z_k)

    MaLoRA as released (Dokme & Heck 2026), but the state outlives the call, where that code's decoder forgets it, and
    pads never enter it. However a sequence is cut into calls, down to single tokens, λ of the real tokens and the last
    state are the same up to rounding.

    Args:
      x: [B T D] input of the matrix, or h = A x [B T R] if `cfg.reads` says so.
      state: of the tokens before; None at the start.
      valid: false at pads, wherever they lie; their λ is 1.
      reset: true at the first token of a segment in packed rows.
      backend: of `pallas_kernels.selective_scan`.

    Raises:
      UserError: x has another width than the gate was made for.
    """
    state = new_state(cfg, params, len(x)) if state is None else state
    s, state = _recur(cfg, params, _read(cfg, params, x), state, valid, reset, backend)
    return _scales(cfg, params["out"], s, valid), state


def apply_stack(
    cfg: GateConfig,
    params: Params,
    x: Float[Array, "B T D"],
    state=None,
    *,
    valid: Bool[Array, "B T"] | None = None,
    reset: Bool[Array, "B T"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B T G heads *R"], Params]:
    """`apply` of G cores that read the same tokens, as one projection and one scan.

    A CPU takes no more cores into one step of the scan than it advances well (`AT_ONCE`), some after the others.

    Args:
      params: leaves lead with G; several experts, several matrices, or both.
      x: [B T D], shared; where the cores read h, [B T G R], one each.
      state: leaves [rows, G, ...], as `new_state` makes it of such params.
    """
    state = new_state(cfg, params, len(x)) if state is None else state
    u = jax.vmap(functools.partial(_read, cfg), in_axes=(0, 2 if cfg.reads == "h" else None))(params, x)
    first = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), state)
    one = lambda params, u, state: _recur(cfg, params, u, state, valid, reset, backend)
    count = _at_once(len(u), state, x.shape[1])
    if count == len(u):
        s, last = jax.vmap(one)(params, u, first)
    else:
        s, last = jax.lax.map(lambda core: one(*core), (params, u, first), batch_size=count)
    lam = jax.vmap(functools.partial(_scales, cfg, valid=valid), out_axes=2)(params["out"], s)
    return lam, jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), last)


def _at_once(cores: int, state, tokens: int) -> int:
    """How many of the cores go into one step: all, but on a CPU no more than it advances well."""
    leaves = jax.tree.leaves(state)
    if not leaves or tokens < 2 or common.target()[0] != "cpu":
        return cores
    each = min(max(leaf.size for leaf in leaves) // cores, BLOCK)
    return min(cores, AT_ONCE // max(each, 1))


def _read(cfg: GateConfig, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
    """What the core sees of its input, in fp32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    width = params["proj"]["weight"].shape[1] if "proj" in params else gate_cells.width(cfg.kind, params["cell"])
    if x.ndim != 3 or x.shape[2] != width:
        raise UserError(f"gate: got {cfg.reads} {list(x.shape)}, expected [B T {width}], the width it was made for")
    if "proj" not in params:
        return x.astype(wide)
    u = jnp.einsum("wd,btd->wbt", params["proj"]["weight"], x, preferred_element_type=wide)
    return jnp.moveaxis(u, 0, -1)


def _recur(cfg: GateConfig, params: Params, u: Float[Array, "B T W"], state, valid, reset, backend: str):
    if not cfg.recurrent:
        return u, state
    u = _normed(u) if cfg.norm else u
    return gate_cells.run(cfg.kind, params["cell"], u, state, valid=valid, reset=reset, backend=backend)


def _normed(u: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
    return u * jax.lax.rsqrt(jnp.mean(jnp.square(u), axis=-1, keepdims=True) + EPS)


def _scales(cfg: GateConfig, out: Params, s: Float[Array, "B T W"], valid) -> Float[Array, "B T heads *R"]:
    """λ from what the core gives: the heads, the activation, the clamp, and 1 at pads."""
    if cfg.kind == "toplora":
        z = _normed(s)[:, :, None] * out["gain"]
    elif cfg.kind == "linear":
        z = s.reshape(*s.shape[:2], *out["bias"].shape) + out["bias"]
    else:
        z = jnp.einsum("btw,hrw->bthr", s, out["weight"]) + out["bias"]
    lam = activate(cfg, z)
    if valid is not None:
        lam = jnp.where(valid[:, :, None, None], lam, 1)
    return lam if cfg.output == "diagonal" else lam[..., 0]


def activate(cfg: GateConfig, z: Array) -> Array:
    """λ of z: exactly 1 at z = 0 on every backend, but for the sigmoid.

    softplus(z + ln(e - 1)) is written as 1 + log(1 + (1 - 1/e)(e^z - 1)), and for z > 0 as that plus z with e^-z and
    1/e in its place: neither overflows, and log1p and expm1 of 0 are 0.
    """
    if cfg.activation == "exp":
        # Clamped before too: past the largest float, the gradient would be 0 · inf.
        lam = jnp.exp(z if cfg.clamp is None else jnp.minimum(z, math.log(cfg.clamp)))
    elif cfg.activation == "sigmoid":
        lam = jax.nn.sigmoid(z)
    elif cfg.activation == "bounded":
        lam = 1 + jnp.tanh(z / 2)
    else:
        up, down = jnp.where(z > 0, z, 0), jnp.where(z > 0, 0, z)
        above = up + jnp.log1p(math.exp(-1) * jnp.expm1(-up))
        lam = 1 + jnp.where(z > 0, above, jnp.log1p((1 - math.exp(-1)) * jnp.expm1(down)))
    return lam if cfg.clamp is None else jnp.minimum(lam, cfg.clamp)


def abstract(cfg: GateConfig, *, d_in: int, rank: int, heads: int = 1, dtype=jnp.float32) -> Params:
    """The tree that `init` makes, with `jax.ShapeDtypeStruct` leaves: what a loader fills."""
    return jax.eval_shape(
        lambda key: init(cfg, key, d_in=d_in, rank=rank, heads=heads, dtype=dtype), jax.eval_shape(jax.random.key, 0)
    )


def parameters(cfg: GateConfig, *, d_in: int, rank: int, heads: int = 1) -> int:
    """How many numbers a core and its heads hold.

    The released code keeps R biases where a scalar output reads one; the 15 that nothing reads do not count here.
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract(cfg, d_in=d_in, rank=rank, heads=heads)))


def equal_rank(cfg: GateConfig, rank: int, groups: Sequence[Sequence[tuple[int, int]]]) -> int:
    """The rank at which plain LoRA has as many parameters as this gate with LoRA of `rank`: the fair rival.

    Args:
      groups: (D, F) of the matrices that listen to one core, for each core of the model. Its first matrix is the one
        whose input the core reads.
    """
    per_rank = sum(d_in + d_out for group in groups for d_in, d_out in group)
    count = functools.cache(lambda d_in, heads: parameters(cfg, d_in=d_in, rank=rank, heads=heads))
    return round(rank + sum(count(group[0][0], len(group)) for group in groups) / per_rank)


def entropy(lam: Float[Array, "*N"]) -> Float[Array, ""]:
    """Mean of H(λ) = -λ log λ - (1-λ) log(1-λ) for λ in [0, 1]: GateRA's pull towards all or nothing, in nats."""
    return jnp.mean(jax.scipy.special.entr(lam) + jax.scipy.special.entr(1 - lam))
