"""What the benchmark of adapters times of this project: a forward pass and an engine, with and without experts."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.library import Library
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec
from molora_jax.compilation import counted
from molora_jax.config import ModelConfig
from molora_jax.engine.engine import Engine
from molora_jax.engine.experts import Experts
from molora_jax.engine.request import EngineConfig, Request, Usage
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.typing import Params

RANK, ROWS = 16, 32
LLAMA = dict(vocab=2048, layers=8, width=512, mlp_width=1408, heads=8, kv_heads=8, head_width=64, attn_scale=0.125)


def llama() -> tuple[ModelConfig, Params]:
    """A random Llama that a minute is enough for, layers stacked."""
    cfg = ModelConfig(family="llama", windows=(0,) * 8, tied=False, **LLAMA)
    return cfg, transformer.init(cfg)


def adapter(cfg: ModelConfig, params: Params, name: str, seed: int) -> Adapter:
    """Rank 16 on every projection of the layers."""
    return fresh(cfg, params, name, rank=RANK, seed=seed, spread=0.02)


def library(cfg: ModelConfig, params: Params, experts: int) -> Library:
    """As many experts as slots, "0", "1" and so on; all of them resident."""
    found = [adapter(cfg, params, str(i), i) for i in range(experts)]
    made = Library(BankSpec.holding(found), params)
    for expert in found:
        made.add(expert)
        made.release(made.acquire(expert.name))
    return made


def forward(cfg: ModelConfig, params: Params, lib: Library | None, rows: int, length: int) -> Callable[[], None]:
    """Logits of all tokens of a batch, each token with an expert drawn at random."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, cfg.vocab, rows * length))
    ids = None if lib is None else jnp.asarray(rng.integers(0, lib.spec.slots, rows * length))

    @jax.jit
    def run(params, bank, tokens, ids):
        route = None if bank is None else Route.of(ids)
        out = transformer.apply(cfg, params, tokens, dense(rows, length), bank=bank, route=route)
        return transformer.logits(cfg, params, out.hidden, bank=bank, ids=ids)

    compiled = run.lower(params, lib and lib.bank, tokens, ids).compile()

    def timed() -> None:
        jax.block_until_ready(compiled(params, lib and lib.bank, tokens, ids))

    return timed


def engine(cfg: ModelConfig, params: Params, lib: Library | None) -> Engine:
    """One program for prompts, one to decode 32 rows."""
    sizes = EngineConfig(max_rows=ROWS, max_length=64, page_size=16, prefill_chunk=32, block=32)
    return Engine(cfg, params, sizes, lib and Experts(lib, cfg.vocab))


def requests(running: Engine, names: Sequence[str | None], rows: int, new_tokens: int) -> list[Request]:
    """Rows that take turns with the experts."""
    prompt = lambda row: [(7 * row + i) % running.cfg.vocab for i in range(4)]
    each = dict(max_new_tokens=new_tokens)
    return [Request(prompt=prompt(row), adapter=names[row % len(names)], **each) for row in range(rows)]


def decode(running: Engine, new_tokens: int) -> float:
    """Seconds for a step of decoding a full batch."""
    running.usage = Usage()
    names = running.experts.library.names if running.experts else (None,)
    running.run(requests(running, names, ROWS, new_tokens))
    return running.usage.decode_seconds / running.usage.decode_steps


def swap(running: Engine, new: Adapter) -> tuple[int, int]:
    """Experts swapped, and programs compiled, as a new version of one comes and is asked for in the middle of a run.

    One slot and one row are left free for it, so that it need not wait; the batch stays in the bucket of `decode`.
    """
    lib, running.usage = running.experts.library, Usage()
    before = lib.swaps
    with counted() as count:
        for request in requests(running, lib.names[:-1], ROWS - 1, 40):
            running.submit(request)
        while running.usage.decode_steps == 0:
            running.step()
        lib.add(new)
        running.submit(*requests(running, [new.name], 1, 4))
        while running.busy:
            running.step()
    return lib.swaps - before, count.programs
