"""X-LoRA in this project, decoding with a cache and without: the one row that needs `adapters.mixtures`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.bank import Bank
from molora_jax.config import ModelConfig
from molora_jax.models import transformer
from molora_jax.models.state import DecodeState, new_state
from molora_jax.nn.layout import Layout, dense, ragged
from molora_jax.typing import Array, Float, Params

PAGE, PAGES = 4, 8


def decodes(cfg: ModelConfig, params: Params, bank: Bank, experts: int, prompt: np.ndarray, new: int):
    """Whether greedy decoding one token at a time gives what reading everything anew each time does, and the tokens.

    Both passes of a token, the base's and the mixture's, keep a cache of their own.
    """
    from molora_jax.adapters.mixtures.xlora import xlora

    mixture = xlora(cfg.width, experts, cfg.layers, hidden=16)
    tables = jnp.arange(PAGES, dtype=jnp.int32)[None, None]
    states = [new_state(cfg, pages=(PAGES,), page_size=PAGE) for _ in range(2)]
    tokens, position, anew, kept, bare = list(map(int, prompt)), 0, [], [], []
    for _ in range(new):
        count = len(tokens) - position
        at = [jnp.asarray([value], jnp.int32) for value in (position, count)]
        layout = ragged(*at, tables, tokens=count, tile=min(count, 4), page_size=PAGE)
        scores, without, states = _step(cfg, params, bank, mixture, np.asarray(tokens[position:]), layout, states)
        kept.append(scores)
        bare.append(without)
        anew.append(_step(cfg, params, bank, mixture, np.asarray(tokens), dense(1, len(tokens)), [None, None])[0])
        position = len(tokens)
        tokens.append(int(jnp.argmax(scores)))
    off, moved = (float(jnp.abs(jnp.stack(kept) - jnp.stack(other)).max()) for other in (anew, bare))
    return off < 1e-3 < moved / 10, f"decodes {new} tokens, logits off by {off:.2g}, and by {moved:.2g} from the base's"


@functools.partial(jax.jit, static_argnums=0)
def _step(
    cfg: ModelConfig, params: Params, bank: Bank, mixture: Any, tokens: Array, layout: Layout, states: list
) -> tuple[Float[Array, "V"], Float[Array, "V"], list[DecodeState | None]]:
    """Scores of the token after the last one, by the mixture and by the base."""
    base = transformer.apply(cfg, params, tokens, layout, states[0])
    out = transformer.apply(cfg, params, tokens, layout, states[1], bank=bank, route=mixture.route(base.hidden))
    scores = [transformer.logits(cfg, params, found.hidden[-1:])[0] for found in (out, base)]
    return *scores, [base.state, out.state]
