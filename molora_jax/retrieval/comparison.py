"""Routers against what they must beat, on the same questions: recall, whole evidence, intervals and cost."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
import tqdm

from molora_jax.config import UserError
from molora_jax.data.multihop.load import BABI, NORMALISED, load
from molora_jax.data.multihop.question import Question
from molora_jax.evaluation import bootstrap
from molora_jax.retrieval import baselines, metrics, slates, training
from molora_jax.retrieval.chain import Chain
from molora_jax.retrieval.channels import DENSE, LEXICAL
from molora_jax.retrieval.encode import Encoder, Encoding, Job
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.sentence import SentenceEncoder
from molora_jax.retrieval.slates import Beside, Slate
from molora_jax.retrieval.training import Trained, TrainingConfig

SETS = {"musique": "musique", "hotpotqa": "hotpotqa", "wiki2": "2wikimultihopqa"}
"""Short name to file name of the normalised sets."""
KS = (2, 4, 5, 8, 12)
POOLED = "pooled"
LONGEST = 20
"""Statements of a bAbI story that is used."""

Values = dict[str, np.ndarray]
"""`recall@k` and `all@k` of every question, means over seeds: [questions]."""


def questions(
    data_dir: str | pathlib.Path | None, split: str, names: Sequence[str] = tuple(SETS), *, most: int | None = None
) -> dict[str, list[Question]]:
    """The first questions of the split of each set, which lies in `multihop` of the data folder.

    Args:
      names: of the sets.
      most: of each; by default all.

    Raises:
      UserError: no data folder, or an unknown set.
    """
    if unknown := sorted(set(names) - set(SETS)):
        raise UserError(f"sets: got {unknown[0]!r}, expected some of {', '.join(SETS)}")
    if data_dir is None:
        raise UserError("data_dir: got none, expected the folder with `multihop`; or set MOLORA_DATA_DIR")
    folder = pathlib.Path(data_dir).expanduser() / "multihop"
    return {name: load(NORMALISED, folder / f"{SETS[name]}.jsonl", split=split)[:most] for name in names}


def further(files: Sequence[str], learnt: Iterable[str]) -> dict[str, list[Question]]:
    """The questions of other files in the normalised form, by the files' names.

    Args:
      learnt: what routers are trained on, and is left out.

    Raises:
      UserError: two files of one name, or one with the name of a set.
    """
    found: dict[str, list[Question]] = {}
    known = set(learnt)
    for file in files:
        name = pathlib.Path(file).stem
        if name in (*SETS, *found, POOLED):
            raise UserError(f"eval_file: got {name!r} twice, or as the name of a set, expected another: rename {file}")
        whole = load(NORMALISED, file)
        found[name] = [question for question in whole if question.question not in known]
        print(f"{name}: {len(found[name])} of {len(whole)} questions; the others are trained on", flush=True)
    return found


def babi(data_dir: str | pathlib.Path, split: str, count: int) -> list[Question]:
    """The first questions of bAbI's tasks 1 to 3 in turn, of stories of at most `LONGEST` statements."""
    folder = pathlib.Path(data_dir).expanduser() / "other"
    files = [file for task in (1, 2, 3) for file in sorted(folder.glob(f"babi_en_qa{task}_*_{split}.txt"))]
    if len(files) != 3:
        raise UserError(f"babi: got {len(files)} files in {folder}, expected babi_en_qa[1-3]_*_{split}.txt")
    tasks = ([q for q in load(BABI, file, split=split) if len(q.segments) <= LONGEST] for file in files)
    mixed = [question for turn in itertools.zip_longest(*tasks) for question in turn if question is not None]
    return mixed[:count]


POOLINGS = ("mean", "last", "again_mean", "again_last", "attention")
"""Of a segment's tokens; of those of the question behind it (`EncoderConfig.again`); by attention, which is trained."""


def apart(encoding: Encoding) -> tuple[np.ndarray, ...]:
    """The tokens of each segment, for a router that pools them itself: [T D] each."""
    return tuple(np.split(encoding.tokens, np.cumsum(encoding.lengths)[:-1]))


class Inputs:
    """The slates of questions, each computed once.

    Args:
      pooling: of `POOLINGS`; by attention the encoder keeps the tokens, of its deepest depth.
      depth: of those that the encoder has; by default all, side by side.

    Attributes:
      width: D of the encodings.

    Raises:
      UserError: a pooling or a depth of which the encoder has nothing.
    """

    def __init__(self, encoder: Encoder, beside: Beside, pooling: str = "mean", *, depth: int | None = None):
        known = (*encoder.config.pools, *["attention"] * encoder.config.tokens)
        if pooling not in known:
            raise UserError(f"pooling: got {pooling!r}, expected one that the encoder has: {', '.join(known)}")
        if depth is not None and depth not in encoder.config.depths:
            raise UserError(f"depth: got {depth}, expected one that the encoder has: {encoder.config.depths}")
        self.encoder, self.beside, self.pooling, self.depth = encoder, beside, pooling, depth
        one = pooling == "attention" or depth is not None
        self.width = encoder.width * (1 if one else len(encoder.config.depths))
        self._found: dict[Question, tuple[Slate, Encoding]] = {}

    def pool(self, encoding: Encoding) -> np.ndarray | tuple[np.ndarray, ...]:
        """What a router reads of an encoding: [G K·D], or each segment's tokens."""
        if self.pooling == "attention":
            return apart(encoding)
        config = self.encoder.config
        own = encoding.pooled[:, :, config.pools.index(self.pooling)].astype(np.float32)
        return own.reshape(len(own), -1) if self.depth is None else own[:, config.depths.index(self.depth)]

    def slates(self, questions: Sequence[Question], *, bare: bool = False) -> list[Slate]:
        """The questions' slates; `bare` ones have no channels and no links, as the published router reads them."""
        new = [question for question in questions if question not in self._found]
        if new:
            encodings = slates.encodings(self.encoder, new, tqdm.tqdm)
            made = slates.slates(new, [self.pool(encoding) for encoding in encodings], self.beside)
            kept = [dataclasses.replace(encoding, pooled=encoding.pooled[:0], tokens=None) for encoding in encodings]
            self._found |= dict(zip(new, zip(made, kept, strict=True), strict=True))
        found = [self._found[question][0] for question in questions]
        return plain(found) if bare else found

    def cost(self, questions: Sequence[Question], *, bare: bool = False) -> float:
        """Encoder tokens × layers a question, those of the sentence encoder included unless `bare`."""
        self.slates(questions)
        own = float(np.mean([self._found[question][1].cost for question in questions]))
        return own if bare or self.beside.dense is None else own + dense_cost(self.beside.dense, questions)

    def lengths(self, question: Question) -> list[int]:
        """Tokens of each segment, as far as they are encoded."""
        return self._found[question][1].lengths.tolist()


def dense_cost(encoder: SentenceEncoder, questions: Sequence[Question]) -> float:
    """Tokens × layers a question of a sentence encoder, whose layers are narrower than a language model's."""
    texts = [text for job in slates.jobs(questions) for text in (job.question, *job.segments)]
    return encoder.layers * encoder.count(texts) / len(questions)


def plain(found: Iterable[Slate]) -> list[Slate]:
    """The slates without channels and links."""
    bare = lambda slate: dict(channels=slate.channels[..., :0], links=slate.links[..., :0])
    return [dataclasses.replace(slate, **bare(slate)) for slate in found]


def untrained(questions: Sequence[Question], beside: Beside, seeds: int) -> dict[str, list]:
    """Rankings of the baselines by name, a list of them for each seed (one where there is no chance in it).

    BM25, TF-IDF and the dense retriever are channels, which keep their order.
    """
    names = [*(LEXICAL if beside.lexical else ()), *(DENSE if beside.dense else ())]
    known = [channels for channels, _ in beside.of(questions)]
    column = lambda name: [baselines.ranking(own[:, names.index(name)]) for own in known]
    found = {name: [column(name)] for name in ("bm25", "tfidf", "dense") if name in names}
    found["random"] = [[baselines.ranking(baselines.chance(q, seed)) for q in questions] for seed in range(seeds)]
    found["oracle"] = [[baselines.ranking(baselines.oracle(q)) for q in questions]]
    return found


def given(file: str | pathlib.Path, questions: Mapping[str, Sequence[Question]]) -> dict[str, list[tuple[int, ...]]]:
    """Segments that somebody else picked, for the sets that the file has.

    Args:
      file: JSON, `{set: {question's id: [index of a segment, best first, …]}}`; not all need be named.

    Raises:
      UserError: no such file, none of the sets in it, or a question without a ranking of its segments.
    """
    try:
        known = json.loads(pathlib.Path(file).expanduser().read_text())
        found = {
            of: [_checked(known[of][q.id], len(q.segments)) for q in questions[of]] for of in questions if of in known
        }
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{file}: got {e!r}, expected JSON with a ranking for each question of a set") from None
    if not found:
        raise UserError(f"{file}: got none of the sets {', '.join(questions)}, expected some")
    return found


def _checked(named: Sequence[int], count: int) -> tuple[int, ...]:
    if len(set(named)) < len(named) or not set(named) <= set(range(count)):
        raise ValueError(f"the ranking {named} of {count} segments")
    return tuple(named)


def completed(named: Sequence[int], count: int) -> tuple[int, ...]:
    """A ranking of all segments: those that are named, and behind them the others in their own order."""
    return (*named, *(i for i in range(count) if i not in named))


def last_token(encoder: Encoder, questions: Sequence[Question]) -> tuple[list[tuple[int, ...]], float]:
    """(rankings, encoder tokens × layers a question) by the cosine of a frozen model's last tokens.

    Question and segments are read each alone, to the encoder's deepest layer.
    """
    jobs = [Job(None, [job.question, *job.segments]) for job in slates.jobs(questions)]
    found = [encoding for job in jobs for encoding in encoder.encode([job])]
    last = encoder.config.pools.index("last")
    score = lambda vectors: baselines.cosine(vectors[0], vectors[1:])
    rankings = [baselines.ranking(score(encoding.pooled[:, -1, last])) for encoding in found]
    return rankings, float(np.mean([encoding.cost for encoding in found]))


def blind(found: Iterable[Slate]) -> list[Slate]:
    """The slates with zeros for encodings."""
    return [dataclasses.replace(slate, encodings=jax.tree.map(np.zeros_like, slate.encodings)) for slate in found]


def fit(cfg: MaraConfig, found: Sequence[Slate], config: TrainingConfig, seeds: int) -> list[Trained]:
    """A router a seed."""
    return [training.train(cfg, found, dataclasses.replace(config, seed=seed)) for seed in range(seeds)]


def ranked(cfg: MaraConfig, fits: Sequence[Trained], found: Sequence[Slate], passes: int) -> list[list[Chain]]:
    """What each of them ranks."""
    return [training.chains(cfg, one.params, found, passes=passes) for one in fits]


def values(questions: Sequence[Question], rankings: Sequence[Sequence[Sequence[int]]]) -> Values:
    """Figures of every question: means over the seeds' rankings."""
    tables = [metrics.retrieval(questions, own, KS) for own in rankings]
    return {name: np.mean([table[name] for table in tables], axis=0) for name in tables[0]}


def merged(by_set: Mapping[str, Values]) -> dict[str, Values]:
    """The figures by set, and of the sets pooled, each question counting the same."""
    names = next(iter(by_set.values()))
    whole = {name: np.concatenate([own[name] for own in by_set.values()]) for name in names}
    return {**by_set, POOLED: whole}


def means(own: Values) -> dict[str, float]:
    """The figures of a table."""
    return {short(name): float(value.mean()) for name, value in own.items()}


def short(name: str) -> str:
    """`r2` for `recall@2`, `all4` for `all@4`."""
    return name.replace("recall@", "r").replace("all@", "all")


def gap(ours: Values, theirs: Values, figure: str) -> str:
    """Points by which we are better, with the interval of the paired bootstrap over questions."""
    found = bootstrap.paired(ours[figure], theirs[figure])
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
