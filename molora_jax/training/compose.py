"""Stage 2: a router over frozen experts, and the attention LoRA beside it, trained on the experts' traces."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.shared import shared
from molora_jax.checkpoints import composition
from molora_jax.checkpoints.model import DTYPES, Model
from molora_jax.config import UserError
from molora_jax.data.document import Document, fitting, from_example
from molora_jax.data.example import Example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.rows import Report
from molora_jax.models import transformer
from molora_jax.training import curve, loop, lorahub, mixture, specialist
from molora_jax.training.mixture import MixtureConfig
from molora_jax.training.optimiser import Group, OptimiserConfig, Schedule
from molora_jax.training.owned import OwnedBatches, owned
from molora_jax.training.partition import Leaves
from molora_jax.training.settings import FREE
from molora_jax.training.step import Loss, Trainer
from molora_jax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposeConfig:
    """One run of the second stage.

    Attributes:
      mixture: what composes the experts.
      rows, length: B and T of a batch; traces are packed into rows.
      steps: updates; of `lorahub`, which has none, the weights that are tried.
      rate, router_rate: peak learning rates of the attention LoRA and of the router. The released 5e-6 for both hardly
        moves a fresh router.
      schedule: `constant`, `linear` or `cosine` to 0, after `warmup` steps.
      clip: largest norm of the gradient.
      held_out: traces of each task that are kept back.
      dtype: computes in this one; by default as the base's parameters are.
      seed: of the router, the attention LoRA and the order of the traces.
      log_every, evaluate_every, save_every: steps between two lines, evaluations, checkpoints.
    """

    mixture: MixtureConfig = MixtureConfig()
    rows: int = 8
    length: int = 128
    steps: int = 200
    rate: float = 1e-3
    router_rate: float = 1e-2
    schedule: str = "cosine"
    warmup: int = 10
    clip: float = 1.0
    held_out: int = 16
    dtype: str | None = None
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 50
    save_every: int = 50

    def __post_init__(self):
        if min(self.rate, self.router_rate, self.clip) <= 0 or self.held_out < 1:
            raise UserError("compose: got a rate, clip or held_out that is not positive, expected positive ones")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"compose: got dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        self.falls()

    @property
    def free(self) -> tuple[str, ...]:
        """What may change when it is resumed; more steps only lengthen a run at a constant rate."""
        return (*FREE, "steps") if self.schedule == "constant" else FREE

    def falls(self) -> Schedule:
        """The schedule of all rates."""
        return Schedule(shape=self.schedule, steps=self.steps, warmup=self.warmup)


def run(
    model: Model,
    experts: Sequence[Adapter],
    traces: Sequence[Example],
    owner: dict[str, str],
    config: ComposeConfig,
    folder: Path | None = None,
    *,
    progress: bool = True,
) -> Composition:
    """Trains the router and the attention LoRA, with all else frozen to the bit, which is checked in the end.

    Args:
      model: the experts' base.
      traces: of `distil`.
      owner: name of the expert of each task.
      folder: gets checkpoints, numbers, a curve, and `router` and `attention`; a run that was killed goes on from
        there. None keeps nothing.

    Raises:
      UserError: an input that cannot be used; see `loop.run` too.
    """
    documents = split(model, traces, config)
    mixer = mixture.new_mixer(model.cfg, model.params, config.mixture, experts, seed=config.seed)
    if config.mixture.kind == mixture.LORAHUB:
        found = Composition(tuple(experts), lorahub.searched(model, experts, mixer, documents[0], config))
    else:
        attention = mixture.new_attention(model.cfg, model.params, config.mixture, seed=config.seed)
        made = trainer(model, experts, mixer, attention, config)
        tree = fit(made, documents, slots(experts, traces, owner), config, folder, progress=progress)
        found = Composition(tuple(experts), *trained(tree, mixer, attention))
    if folder is not None:
        composition.save(folder, model, found)
    return found


def slots(experts: Sequence[Adapter], traces: Sequence[Example], owner: dict[str, str]) -> dict[str, int]:
    """Of each trace, by its id, the slot of the expert that its task belongs to.

    Raises:
      UserError: a task without an expert.
    """
    known = {expert.name: slot for slot, expert in enumerate(experts)}
    if missing := sorted(task for task in {example.task for example in traces} if owner.get(task) not in known):
        got = f"got no expert of {missing[0]}, expected one of {', '.join(known)}"
        raise UserError(f"compose: {got}: say whose its traces are by --owner={missing[0]}=EXPERT")
    return {example.id: known[owner[example.task]] for example in traces}


def fit(
    made: Trainer, documents, belongs: dict[str, int], config: ComposeConfig, folder: Path | None, *, progress: bool
) -> dict[str, Any]:
    """The tree of a trainer after a run, whose frozen leaves are checked to have stayed.

    Args:
      documents: (to train on, held out), of `split`.
      belongs: of `slots`.
    """
    train, held = documents
    before = _digests(made.frozen)
    spec = dict(rows=config.rows, length=config.length)
    batches = lambda documents, **how: Batches({"traces": documents}, Spec(**spec, **how))
    state = loop.run(
        made,
        OwnedBatches(batches(train, seed=config.seed), belongs),
        loop.LoopConfig(
            steps=config.steps,
            log_every=config.log_every,
            evaluate_every=config.evaluate_every,
            save_every=config.save_every,
        ),
        folder=folder,
        evaluate=loop.held_out(
            made, lambda: (owned(b, belongs) for b in batches(held, seed=0, epochs=1, shuffle=False))
        ),
        progress=progress,
    )
    if _digests(made.frozen) != before:
        raise AssertionError("compose: a frozen leaf has changed")
    if folder is not None:
        curve.draw(folder, f"{config.mixture.kind} over frozen experts")
    return made.tree(state)


def trainer(
    model: Model, experts: Sequence[Adapter], mixer: Any, attention: Adapter | None, config: ComposeConfig
) -> Trainer:
    """The step of such a run; on a CPU the layers are unrolled, as in `sft.trainer`."""
    tree = mixture.tree(unrolled(model), experts, mixer, attention)
    groups = mixture.groups(attention, rate=config.rate, router_rate=config.router_rate)
    return stepper(tree, mixture.loss(model.cfg, config.mixture, mixer), groups, config)


def unrolled(model: Model) -> Params:
    """The base's parameters for such a step: on a CPU taken apart into layers; the model stays."""
    apart = jax.default_backend() == "cpu" and isinstance(model.params["layers"], dict)
    return transformer.unstack(dict(model.params)) if apart else model.params


def stepper(tree: dict[str, Any], loss: Loss, groups: tuple[Group, ...], config: ComposeConfig) -> Trainer:
    """The step that trains these groups of a tree, as the config says."""
    return Trainer(
        tree,
        loss,
        OptimiserConfig(groups=groups, schedule=config.falls(), clip=config.clip),
        dtype=None if config.dtype is None else DTYPES[config.dtype],
        seed=config.seed,
    )


def split(model: Model, traces: Sequence[Example], config: ComposeConfig) -> tuple[list[Document], list[Document]]:
    """(to train on, held out): of each task the first questions by a fixed shuffle are held out, with all their traces.

    Traces that are longer than a row are left out, and counted.
    """
    report, train, held = Report(), [], []
    tasks: dict[str, dict[str, list[Document]]] = {}  # by task and question
    for example in traces:
        own = tasks.setdefault(example.task, {})
        for document in fitting([from_example(model.tokenizer, example)], config.length, report):
            own.setdefault(example.prompt, []).append(document)
    if report.skipped:
        print(f"compose: {len(report.skipped)} of {len(traces)} traces are longer than the {config.length} of a row")
    for task, questions in sorted(tasks.items()):
        if len(questions) <= config.held_out:
            raise UserError(
                f"compose: got traces of {len(questions)} questions of {task} in {config.length} tokens, expected more "
                f"than the {config.held_out} to hold out; draw more, or lower held_out"
            )
        groups = list(questions.values())
        order = np.random.default_rng(0).permutation(len(groups))
        held += [document for i in order[: config.held_out] for document in groups[i]]
        train += [document for i in order[config.held_out :] for document in groups[i]]
    return train, held


def _digests(leaves: Leaves) -> dict[str, bytes]:
    return {path: hashlib.blake2b(np.asarray(leaf).tobytes()).digest() for path, leaf in leaves.items()}


def trained(tree: dict[str, Any], mixer: Any, attention: Adapter | None) -> tuple[Any, Adapter | None]:
    """The router and the attention LoRA with the values of a tree that has been trained."""
    found = jax.tree.map(np.asarray, mixture.trained_mixer(tree, mixer))
    return found, None if attention is None else shared(tree["bank"], tree["params"], attention)


def parameters(found: Composition) -> dict[str, int]:
    """How many of a composition's parameters train: of the router, and of the attention LoRA."""
    router = sum(leaf.size for leaf in jax.tree.leaves(found.mixer.params))
    return dict(router=router, attention=0 if found.attention is None else specialist.count(found.attention))
