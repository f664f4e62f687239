"""A MaLoRA trained for a few minutes on a mixture of the testbed's domains, over a frozen base."""

import functools

import jax.numpy as jnp

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.fresh import fresh
from molora_jax.adapters.gate import GateConfig
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, unpack, write
from molora_jax.config import ModelConfig
from molora_jax.data.document import Mapped, from_example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.testbed.recipe import Recipe, Stream
from molora_jax.models import transformer
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.training import loop
from molora_jax.training.batch import layout
from molora_jax.training.objective import next_token_loss
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.step import Trainer

RECIPE = Recipe(shares={"list": 1.0, "logic": 1.0, "text": 1.0}, levels=(1,), signs=0.0)
SITES = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.up_proj", "mlp.down_proj")
RANK, ROWS, LENGTH = 8, 4, 128
GROUPS = (
    Group(name="factors", paths=("bank.*.[ab]",), rate=1e-3),
    Group(name="gates", paths=("bank.*.cores.*",), rate=3e-3),
)


def problems(split: str, size: int, seed: int = 0) -> Stream:
    """What the expert learns, or is asked."""
    return Stream(RECIPE, split, seed, size)


def train(cfg: ModelConfig, params, words: Tokenizer, *, steps: int, seed: int) -> Adapter:
    """The expert after so many steps; `params` have stacked layers."""
    adapter = fresh(cfg, params, "malora", rank=RANK, sites=SITES, seed=seed, gate=GateConfig())
    spec = BankSpec.holding([adapter])
    tree = {"params": params, "bank": write(new_bank(spec, params), 0, pack(spec, params, adapter))}

    def loss(tree, batch, key):
        route = Route.of(jnp.zeros(batch.tokens.size, jnp.int32))
        tokens = batch.tokens.reshape(-1)
        hidden = transformer.apply(cfg, tree["params"], tokens, layout(batch), bank=tree["bank"], route=route).hidden
        return next_token_loss(cfg, tree["params"], hidden, batch)

    schedule = Schedule(shape="linear", steps=steps, warmup=min(10, steps // 10))
    trainer = Trainer(tree, loss, OptimiserConfig(groups=GROUPS, schedule=schedule), seed=seed)
    source = Mapped(problems("train", 2**30, seed), functools.partial(from_example, words))
    batches = Batches({"testbed": source}, Spec(rows=ROWS, length=LENGTH, seed=seed, shuffle=False))
    state = loop.run(trainer, batches, loop.LoopConfig(steps=steps, log_every=max(steps // 8, 1)))
    return unpack(trainer.tree(state)["bank"], 0, params, adapter)
