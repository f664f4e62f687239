"""MoLoRA's claim in shape, on one seed: a small base with routed experts against a large one; tokens against sequences.

A prompt that needs K domains is answered by one pass if each token has its own expert, and by K passes if a sequence
has one: then each pass is right in its own part at most (Shah & Wagle 2026).
"""

import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax import benchmarking
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.model import Model
from molora_jax.data.example import Example
from molora_jax.data.testbed import prompts, splits, verifier
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.data.testbed.problem import draw
from molora_jax.data.testbed.recipe import Stream, specialist
from molora_jax.evaluation import comparison, systems
from molora_jax.evaluation.comparison import Comparison
from molora_jax.evaluation.reproduction.mixtures import OWNER, drawn, settings
from molora_jax.evaluation.reproduction.plan import ENDLESS, MLP, SINGLE, Plan
from molora_jax.evaluation.systems import Answerer, System
from molora_jax.training import classifier, compose
from molora_jax.training.fit import fit
from molora_jax.training.specialist import AdapterConfig
from molora_jax.typing import Bool

USES = ("large", "small", "problems", "small_supervised", "rank", "rate", "traces", "composed")
K = 3
"""Domains of a prompt: the bases were pretrained on no more, and four do not fit in their 128 tokens."""
STEPS = 2
"""Operations of each of K problems."""
BETWEEN = prompts.joined(("", ""))
PASSES_OF_OWN = "a pass of each domain's expert"
PASSES = (3, 4)
"""Experts whose passes are timed against one routed pass."""


def run(plan: Plan, seed: int, runs: Path) -> dict[str, Any]:
    """Experts of the small base, composed; the same questions to the bare large base."""
    small, large = models.load(plan.small), models.load(plan.large)
    config = AdapterConfig(rank=plan.rank, sites=MLP)
    how = dict(steps=plan.small_supervised, rate=plan.rate, seed=seed)
    streams = {name: Stream(specialist(name), "train", seed, ENDLESS) for name in SINGLE}
    experts = [fit(small, stream, name, config, **how) for name, stream in streams.items()]
    traces, _ = drawn(plan, small, experts, seed)
    routed = compose.run(small, experts, traces, OWNER, settings(plan, "hard_dense", seed), progress=False)
    sets = plan.sets() | {f"{K} domains": several(plan.problems)}
    rivals = [*systems.bounds(experts, OWNER, small.cfg.layers), systems.composed("routed by token", routed)]
    decides = classifier.train(small, traces, OWNER, [e.name for e in experts], seed=seed)
    rivals.append(System(name="routed by prompt", experts=tuple(experts), classifier=decides))
    found = comparison.compare(small, rivals, sets)
    theirs = comparison.compare(large, [dataclasses.replace(systems.BASE, name="large base")], sets)
    everything = [example for asked in sets.values() for example in asked]  # at once: an engine an expert, not a set
    ends = np.cumsum([len(asked) for asked in sets.values()])[:-1]
    own = dict(zip(sets, np.split(own_parts(small, experts, everything), ends), strict=True))
    whole = Comparison(found.sets, found.right | {PASSES_OF_OWN: own} | theirs.right, found.seconds | theirs.seconds)
    return dict(comparison=whole.values, passes=passes(small, routed, sets[f"{K} domains"]))


def several(count: int, split: str = "test") -> list[Example]:
    """Prompts of K marked problems of as many domains."""
    return [_several(f"{K}/{split}/{index}", split) for index in range(count)]


def _several(id: str, split: str) -> Example:
    rng = random.Random(id)
    one = lambda name: draw(DOMAINS[name], rng, 1, signs=0.25, steps=STEPS)
    question = lambda problem: problem.question
    names = rng.sample(list(DOMAINS), K)
    problems = [splits.draw_until(split, functools.partial(one, name), question) for name in names]
    return prompts.write(problems, id=id, split=split)


def own_parts(model: Model, experts: Sequence[Adapter], examples: Sequence[Example]) -> Bool[np.ndarray, "n"]:
    """Whether the passes of all its domains' experts solve a prompt, if of each pass its own domain's answer is taken.

    That is the best that routing of sequences can do: somebody knows the domains, and which part of what an expert
    writes is its own.
    """
    written = {}
    for expert in experts:
        alone = System(name=expert.name, experts=tuple(experts), single=expert.name)
        written[expert.name] = systems.answers(model, alone, examples)
    right = []
    for i, example in enumerate(examples):
        wanted, domains = example.answer.split(BETWEEN), example.task.split("+")
        given = [(verifier.parse(written[OWNER[domain]][i]) or "").split(BETWEEN) for domain in domains]
        parts = [parts[place] if len(parts) == len(wanted) else None for place, parts in enumerate(given)]
        right.append(parts == wanted)
    return np.array(right, bool)


def passes(model: Model, routed: Composition, examples: Sequence[Example], repeats: int = 3) -> dict[str, Any]:
    """Seconds of one routed pass over some prompts, and of a pass of each of k experts, in turn; programs are warm."""
    token = Answerer(model, systems.composed("routed", routed))
    alone = [System(name=e.name, experts=routed.experts, single=e.name) for e in routed.experts[: max(PASSES)]]
    each = [Answerer(model, system) for system in alone]

    def ask(group: Sequence[Answerer]) -> None:
        for answerer in group:
            answerer(examples)

    groups = {"token": [token]} | {str(k): each[:k] for k in PASSES}
    timed = benchmarking.interleave({k: functools.partial(ask, group) for k, group in groups.items()}, repeats)
    ratios = {str(k): timed[str(k)].median / timed["token"].median for k in PASSES}
    return dict(seconds={name: timing.runs for name, timing in timed.items()}, ratios=ratios)
