"""Readers with and without MaRA, end to end on the testbed's fact world: who answers more questions, and at what cost.

A reader is the base, or it with an expert trained to answer from all segments. It answers twice: from all segments, and
from those that a router over the bare base picks, in the order in which they stand.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.checkpoints.model import Model
from molora_jax.data.document import Mapped, from_example
from molora_jax.data.multihop.question import Question
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.testbed import facts
from molora_jax.data.testbed.verifier import JUDGE
from molora_jax.evaluation import bootstrap, systems
from molora_jax.evaluation.systems import LENGTH, System
from molora_jax.retrieval import chain, recipe, training
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.slates import Beside
from molora_jax.training import loop, specialist
from molora_jax.training.optimiser import OptimiserConfig, Schedule
from molora_jax.training.specialist import AdapterConfig
from molora_jax.training.step import Trainer

BASE, LORA, ALL, MARA = "base", "lora", "all", "mara"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig:
    """One grid.

    Attributes:
      model: the base, which encodes and reads.
      readers: kinds of adapters, by name.
      level: of the fact worlds.
      router_questions, test_questions: how many train the router, and how many are asked.
      depths: layers after which segments are encoded.
      top: segments that MaRA gives the reader; at least the hops of the level.
      length: tokens of a row with all segments and the answer; more for other tokenizers than the testbed's.
      steps, rows, rate, gate_rate: of the readers' training.
      seeds: of the readers, the routers and what they are trained on; all answer the same questions.
    """

    model: str = "testbed:large"
    readers: dict[str, AdapterConfig] = dataclasses.field(
        default_factory=lambda: {
            LORA: AdapterConfig(kind="lora", rank=8),
            "malora": AdapterConfig(kind="gated", rank=8),
        }
    )
    level: int = 3
    router_questions: int = 400
    test_questions: int = 300
    depths: tuple[int, ...] = (2,)
    top: int = 5
    length: int = LENGTH
    steps: int = 300
    rows: int = 16
    rate: float = 2e-3
    gate_rate: float = 2e-3
    seeds: int = 3


def run(add: Callable[..., None], model: Model, config: GridConfig) -> dict[str, float]:
    """Adds a row a cell, with intervals over seeds and questions; the summary has the share right by cell.

    A row has the gap to the same reader with all segments, to LoRA in the same context where the grid has one, and its
    cost: tokens × layers of encoding, reading and writing a question.

    Args:
      model: with stacked layers.
    """
    asked = questions("test", config.test_questions, config.level, 0)
    right: dict[tuple[str, str], list[np.ndarray]] = {}
    cost: dict[tuple[str, str], list[float]] = {}
    for seed in range(config.seeds):
        picked, encoded = evidence(model, asked, config, seed)
        chosen = {ALL: [tuple(range(len(q.segments))) for q in asked], MARA: picked}
        for reader in (BASE, *config.readers):
            adapter = None if reader == BASE else expert(model, config, reader, seed)
            for context, segments in chosen.items():
                found, tokens = answered(model, asked, segments, adapter, config.length)
                right.setdefault((reader, context), []).append(found)
                spent = model.cfg.layers * tokens + (encoded if context == MARA else 0.0)
                cost.setdefault((reader, context), []).append(spent)
    shares = {cell: np.stack(each) for cell, each in right.items()}
    for (reader, context), share in shares.items():
        own = bootstrap.paired(share, np.zeros_like(share))
        facts = dict(reader=reader, context=context, n=own.n, seeds=config.seeds, right=own.mean)
        facts |= dict(low=own.low, high=own.high, over_all=bootstrap.paired(share, shares[reader, ALL]).points)
        if (LORA, context) in shares:
            facts["over_lora"] = bootstrap.paired(share, shares[LORA, context]).points
        add(**facts, by_seed=share.mean(axis=1).tolist(), cost=float(np.mean(cost[reader, context])))
    return {f"{reader}_{context}": float(share.mean()) for (reader, context), share in shares.items()}


def questions(split: str, count: int, level: int, seed: int) -> list[Question]:
    """Questions of the fact world, others for every seed."""
    return [facts.question(split, seed * 1_000_000 + i, level=level) for i in range(count)]


def evidence(
    model: Model, asked: Sequence[Question], config: GridConfig, seed: int
) -> tuple[list[tuple[int, ...]], float]:
    """What a router trained on other questions picks, in reading order, and encoder tokens × layers a question."""
    how = EncoderConfig(depths=config.depths)
    inputs = Inputs(Encoder(model.cfg, model.params, model.tokenizer, how), Beside())
    learn = inputs.slates(questions("train", config.router_questions, config.level, seed))
    cfg, settings = recipe.router(inputs), dataclasses.replace(recipe.TRAINING, seed=seed, passes=config.level + 1)
    found = training.train(cfg, learn, settings)
    chains = training.chains(cfg, found.params, inputs.slates(asked), passes=settings.passes)
    return [chain.take(one.ranking, config.top, "reading") for one in chains], inputs.cost(asked)


def expert(model: Model, config: GridConfig, reader: str, seed: int) -> Adapter:
    """A reader's adapter after training on questions with all their segments."""
    adapter = specialist.new(model.cfg, model.params, config.readers[reader], reader, seed=seed)
    groups = specialist.groups(adapter, rate=config.rate, gate_rate=config.gate_rate)
    schedule = Schedule(shape="cosine", steps=config.steps, warmup=config.steps // 20)
    how = OptimiserConfig(groups=groups, schedule=schedule)
    trainer = Trainer(specialist.tree(model.params, adapter), specialist.loss(model.cfg), how, seed=seed)
    asked = questions("train", config.steps * config.rows, config.level, seed)
    source = Mapped([facts.read(q) for q in asked], functools.partial(from_example, model.tokenizer))
    batches = Batches({facts.FACTS: source}, Spec(rows=config.rows, length=config.length, seed=seed))
    state = loop.run(trainer, batches, loop.LoopConfig(steps=config.steps, log_every=max(config.steps // 4, 1)))
    return specialist.trained(trainer.tree(state), adapter)


def answered(
    model: Model, asked: Sequence[Question], chosen: Sequence[Sequence[int]], adapter: Adapter | None, length: int
) -> tuple[np.ndarray, float]:
    """Which questions are answered right, and the mean number of tokens that are read and written."""
    examples = [facts.read(question, picked) for question, picked in zip(asked, chosen, strict=True)]
    reader = systems.BASE
    if adapter is not None:
        reader = System(name=adapter.name, experts=(adapter,), single=adapter.name)
    written = systems.answers(model, reader, examples, length=length)
    found = JUDGE.verify([example.answer for example in examples], written)
    count = lambda text: len(model.tokenizer.encode(text))
    spent = [count(e.prompt) + count(text) for e, text in zip(examples, written, strict=True)]
    return np.array(found, float), float(np.mean(spent))
