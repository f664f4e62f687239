"""One question of a task with the answer that a model should give."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """The domain that a stretch of an example's text belongs to.

    Attributes:
      start, stop: characters of `prompt + completion`.
      domain: its name.
    """

    start: int
    stop: int
    domain: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A question of any task, generated or read from a file.

    Attributes:
      id: unique in its data set; names the example in errors and reports.
      task: key of the task or domain that made it.
      prompt: what the model sees.
      completion: what the model is trained to write, reasoning included; the end-of-text token is not in it.
      answer: what the verifier expects.
      split: `train`, `validation` or `test`.
      level: difficulty, where the task knows one.
      spans: which stretch belongs to which domain; empty where there is only `task`.
    """

    id: str
    task: str
    prompt: str
    completion: str
    answer: str
    split: str
    level: int | None = None
    spans: tuple[Span, ...] = ()
