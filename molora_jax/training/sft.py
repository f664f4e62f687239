"""Supervised fine-tuning of one new specialist over a frozen base: data in, curves and an adapter's folder out."""

import dataclasses
import functools
import statistics
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from molora_jax import distributed, sharding
from molora_jax.adapters.adapter import Adapter
from molora_jax.checkpoints import hf, peft
from molora_jax.checkpoints.model import DTYPES, Model, default_dtype
from molora_jax.checkpoints.resolve import resolve
from molora_jax.config import UserError
from molora_jax.data import jsonl, questions
from molora_jax.data.batch import Batch
from molora_jax.data.document import Document, Mapped, Source, fitting, from_example
from molora_jax.data.pipeline import Batches, Spec
from molora_jax.data.rows import Report
from molora_jax.models import families, transformer
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.training import curve, loop, settings, specialist
from molora_jax.training.optimiser import OptimiserConfig
from molora_jax.training.placement import Placement
from molora_jax.training.settings import SFTConfig
from molora_jax.training.step import Trainer


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
      adapter: the folder that it was exported to.
      before, after: held-out losses.
      tokens_per_second: the median over the logged steps.
    """

    adapter: Path
    before: float
    after: float
    tokens_per_second: float


def run(config: SFTConfig, folder: Path | str, *, progress: bool = True) -> Result:
    """Trains, or resumes the run in `folder`, and exports.

    The folder gets `config.json`, `checkpoints`, `metrics.jsonl`, `tensorboard`, `loss.png` and `adapter`: a PEFT
    folder, with this project's own files beside it where the adapter has gates.

    Raises:
      UserError: any input that cannot be used.
    """
    folder = Path(folder)
    say = functools.partial(print, flush=True) if distributed.is_first() else lambda line: None
    place = None if jax.device_count() == 1 else sharding.mesh(config.mesh)
    model, place = load(config, place)
    train, held = documents(config, model.tokenizer, say)
    if distributed.is_first():
        settings.remember(config, folder)
    adapter = specialist.new(model.cfg, model.params, config.adapter, folder.name, seed=config.seed)
    made = trainer(model, adapter, config, place)
    _tell(config, adapter, made, say)
    state = loop.run(
        made,
        Batches({"train": train}, _spec(config)),
        loop.LoopConfig(
            steps=config.steps,
            log_every=config.log_every,
            evaluate_every=config.evaluate_every,
            save_every=config.save_every,
        ),
        folder=folder,
        evaluate=loop.held_out(made, lambda: batches(config, held)),
        progress=progress,
    )
    found = specialist.trained(_whole(made.tree(state), place), adapter)
    return _finished(config, folder, model, found, say) if distributed.is_first() else None


def load(config: SFTConfig, mesh=None) -> tuple[Model, Placement | None]:
    """The base with stacked layers, and where it lies on a mesh."""
    source, dtype = resolve(config.model), DTYPES[config.dtype or default_dtype()]
    tokenizer = Tokenizer.load(source)
    place = shardings = None
    if mesh is not None:
        cfg = families.from_hf(hf.read_config(source))
        place = Placement.of(cfg, mesh)
        shardings = place.params(transformer.abstract(cfg))
        whole = all(leaf.is_fully_replicated for leaf in jax.tree.leaves(shardings))
        if config.adapter.kind == "dora" and jax.process_count() > 1 and not whole:
            raise UserError("dora: got a base cut over processes, expected mesh.fsdp=1 and mesh.tensor=1: its norms")
    cfg, params = hf.load(source, dtype=dtype, sharding=shardings)
    return Model(cfg, params, tokenizer), place


def documents(config: SFTConfig, tokenizer: Tokenizer, say=print) -> tuple[Source[Document], list[Document]]:
    """(those to train on, those held out); what was skipped is told."""
    report = Report()
    if config.data.startswith(questions.TESTBED):
        return _drawn(config, tokenizer, say)
    if config.data.endswith(".jsonl"):
        found = jsonl.load(config.data, tokenizer, length=config.length, strict=config.strict, report=report)
    else:
        how = dict(data_dir=config.data_dir, strict=config.strict, report=report)
        examples = questions.source(config.data, "train", **how)
        found = fitting((from_example(tokenizer, example) for example in examples), config.length, report)
    if len(found) <= config.held_out:
        raise UserError(
            f"data: got {len(found)} documents of at most {config.length} tokens in {config.data}, expected more than "
            f"the {config.held_out} to hold out; lower held_out or raise length"
        )
    order = np.random.default_rng(0).permutation(len(found))
    kept = set(order[: config.held_out].tolist())
    train, held = ([d for i, d in enumerate(found) if (i in kept) == mine] for mine in (False, True))
    say(f"data: {config.data}, {len(train)} documents to train on, {len(held)} held out, {len(report.skipped)} skipped")
    return train, held


def _drawn(config: SFTConfig, tokenizer: Tokenizer, say) -> tuple[Source[Document], list[Document]]:
    """Of a domain of the testbed; its problems are drawn, as many as are asked for."""
    convert = functools.partial(from_example, tokenizer)
    train, held = (Mapped(questions.source(config.data, split), convert) for split in ("train", "validation"))
    say(f"data: {config.data}, problems drawn as they are needed, {config.held_out} others held out")
    return train, [held[i] for i in range(config.held_out)]


def batches(config: SFTConfig, held: list[Document]) -> Iterator[Batch]:
    """This process's rows of the held-out documents, once."""
    rows = config.rows // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    spec = Spec(rows=config.rows, length=config.length, seed=0, epochs=1, shuffle=False)
    for batch in Batches({"held_out": held}, spec):
        yield jax.tree.map(lambda leaf: leaf[mine], batch)


def trainer(model: Model, adapter: Adapter, config: SFTConfig, place: Placement | None = None) -> Trainer:
    """The step of such a run; on a single CPU the model's parameters are taken apart, for adapters without gates.

    The scans of a gate take half a minute to compile, which every unrolled layer would repeat.
    """
    unroll = place is None and jax.default_backend() == "cpu" and not adapter.gates
    groups = specialist.groups(adapter, rate=config.rate, gate_rate=config.gate_rate, decay=config.decay)
    return Trainer(
        specialist.tree(model.params, adapter, unroll=unroll),
        specialist.loss(model.cfg, remat=config.remat),
        OptimiserConfig(groups=groups, schedule=config.falls(), clip=config.clip),
        accumulate=config.accumulate,
        dtype=None if config.dtype is None else DTYPES[config.dtype],
        seed=config.seed,
        place=place,
    )


def _spec(config: SFTConfig) -> Spec:
    count = jax.process_count()
    if config.rows % count:
        raise UserError(f"config: got {config.rows} rows for {count} processes, expected a multiple of them")
    shard = dict(process_index=jax.process_index(), process_count=count)
    return Spec(rows=config.rows // count, length=config.length, seed=config.seed, **shard)


def _whole(tree, place: Placement | None):
    """What the adapter is made of, for the host to read."""
    if place is None or jax.process_count() == 1:
        return tree
    return tree | {key: place.gathered(tree[key]) for key in tree if key != "params"}


def _tell(config: SFTConfig, adapter: Adapter, made: Trainer, say) -> None:
    sizes: dict[str, int] = {}
    for path, leaf in made.init().trained.items():
        name = made.config.group_of(path)
        sizes[name] = sizes.get(name, 0) + leaf.size
    base = sum(leaf.size for path, leaf in made.frozen.items() if path.startswith("params."))
    parts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    ranks = sorted(set(specialist.ranks(adapter).values()))
    shown = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    say(f"model: {config.model}, {base:,} parameters, frozen")
    say(f"adapter: {config.adapter.kind}, rank {shown}: {sum(sizes.values()):,} parameters train ({parts})")
    where = f"{jax.device_count()} device{'s' * (jax.device_count() > 1)}"
    say(f"run: {config.steps} steps of {config.rows} × {config.length} tokens on {where}")


def _finished(config: SFTConfig, folder: Path, model: Model, found: Adapter, say) -> Result:
    peft.save(folder / "adapter", model.cfg, found)
    picture = curve.draw(folder, f"{config.adapter.kind} on {config.data}")
    held, speeds = (curve.values(folder, name)[1] for name in ("eval_loss", "tokens_per_second"))
    result = Result(folder / "adapter", held[0], held[-1], statistics.median(speeds))
    say(
        f"held-out loss {result.before:.4f} before, {result.after:.4f} after {config.steps} steps; "
        f"{result.tokens_per_second:.0f} tokens/s"
    )
    if picture:
        say(f"curve: {picture}")
    say(f"adapter: --model={config.model} --adapters={found.name}={result.adapter} --adapter={found.name}")
    return result
