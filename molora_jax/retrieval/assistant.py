"""A trained router at work: from a folder of texts and a question to the evidence, with scores, and the answer."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.digest import base_digest
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question, Segment
from molora_jax.retrieval import answer, baselines, chain, mara, recipe, stop, training
from molora_jax.retrieval.chain import Chain
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.slates import Beside
from molora_jax.retrieval.stop import Stop
from molora_jax.typing import Params

ENDINGS = (".txt", ".md")
WINDOW = 100
"""Words of a segment at most: a router reads its first 128 tokens."""


def train(
    model: Model,
    how: EncoderConfig,
    kept: pathlib.Path,
    learn: Sequence[Question],
    folder: pathlib.Path,
    *,
    target: float,
    seed: int,
) -> "Assistant":
    """Trains a router with lexical channels, fits its stop on the slice that chose the checkpoint, and writes both.

    Args:
      kept: folder of the encodings' cache.
      learn: questions with their evidence.
      target: share of questions whose evidence is to be whole.

    Raises:
      UserError: a target outside (0, 1), a folder that cannot be written to, or too few questions.
    """
    if not 0 < target < 1:
        raise UserError(f"target: got {target}, expected a share between 0 and 1, such as 0.8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"router: got {e.strerror!r} making {folder}, expected a folder to write to") from None
    inputs = Inputs(Encoder(model.cfg, model.params, model.tokenizer, how, kept), Beside(cache=kept))
    cfg, config = recipe.router(inputs), dataclasses.replace(recipe.TRAINING, seed=seed)
    found = training.train(cfg, inputs.slates(learn), config)
    held = training.chains(cfg, found.params, found.held, passes=config.passes)
    halt = stop.fit(held, [np.flatnonzero(slate.gold).tolist() for slate in found.held], target=target)
    about = dict(base=base_digest(model.params), encoder=dataclasses.asdict(how), passes=config.passes)
    mara.save(folder, cfg, found.params, about | dict(stop=dataclasses.asdict(halt)))
    return Assistant(model, inputs, cfg, found.params, config.passes, halt)


@dataclasses.dataclass(frozen=True)
class Assistant:
    """A router with all it needs.

    Attributes:
      model: encodes, frozen, and reads the evidence.
      passes: of the chain.
      stop: how many segments are enough.
    """

    model: Model
    inputs: Inputs
    cfg: MaraConfig
    params: Params
    passes: int
    stop: Stop

    @classmethod
    def load(cls, folder: pathlib.Path, model: Model, kept: pathlib.Path) -> "Assistant":
        """Reads what `train` wrote.

        Raises:
          UserError: no router there, or one for another model.
        """
        cfg, params, about = mara.load(folder)
        try:
            fields = dict(about["encoder"])
            how = EncoderConfig(**fields | dict(depths=tuple(fields["depths"])))
            passes, halt, base = int(about["passes"]), Stop(**about["stop"]), about["base"]
        except (KeyError, TypeError) as e:
            raise UserError(
                f"{folder}: got a router without {e}, expected one that experiments.retrieve writes: train it anew"
            ) from None
        inputs = Inputs(Encoder(model.cfg, model.params, model.tokenizer, how, kept), Beside(cache=kept))
        if base != base_digest(model.params):
            raise UserError(f"{folder}: got a router for another base, expected the model that it was trained with")
        return cls(model, inputs, cfg, params, passes, halt)

    def rank(self, question: Question) -> Chain:
        """All segments, best first."""
        return training.chains(self.cfg, self.params, self.inputs.slates([question]), passes=self.passes)[0]

    def pick(self, question: Question, *, top: int | None = None) -> list[tuple[int, float]]:
        """(index, logit) of the first `top` segments, or of as many as the stop says."""
        found = self.rank(question)
        count = self.stop.count(found) if top is None else top
        return [(index, float(found.scores[index])) for index in found.ranking[:count]]

    def answer(
        self, question: Question, chosen: list[int], *, order: str, beams: int, reader: Adapter | None = None
    ) -> str:
        """What the model, with the reader's adapter if there is one, says after the chosen segments."""
        text = answer.prompt(question, chain.take(chosen, len(chosen), order))
        return answer.answers(self.model, [text], width=beams, reader=reader)[0].text


def about(docs: str | None, asked: str, candidates: int) -> Question:
    """A question over the paragraphs of a folder's texts, of which BM25 lets some through, in their order.

    Raises:
      UserError: no folder, or no text in it.
    """
    if docs is None or not pathlib.Path(docs).is_dir():
        raise UserError(f"docs: got {docs}, expected a folder of {' or '.join(ENDINGS)} files")
    found = []
    for file in sorted(pathlib.Path(docs).rglob("*")):
        if file.suffix.lower() in ENDINGS and file.is_file():
            found += _paragraphs(file)
    if not found:
        raise UserError(f"docs: got no text in {docs}, expected {' or '.join(ENDINGS)} files")
    whole = Question(id="", dataset="docs", split="", question=asked, answer="", hops=0, segments=tuple(found))
    best = sorted(baselines.ranking(baselines.bm25(whole))[:candidates])
    return dataclasses.replace(whole, segments=tuple(found[i] for i in best))


def _paragraphs(file: pathlib.Path) -> list[Segment]:
    """The paragraphs of a text, titled by its first line where that is a heading, else by the file's name."""
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: cannot be read ({e}), expected text in UTF-8") from None
    title, heading = file.stem.replace("_", " "), re.match(r"\s*#{1,6}[ \t]+(.+)", text)
    if heading:
        title, text = heading[1].strip(" #\t"), text[heading.end() :]
    blocks = [part for block in re.split(r"\n\s*\n", text) for part in _windows(block.split())]
    return [Segment(title=title, sentences=(block,), supporting=False) for block in blocks]


def _windows(words: list[str]) -> Iterator[str]:
    """A paragraph; one of more than `WINDOW` words in parts, which end with a sentence where they can."""
    while words:
        size = min(len(words), WINDOW)
        if size < len(words):
            ends = [i + 1 for i in range(size // 2, size) if words[i][-1] in ".!?"]
            size = ends[-1] if ends else size
        yield " ".join(words[:size])
        words = words[size:]
