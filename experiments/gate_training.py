"""Training a small base and experts on it, on the testbed: what the ablation of gates stands on."""

import functools

import jax
import jax.numpy as jnp

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.route import Route
from molora_jax.adapters.spec import BankSpec, new_bank, pack, unpack, write
from molora_jax.config import ModelConfig
from molora_jax.data import document
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.testbed.recipe import Recipe, Stream
from molora_jax.data.testbed.vocabulary import tokenizer
from molora_jax.models import transformer
from molora_jax.training.batch import layout
from molora_jax.training.objective import next_token_loss
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.step import Trainer

LENGTH = 128
EXPERT = (
    Group(name="factors", paths=("bank.*.[ab]",), rate=4e-3),
    Group(name="gates", paths=("bank.*.cores.*",), rate=4e-3),
)


def config() -> ModelConfig:
    """0.23 M parameters."""
    sizes = dict(layers=4, width=64, mlp_width=176, heads=4, kv_heads=2, head_width=16, attn_scale=0.25)
    return ModelConfig(family="llama", vocab=tokenizer().vocab, windows=(0,) * 4, max_positions=256, **sizes)


def batches(recipe: Recipe, split: str, seed: int, rows: int, *, size: int = 2**30, epochs: int | None = None):
    """Packed rows of the testbed; without end by default."""
    source = document.Mapped(Stream(recipe, split, seed, size), functools.partial(document.from_example, tokenizer()))
    spec = Spec(rows=rows, length=LENGTH, seed=seed, epochs=epochs, shuffle=False)
    return Batches({"testbed": source}, spec)


def loss(cfg: ModelConfig, tree, batch, key=None):
    """Of {"params"} alone, or with the expert in slot 0 of {"bank"}."""
    bank, ids = tree.get("bank"), jnp.zeros(batch.tokens.size, jnp.int32)
    how = {} if bank is None else dict(bank=bank, route=Route.of(ids))
    hidden = transformer.apply(cfg, tree["params"], batch.tokens.reshape(-1), layout(batch), **how).hidden
    return next_token_loss(cfg, tree["params"], hidden, batch)


def train(cfg: ModelConfig, tree, data, steps: int, groups: tuple[Group, ...], name: str):
    """The tree after so many steps."""
    schedule = Schedule(shape="linear", steps=steps, warmup=min(50, steps // 10))
    trainer = Trainer(tree, functools.partial(loss, cfg), OptimiserConfig(groups=groups, schedule=schedule))
    state = trainer.init()
    for step in range(1, steps + 1):
        state, metrics = trainer.step(state, next(data))
        if step % max(steps // 8, 1) == 0:
            print(f"{name} step {step}: loss {float(metrics['loss']):.4f}", flush=True)
    return trainer.tree(state)


def train_expert(cfg: ModelConfig, params, adapter: Adapter, data, steps: int) -> Adapter:
    """The adapter after so many steps beside the frozen base."""
    spec = BankSpec.holding([adapter])
    tree = {"params": params, "bank": write(new_bank(spec, params), 0, pack(spec, params, adapter))}
    groups = EXPERT if adapter.gates else EXPERT[:1]
    return unpack(train(cfg, tree, data, steps, groups, adapter.name)["bank"], 0, params, adapter)


def size(adapter: Adapter) -> int:
    """Parameters of the factors and of the gates."""
    factors = sum(w.a.size + w.b.size for _, _, w in adapter.weights())
    return factors + sum(leaf.size for group in adapter.gates for leaf in jax.tree.leaves(group.cores))
