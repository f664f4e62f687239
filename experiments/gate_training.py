"""A MaLoRA trained for a few minutes on a mixture of the testbed's domains, over a frozen base."""

import functools

from molora_jax.adapters.adapter import Adapter
from molora_jax.config import ModelConfig
from molora_jax.data.document import Mapped, from_example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.testbed.recipe import Recipe, Stream
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.training import loop, specialist
from molora_jax.training.optimiser import OptimiserConfig, Schedule
from molora_jax.training.specialist import AdapterConfig
from molora_jax.training.step import Trainer

RECIPE = Recipe(shares={"list": 1.0, "logic": 1.0, "text": 1.0}, levels=(1,), signs=0.0)
SITES = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.up_proj", "mlp.down_proj")
EXPERT = AdapterConfig(kind="gated", rank=8, sites=SITES)
ROWS, LENGTH = 4, 128


def problems(split: str, size: int, seed: int = 0) -> Stream:
    """What the expert learns, or is asked."""
    return Stream(RECIPE, split, seed, size)


def train(cfg: ModelConfig, params, words: Tokenizer, *, steps: int, seed: int) -> Adapter:
    """The expert after so many steps; `params` have stacked layers."""
    adapter = specialist.new(cfg, params, EXPERT, "malora", seed=seed)
    groups = specialist.groups(adapter, rate=1e-3, gate_rate=3e-3)
    schedule = Schedule(shape="linear", steps=steps, warmup=min(10, steps // 10))
    config = OptimiserConfig(groups=groups, schedule=schedule)
    trainer = Trainer(specialist.tree(params, adapter), specialist.loss(cfg), config, seed=seed)
    source = Mapped(problems("train", 2**30, seed), functools.partial(from_example, words))
    batches = Batches({"testbed": source}, Spec(rows=ROWS, length=LENGTH, seed=seed, shuffle=False))
    state = loop.run(trainer, batches, loop.LoopConfig(steps=steps, log_every=max(steps // 8, 1)))
    return specialist.trained(trainer.tree(state), adapter)
