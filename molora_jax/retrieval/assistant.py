"""A trained router at work: from a folder of texts and a question to the evidence, with scores, and the answer."""

import dataclasses
import pathlib
import re

import numpy as np

from molora_jax.adapters.digest import base_digest
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question, Segment
from molora_jax.retrieval import answer, baselines, chain, comparison, mara, recipe, report, stop, training
from molora_jax.retrieval.chain import Chain
from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.encode import Encoder, EncoderConfig
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.slates import Beside
from molora_jax.retrieval.stop import Stop
from molora_jax.typing import Params

ENDINGS = (".txt", ".md")


def train(
    model: Model,
    how: EncoderConfig,
    kept: pathlib.Path,
    data_dir: str | None,
    folder: pathlib.Path,
    *,
    most: int | None = None,
    target: float,
    seed: int,
) -> str:
    """Trains a router with lexical channels, fits its stop on the slice that chose the checkpoint, writes both, and
    gives a table of what it finds on the dev questions.

    Raises:
      UserError: no data folder.
    """
    learn = [q for own in comparison.questions(data_dir, "train").values() for q in own[:most]]
    inputs = Inputs(Encoder(model.cfg, model.params, model.tokenizer, how, kept), Beside(cache=kept))
    cfg, config = recipe.router(inputs), dataclasses.replace(recipe.TRAINING, seed=seed)
    found = training.train(cfg, inputs.slates(learn), config)
    held = training.chains(cfg, found.params, found.held, passes=config.passes)
    halt = stop.fit(held, [np.flatnonzero(slate.gold).tolist() for slate in found.held], target=target)
    about = dict(base=base_digest(model.params), encoder=dataclasses.asdict(how), passes=config.passes)
    about |= dict(stop=dataclasses.asdict(halt))
    mara.save(folder, cfg, found.params, about)
    rows = []
    for name, own in comparison.questions(data_dir, "dev").items():
        chains = training.chains(cfg, found.params, inputs.slates(own), passes=config.passes)
        counts = [halt.count(one) for one in chains]
        whole = [set(q.supporting) <= set(c.ranking[:k]) for q, c, k in zip(own, chains, counts, strict=True)]
        figures = comparison.means(comparison.values(own, [[one.ranking for one in chains]]))
        rows.append(dict(set=name, n=len(own), **figures, taken=float(np.mean(counts)), whole=float(np.mean(whole))))
    return report.table(rows, list(rows[0]))


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

    def answer(self, question: Question, chosen: list[int], *, order: str, beams: int) -> str:
        """What the model says after the chosen segments."""
        text = answer.prompt(question, chain.take(chosen, len(chosen), order))
        return answer.answers(self.model, [text], width=beams)[0].text


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
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: cannot be read ({e}), expected text in UTF-8") from None
    title, heading = file.stem.replace("_", " "), re.match(r"\s*#{1,6}[ \t]+(.+)", text)
    if heading:
        title, text = heading[1].strip(" #\t"), text[heading.end() :]
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block.strip()]
    return [Segment(title=title, sentences=(block,), supporting=False) for block in blocks]
