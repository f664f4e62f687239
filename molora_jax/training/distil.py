"""Traces for the second stage: what each expert writes in its own domain, kept where it is whole and right."""

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from molora_jax import files
from molora_jax.config import UserError
from molora_jax.data.example import Example, Span
from molora_jax.data.tasks import registry
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import Event, Request
from molora_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilConfig:
    """How traces are drawn and which are kept (Molavi et al. 2026, released code).

    Attributes:
      samples: completions that are drawn for each question.
      cap: most of them that are kept, chosen at random.
      temperature: 0 is greedy; then one sample is all there is.
      max_new_tokens: a completion that is not finished by then is dropped.
      reasoning: whether a completion without any is dropped, as in the released code; experts that were only shown
        answers have none to show.
      seed: of the samples and of the choice.
    """

    samples: int = 1
    cap: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 512
    reasoning: bool = True
    seed: int = 0

    def __post_init__(self):
        if not 1 <= self.cap <= self.samples or self.temperature < 0 or self.max_new_tokens < 1:
            raise UserError(f"distil: got {self}, expected at least one sample, and to keep at most as many")
        if self.samples > 1 and not self.temperature:
            raise UserError(f"distil: got {self.samples} samples at temperature 0, expected one, for all are the same")


@dataclasses.dataclass
class Tally:
    """What became of the completions of one task.

    Attributes:
      drawn: how many there were.
      unfinished, unreasoned, wrong: dropped, for the first of these reasons that holds.
      surplus: dropped because their question had others.
      kept: traces.
    """

    drawn: int = 0
    unfinished: int = 0
    unreasoned: int = 0
    wrong: int = 0
    surplus: int = 0
    kept: int = 0

    def __str__(self) -> str:
        names = [field.name for field in dataclasses.fields(self)]
        return ", ".join(f"{getattr(self, name)} {name}" for name in names)


def traces(
    engine: Engine,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    owner: Mapping[str, str | None],
    config: DistilConfig,
) -> tuple[list[Example], dict[str, Tally]]:
    """The examples with the experts' own completions in place of the given ones, and the tally of each task.

    A completion is kept if it ended by itself, shows its reasoning (see `config`), and its answer is right.

    Args:
      engine: with the experts; its `max_length` holds the prompts and `max_new_tokens`.
      owner: name of each task's expert; None is the base.

    Raises:
      UserError: a task without an owner.
    """
    if missing := sorted({example.task for example in examples} - set(owner)):
        raise UserError(f"distil: got no expert of {missing[0]}, expected one for each task: {', '.join(owner)}")
    events = engine.run(_requests(engine, tokenizer, examples, owner, config))
    written = [tokenizer.decode(_without_end(event, tokenizer)) for event in events]
    drawn = [example for example in examples for _ in range(config.samples)]
    tallies = {task: Tally() for task in sorted({example.task for example in examples})}
    right = registry.verify(drawn, written)
    found: dict[str, list[Example]] = {}
    for example, event, text, correct in zip(drawn, events, written, right, strict=True):
        reason = _fault(example, event, text, correct, config)
        tally = tallies[example.task]
        tally.drawn += 1
        if reason:
            setattr(tally, reason, getattr(tally, reason) + 1)
        else:
            found.setdefault(example.id, []).append(dataclasses.replace(example, completion=text, spans=()))
    return _capped(found, tallies, config), tallies


def _requests(engine, tokenizer: Tokenizer, examples, owner, config: DistilConfig) -> list[Request]:
    requests, rng = [], random.Random(config.seed)
    for example in examples:
        prompt = tokenizer.encode(example.prompt)
        most = min(config.max_new_tokens, engine.config.max_length - len(prompt))
        how = dict(max_new_tokens=most, temperature=config.temperature, stops=tokenizer.eos)
        adapter = owner[example.task]
        requests += [
            Request(prompt=prompt, seed=rng.getrandbits(32), adapter=adapter, **how) for _ in range(config.samples)
        ]
    return requests


def _without_end(event: Event, tokenizer: Tokenizer) -> list[int]:
    """The tokens that are text: a trace gets its end-of-text token when it is trained on."""
    ended = event.finished == "stop" and event.tokens and event.tokens[-1] in tokenizer.eos
    return event.tokens[:-1] if ended else event.tokens


def _fault(example: Example, event: Event, text: str, correct: bool, config: DistilConfig) -> str | None:
    if event.finished != "stop":
        return "unfinished"
    if config.reasoning and not registry.judge(example).reasoned(text):
        return "unreasoned"
    return None if correct else "wrong"


def _capped(found: Mapping[str, list[Example]], tallies: Mapping[str, Tally], config: DistilConfig) -> list[Example]:
    """At most `cap` of each question, in the order of the questions; ids stay unique."""
    kept = []
    for id, group in found.items():
        chosen = random.Random(f"{config.seed}/{id}").sample(group, min(config.cap, len(group)))
        tallies[group[0].task].kept += len(chosen)
        tallies[group[0].task].surplus += len(group) - len(chosen)
        kept += [dataclasses.replace(trace, id=f"{id}#{i}") for i, trace in enumerate(chosen)]
    return kept


def save(path: Path | str, examples: Sequence[Example]) -> None:
    """Writes traces as JSON lines, which `experiments.train` also reads as a user's own data."""
    path = Path(path)
    lines = (json.dumps(dataclasses.asdict(example), ensure_ascii=False) for example in examples)
    try:
        files.write(path, "".join(f"{line}\n" for line in lines))
    except OSError as e:
        raise UserError(f"traces: got {e.strerror!r} writing to {path}, expected a folder with room") from None


def load(path: Path | str) -> list[Example]:
    """Reads traces that `save` wrote.

    Raises:
      UserError: no such file, or a line that is no trace.
    """
    path, found = Path(path), []
    if not path.is_file():
        raise UserError(f"traces: got {path}, expected a file that experiments.distil wrote")
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):  # JSON may hold other ends of lines
        if not line:
            continue
        try:
            row = json.loads(line)
            found.append(Example(**row | {"spans": tuple(Span(**span) for span in row.get("spans", ()))}))
        except (ValueError, TypeError, AttributeError):
            raise UserError(f"{path}:{number}: got no trace, expected a line that experiments.distil wrote") from None
    return found
