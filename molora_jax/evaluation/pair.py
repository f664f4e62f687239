"""A routed pair of models: accuracy and tokens per second against the large model's share, beside its rivals."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from molora_jax import benchmarking
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.tasks import registry
from molora_jax.data.testbed.recipe import COMMON, Recipe, Stream
from molora_jax.engine import routed
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import EngineConfig, Event, Request
from molora_jax.engine.routed import RoutedEngine
from molora_jax.evaluation import bootstrap
from molora_jax.evaluation.accuracy import Accuracy
from molora_jax.routing import heads as routing_heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import LARGE, Program
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.deferral import Deferral
from molora_jax.routing.programs.r2r import R2R
from molora_jax.serving import threshold
from molora_jax.training import heads, labels
from molora_jax.training.heads import HeadTraining, Trained
from molora_jax.training.labels import Labels
from molora_jax.typing import Bool, Float, Int, Params

TRAINED, ENTROPY, RANDOM, QUESTION = "r2r", "entropy", "random", "question"
"""The routers: R2R's classifier; deferral by entropy; a coin for each token; a classifier of whole questions."""
HEAD_SHARE = 0.1
"""The large model's share that a head which is kept routes at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairConfig:
    """What is measured, and how.

    Attributes:
      shares: of the large model's among all tokens, besides none and all.
      train, validation, test: questions that the routers learn from, are calibrated on, and are measured on.
      recipe: of the questions.
      rows: requests at once.
      length: most tokens of a prompt and its answer.
      close: how near to a share its calibration must come.
      top_k, width: of R2R's classifier, which has one block that is twice as wide inside.
      training: of that classifier, but for its seed.
      repeats: runs of each whose tokens per second are measured; the quickest counts.
    """

    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
    train: int = 800
    validation: int = 100
    test: int = 300
    recipe: Recipe = COMMON
    rows: int = 64
    length: int = 128
    close: float = 0.01
    top_k: int = 32
    width: int = 48
    training: HeadTraining = HeadTraining(rate=2e-3)
    repeats: int = 3

    def __post_init__(self):
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise UserError(f"pair: got the shares {self.shares}, expected some between 0 and 1: the ends come anyway")
        if min(self.train, self.validation, self.test, self.rows, self.repeats) < 1:
            raise UserError(f"pair: got {self}, expected counts of at least 1")


@dataclasses.dataclass(frozen=True)
class Answers:
    """How some questions were answered.

    Attributes:
      right: whether the answer is.
      tokens, large: how many it has, and how many of them the large model wrote.
    """

    right: Bool[np.ndarray, "n"]
    tokens: Int[np.ndarray, "n"]
    large: Int[np.ndarray, "n"]

    @property
    def share(self) -> float:
        return float(self.large.sum() / self.tokens.sum())

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy(int(self.right.sum()), len(self.right))

    def where(self, chosen: Bool[np.ndarray, "n"], other: "Answers") -> "Answers":
        """These where `chosen`, else the others."""
        return Answers(*(np.where(chosen, *both) for both in zip(_columns(self), _columns(other), strict=True)))


def _columns(answers: Answers) -> tuple[np.ndarray, ...]:
    return answers.right, answers.tokens, answers.large


def run(
    small: Model, large: Model, *, seed: int = 0, config: PairConfig = PairConfig(), folder: Path | None = None
) -> dict[str, Any]:
    """Trains the routers on the testbed, calibrates them to every share and measures them; returns JSON values.

    Seeds differ in the training questions, the heads' parameters and the coins; the questions for calibration and
    measurement are the same, so that several seeds can be paired.

    Args:
      folder: gets R2R's head (`heads.save`), with the threshold of the share nearest to `HEAD_SHARE`.

    Raises:
      UserError: no router can be trained, as `labels.label` and `heads.train` say.
    """
    counts = dict(train=config.train, validation=config.validation, test=config.test)
    draw = lambda split: Stream(config.recipe, split, seed if split == "train" else 0, counts[split])
    examples = {split: list(draw(split)) for split in counts}
    return measure(small, large, examples, seed=seed, config=config, folder=folder)


def measure(
    small: Model,
    large: Model,
    examples: Mapping[str, Sequence[Example]],
    *,
    seed: int,
    config: PairConfig,
    folder: Path | None = None,
) -> dict[str, Any]:
    """`run` on given questions: of "train", "validation" and "test".

    Returns:
      "ends": "small" and "large" alone; "rows": one for each router and share, with "right" for every test question,
      the "accuracy" with its interval, the "realised" share of the test tokens, and the difference "over_random", which
      is paired with tokens routed at random at R2R's realised share. "tokens_per_s" is measured for each row on answers
      of equal length; of whole questions it is what the two ends' speeds promise if neither ever waits for the other.
      A large model that writes one token of an answer reads all of it up to there: where a step takes as long as it has
      tokens, as on a CPU with many requests at once, tokens are not routed quicker than the large model writes alone.
    """
    training = dataclasses.replace(config.training, seed=seed)
    found = labels.label(small, large, examples["train"], top_k=config.top_k, rows=config.rows, length=config.length)
    sizes = dict(hidden=small.cfg.width, width=config.width)
    cfg = HeadConfig(kind="r2r", top_k=config.top_k, blocks=1, expansion=2, **sizes)
    embedding = small.params["embed"]["weight"]
    head = heads.train(cfg, embedding, found, found.divergent, training)
    pair = _Pair(small, large, config, seed)
    pair.add(TRAINED, R2R(cfg), dict(head=jax.tree.map(jax.numpy.asarray, head.params), embedding=embedding))
    pair.add(ENTROPY, Deferral("entropy"))
    pair.add(RANDOM, Bernoulli())
    both = lambda split: [pair.ask(RANDOM, examples[split], share=share) for share in (0.0, 1.0)]
    alone = {split: both(split) for split in ("validation", "test")}
    whole = _Questions(pair, examples, alone, HeadConfig(kind="mlp", **sizes), training)
    rows = []
    for share in config.shares:
        rows += _at(pair, whole, examples, share)
    if folder is not None:
        near = min((row for row in rows if row["router"] == TRAINED), key=lambda row: abs(row["share"] - HEAD_SHARE))
        routing_heads.save(folder, cfg, head.params, near["knobs"]["threshold"])
    ends = dict(zip(("small", "large"), alone["test"], strict=True))
    values = dict(ends={name: _values(answers) for name, answers in ends.items()}, rows=rows)
    _add_speeds(pair, values, examples["test"], np.minimum(*(answers.tokens for answers in ends.values())))
    return (
        dict(seed=seed, config=dataclasses.asdict(config), labels=_label_values(found), head=_head_values(head))
        | values
    )


class _Pair:
    """Two models and a compiled engine for each router.

    Attributes:
      schedules: how the engine of a router decides who waits, as tuned on the test questions, by router and share.
    """

    def __init__(self, small: Model, large: Model, config: PairConfig, seed: int):
        self.models, self.config, self.seed = (small, large), config, seed
        self.engines: dict[str, RoutedEngine] = {}
        self.schedules: dict[tuple[str, float], Any] = {}

    def add(self, name: str, program: Program, params: Params | None = None) -> None:
        config = self.config
        sizes = EngineConfig(max_rows=config.rows, max_length=config.length, prefill_chunk=16 * config.rows, block=32)
        fleet = [routed.Model(model.cfg, model.params) for model in self.models]
        self.engines[name] = RoutedEngine(fleet, program, params, sizes)
        self.engines[name].time()

    def requests(self, examples: Sequence[Example], **knobs: float) -> list[Request]:
        tokenizer, found = self.models[LARGE].tokenizer, []
        for i, example in enumerate(examples):
            prompt = tokenizer.encode(example.prompt)
            if len(prompt) >= self.config.length:
                raise UserError(f"{example.id}: got {len(prompt)} tokens, expected fewer than {self.config.length}")
            most = self.config.length - len(prompt)
            seed = (self.seed << 20) + i
            found.append(Request(prompt=prompt, max_new_tokens=most, stops=tokenizer.eos, seed=seed, knobs=knobs))
        return found

    def ask(self, router: str, examples: Sequence[Example], **knobs: float) -> Answers:
        """What the test, or any other questions, are answered by a router with these knobs."""
        events = self.engines[router].run(self.requests(examples, **knobs))
        texts = [self.models[LARGE].tokenizer.decode(event.tokens) for event in events]
        return Answers(
            right=np.array(registry.verify(examples, texts), bool),
            tokens=np.array([len(event.tokens) for event in events]),
            large=np.array([sum(writer == LARGE for writer in event.writers) for event in events]),
        )

    def calibrate(self, router: str, examples: Sequence[Example], share: float) -> float:
        """The threshold of a router."""
        return threshold.choose(self.engines[router], self.requests(examples), share, close=self.config.close).threshold

    def remember(self, router: str, share: float) -> None:
        """Tunes the engine to how requests have just moved."""
        self.engines[router].tune(self.config.rows)
        self.schedules[router, share] = self.engines[router].schedule


class _Questions:
    """Routing of whole questions, by a classifier of the small model's state at the prompt's end.

    Attributes:
      alone: how the small and the large model answer the questions of a split.
      scores: of the classifier, for those questions.
    """

    def __init__(self, pair: _Pair, examples, alone: Mapping[str, list[Answers]], cfg: HeadConfig, how: HeadTraining):
        small, train = pair.models[0], examples["train"]
        sizes = dict(top_k=1, rows=pair.config.rows, length=pair.config.length)
        label = lambda split, own: labels.label_questions(small, examples[split], own.right, **sizes)
        embedding, seen = small.params["embed"]["weight"], label("train", pair.ask(RANDOM, train, share=0.0))
        # there are as many labels as questions, so that the batches are small
        head = heads.train(cfg, embedding, seen, seen.divergent, dataclasses.replace(how, rows=32))
        score = lambda split: heads.scored(cfg, head.params, embedding, label(split, alone[split][0]))
        self.alone, self.scores = alone, {split: score(split) for split in alone}

    def calibrate(self, share: float) -> float:
        """The score from which on validation questions go to the large model, so that it writes nearly this share."""
        small, large = self.alone["validation"]
        return question_threshold(self.scores["validation"], small.tokens, large.tokens, share)

    def ask(self, value: float) -> Answers:
        """The test questions."""
        small, large = self.alone["test"]
        return large.where(self.scores["test"] >= value, small)


def question_threshold(
    scores: Float[np.ndarray, "n"], small: Int[np.ndarray, "n"], large: Int[np.ndarray, "n"], share: float
) -> float:
    """The threshold with the share of tokens nearest to `share`, if questions at or above it go to the large model.

    Args:
      small, large: tokens that either model writes for each question.
    """
    values = np.append(np.unique(scores), np.inf)
    goes = scores[:, None] >= values
    written = np.where(goes, large[:, None], 0).sum(0)
    shares = written / (written + np.where(goes, 0, small[:, None]).sum(0))
    return float(values[np.argmin(np.abs(shares - share))])


def _at(pair: _Pair, whole: _Questions, examples, share: float) -> list[dict[str, Any]]:
    """All routers at one share; random routing at that which R2R has realised, so that both are asked for the same."""
    answers, knobs = {}, {}
    for router in (TRAINED, ENTROPY):
        knobs[router] = dict(threshold=pair.calibrate(router, examples["validation"], share))
        answers[router] = pair.ask(router, examples["test"], **knobs[router])
        pair.remember(router, share)
    knobs[RANDOM] = dict(share=answers[TRAINED].share)
    answers[RANDOM] = pair.ask(RANDOM, examples["test"], **knobs[RANDOM])
    pair.remember(RANDOM, share)
    knobs[QUESTION] = dict(threshold=whole.calibrate(share))
    answers[QUESTION] = whole.ask(knobs[QUESTION]["threshold"])
    rows = []
    for router, own in answers.items():
        gap = bootstrap.paired(own.right, answers[RANDOM].right)
        over = dict(mean=gap.mean, low=gap.low, high=gap.high)
        rows.append(dict(router=router, share=share, knobs=knobs[router], over_random=over, **_values(own)))
    return rows


def _values(answers: Answers) -> dict[str, Any]:
    right = answers.right.astype(int).tolist()
    return dict(realised=answers.share, accuracy=answers.accuracy.values, right=right)


def _label_values(found: Labels) -> dict[str, int]:
    names = {"identical": labels.IDENTICAL, "neutral": labels.NEUTRAL, "divergent": labels.DIVERGENT}
    counts = {name: int(np.sum(found.kind == kind)) for name, kind in names.items()}
    return dict(questions=len(np.unique(found.question)), **counts)


def _head_values(head: Trained) -> dict[str, Any]:
    size = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    return dict(parameters=size, epochs=len(head.losses), loss=min(head.losses), recall=head.recall, rate=head.rate)


def _add_speeds(pair: _Pair, values: dict[str, Any], examples: Sequence[Example], lengths) -> None:
    """Measures tokens per second on the questions with the longest answers, each cut where the shortest of them ends.

    So all write equally many tokens, and none writes on after an answer's end, where routers see nothing they know.
    """
    longest = np.argsort(-lengths, kind="stable")[: pair.config.rows]
    asked, new = [examples[i] for i in longest], int(lengths[longest].min())
    alike = lambda request: dataclasses.replace(request, stops=(), max_new_tokens=new)
    size = pair.config.length
    # a page as long as a request is never full, and only full pages are kept for the next request that begins alike
    sizes = EngineConfig(
        max_rows=pair.config.rows, max_length=size, page_size=size, prefill_chunk=16 * pair.config.rows, block=new
    )
    measured: dict[str, dict[str, Any]] = {}
    for (name, row), model in zip(values["ends"].items(), pair.models, strict=True):
        engine = Engine(model.cfg, model.params, sizes)
        measured[name] = dict(row=row, call=functools.partial(engine.run, [alike(r) for r in pair.requests(asked)]))
    for row in values["rows"]:
        if row["router"] != QUESTION:
            call = functools.partial(_routed, pair, row, [alike(r) for r in pair.requests(asked, **row["knobs"])])
            measured[f"{row['router']} {row['share']}"] = dict(row=row, call=call)
    times = benchmarking.interleave(
        {name: _quiet(each["call"]) for name, each in measured.items()}, pair.config.repeats
    )
    for name, each in measured.items():
        each["row"]["tokens_per_s"] = len(asked) * new / times[name].min
    slow, quick = (values["ends"][name]["tokens_per_s"] for name in ("large", "small"))
    for row in values["rows"]:
        if row["router"] == QUESTION:
            row["tokens_per_s"] = 1 / (row["realised"] / slow + (1 - row["realised"]) / quick)
    values["speed"] = dict(requests=len(asked), tokens=new)


def _routed(pair: _Pair, row: dict[str, Any], requests: Sequence[Request]) -> list[Event]:
    engine = pair.engines[row["router"]]
    engine.schedule = pair.schedules[row["router"], row["share"]]
    events = engine.run(requests)
    row["share_timed"] = float(np.mean(np.concatenate([event.writers for event in events]) == LARGE))
    return events


def _quiet(call):
    def timed() -> None:
        call()

    return timed
