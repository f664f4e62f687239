"""LoRA of one projection with a token-dependent scale, for use by itself."""

import jax.numpy as jnp
from flax import nnx

from molora_jax.adapters import gate, lora
from molora_jax.adapters.gate import GateConfig
from molora_jax.typing import Array, Bool, Float, Params


class GatedLoRA(nnx.Module):
    """The adapter of one projection: `y, state = gated(x, weight, bias)`, with the state back in for the next tokens.

    The projection's own weight stays with the caller, frozen; what `nnx.LoRAParam` selects is all that trains.

    Attributes:
      cfg: of the gate.
      a, b: [R, D] and [F, R].
      scale: α/R or α/√R.
      gate: the core and its one head, as `gate.init` makes them.
    """

    def __init__(
        self,
        cfg: GateConfig,
        d_in: int,
        d_out: int,
        rank: int,
        *,
        alpha: float,
        rngs: nnx.Rngs,
        rslora: bool = False,
        dtype=jnp.float32,
    ):
        a, b = lora.init(rngs.params(), d_in, d_out, rank, dtype=dtype)
        self.cfg = cfg
        self.a, self.b = nnx.LoRAParam(a), nnx.LoRAParam(b)
        self.scale = lora.scaling(alpha, rank, rslora=rslora)
        self.gate = _declared(gate.init(cfg, rngs.params(), d_in=d_in, rank=rank, dtype=dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        weight: Float[Array, "F D"],
        bias: Float[Array, "F"] | None = None,
        *,
        state: Params | None = None,
        valid: Bool[Array, "B T"] | None = None,
        reset: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T F"], Params]:
        """(W x + β + scale · B (λ ⊙ A x) [B T F], state); accumulated in fp32 (or wider), returned in x's dtype.

        `state`, `valid` and `reset` are those of `gate.apply`.
        """
        acc = jnp.promote_types(x.dtype, jnp.float32)
        h = jnp.einsum("btd,rd->btr", x, self.a[...], preferred_element_type=acc)
        params = nnx.to_pure_dict(nnx.state(self.gate, nnx.LoRAParam))
        seen = h if self.cfg.reads == "h" else x
        lam, state = gate.apply(self.cfg, params, seen, state, valid=valid, reset=reset)
        lam = lam[:, :, 0] if self.cfg.output == "diagonal" else lam
        y = jnp.einsum("btd,fd->btf", x, weight, preferred_element_type=acc)
        y = y + self.scale * jnp.einsum("btr,fr->btf", lam * h, self.b[...], preferred_element_type=acc)
        return (y if bias is None else y + bias.astype(acc)).astype(x.dtype), state


def _declared(tree: Params) -> nnx.Dict:
    return nnx.Dict(
        {key: _declared(leaf) if isinstance(leaf, dict) else nnx.LoRAParam(leaf) for key, leaf in tree.items()}
    )
