"""Frozen, hashable configurations of a decoder."""

import dataclasses
from typing import Literal


class UserError(ValueError):
    """A wrong input. Its message is one line: what was got, what was expected, how to mend it.

    The command-line programs print that line and exit with code 2; nothing else is shown to the user.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, §3.4) and the context extensions that stretch its frequencies.

    Attributes:
      theta: base of the geometric frequency series.
      scaling: `none`; `linear` divides every frequency by `factor` (position interpolation); `llama3` divides the long
        wavelengths by `factor`, keeps the short ones, and blends between (Llama 3 release).
      factor: stretch of the context.
      low_freq_factor, high_freq_factor: `llama3` only; wavelengths longer than `original_positions / low_freq_factor`
        are divided, shorter than `original_positions / high_freq_factor` are kept.
      original_positions: `llama3` only; context length before stretching.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that fixes the maths of one decoder; weights and text live elsewhere.

    Attributes:
      family: name of the architecture, a key of `models.families.FAMILIES`.
      vocab: V, rows of the embedding.
      layers: L.
      width: D.
      mlp_width: F.
      heads: H, query heads.
      kv_heads: K, key/value heads; divides `heads`.
      head_width: d.
      windows: per layer, how many positions a query sees back, itself included; 0 is the whole context.
      rope: rotary embedding of the layers that see the whole context, and of all when `local_rope` is None.
      local_rope: rotary embedding of the windowed layers, where it differs (Gemma 3).
      max_positions: longest context the model was made for.
      norm_eps: RMSNorm epsilon.
      norm_offset: added to every RMSNorm weight (Gemma stores w - 1).
      activation: of the gated MLP.
      tied: the head is the embedding.
      qkv_bias, o_bias, mlp_bias: which projections have a bias.
      qk_norm: RMSNorm over d of queries and keys, before the rotary embedding.
      post_norms: RMSNorm on the output of attention and MLP, before the residual sum (Gemma 2 and 3).
      embed_scale: multiplies the embedding.
      attn_scale: multiplies the attention scores.
    """

    family: str
    vocab: int
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    windows: tuple[int, ...]
    rope: Rope = Rope()
    local_rope: Rope | None = None
    max_positions: int = 2048
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attn_scale: float

    def __post_init__(self):
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise UserError(f"config: {self.heads} query heads do not divide into {self.kv_heads} key/value heads")
        if len(self.windows) != self.layers:
            raise UserError(f"config: got {len(self.windows)} attention windows for {self.layers} layers")
        if self.head_width % 2:
            raise UserError(f"config: rotary embedding needs an even head width, got {self.head_width}")

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def kv_width(self) -> int:
        """Width of all keys, or all values, of a token: K·d."""
        return self.kv_heads * self.head_width

    @property
    def kinds(self) -> tuple[int, ...]:
        """The distinct windows, ascending; layers of one kind share a page table."""
        return tuple(sorted(set(self.windows)))

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        return tuple(self.kinds.index(window) for window in self.windows)
