"""Scores of answers and of evidence, by the rules of the official scripts of HotpotQA, 2WikiMultiHopQA and MuSiQue.

The three sets normalise answers alike and differ in the rest:

    set        golds              yes/no rule   two empty answers   titles      support of nothing, none found
    HotpotQA   the answer         yes           EM 1, F1 0          as given    EM 1, F1 0
    2Wiki      answer, aliases    yes           EM 1, F1 0          any case    EM 1, F1 0
    MuSiQue    answer, aliases    no            EM 1, F1 1          (indices)   EM 1, F1 1

Other sets are scored as MuSiQue, which is SQuAD's rule (Rajpurkar et al. 2016, §6.1).
"""

import collections
import dataclasses
import re
import string
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question

YES_NO_RULE = ("hotpotqa", "2wikimultihopqa")
"""Sets where a yes, no or noanswer that is not the other side's whole answer scores nothing."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
Triple = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Score:
    """Exact match, F1, precision and recall of one question, or their means; each in [0, 1].

    Only the recall of evidence can exceed 1, as in the official script: two predictions may name one triple.
    """

    em: float
    f1: float
    precision: float
    recall: float


ZERO = Score(0.0, 0.0, 0.0, 0.0)
"""What a missing prediction scores."""


def normalise(text: str) -> str:
    """Lower case, then no ASCII punctuation, then no articles, then single spaces: in that order."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def golds(question: Question) -> tuple[str, ...]:
    """The answers that the question's set takes as right; HotpotQA knows no aliases."""
    return (question.answer,) if question.dataset == "hotpotqa" else (question.answer, *question.aliases)


def answer(question: Question, prediction: str | None) -> Score:
    """The best EM, F1, precision and recall over the gold answers, each maximised on its own; None is `ZERO`."""
    if prediction is None:
        return ZERO
    yes_no = question.dataset in YES_NO_RULE
    scores = [_answer(normalise(prediction), normalise(gold), yes_no) for gold in golds(question)]
    return Score(*(max(column) for column in zip(*map(dataclasses.astuple, scores), strict=True)))


def _answer(prediction: str, gold: str, yes_no: bool) -> Score:
    same = float(prediction == gold)
    if yes_no and not same and {prediction, gold} & {"yes", "no", "noanswer"}:
        return ZERO
    got, want = prediction.split(), gold.split()
    if not yes_no and not (got and want):
        return Score(same, same, same, same)
    common = sum((collections.Counter(got) & collections.Counter(want)).values())
    return _score(same, common, common, len(got), len(want))


def _score(em: float, right: float, found: float, predicted: int, wanted: int) -> Score:
    """Precision right/predicted and recall found/wanted, 0 where there is nothing to divide by, and their F1."""
    precision, recall = right / predicted if predicted else 0.0, found / wanted if wanted else 0.0
    return Score(em, _f1(precision, recall), precision, recall)


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def sentences(question: Question, prediction: Iterable[tuple[str, int]] | None) -> Score:
    """Supporting (title, sentence) pairs of HotpotQA and 2WikiMultiHopQA against the question's; None is `ZERO`."""
    if prediction is None:
        return ZERO
    got, want = set(prediction), set(question.supporting_facts)
    if question.dataset == "2wikimultihopqa":  # lower-cased after the duplicates went, as officially: lists, not sets
        lower = lambda pairs: [(title.lower(), sentence) for title, sentence in pairs]
        got, want = lower(got), lower(want)
    right, missed = sum(pair in want for pair in got), sum(pair not in got for pair in want)
    return _score(float(right == len(got) and not missed), right, right, len(got), right + missed)


def paragraphs(question: Question, prediction: Iterable[int] | None) -> Score:
    """Indices of supporting segments against the question's, by MuSiQue's rule; None is `ZERO`."""
    if prediction is None:
        return ZERO
    got, want = set(prediction), set(question.supporting)
    if not got and not want:
        return Score(1.0, 1.0, 1.0, 1.0)
    right = len(got & want)
    return _score(float(got == want), right, right, len(got), len(want))


def evidence(golds: Sequence[Iterable[Triple]], prediction: Iterable[Triple] | None) -> Score:
    """Evidence triples of 2WikiMultiHopQA; None is `ZERO`.

    Args:
      golds: for each triple of the question its equivalents by the aliases of subject and object, itself included.
      prediction: triples; they are compared lower-cased, without punctuation, in single spaces; articles count.
    """
    if prediction is None:
        return ZERO
    clean = lambda triple: tuple(" ".join(text.lower().translate(_PUNCTUATION).split()) for text in triple)
    got, want = {clean(triple) for triple in prediction}, [{clean(t) for t in equivalents} for equivalents in golds]
    right = sum(any(triple in equivalents for equivalents in want) for triple in got)
    return _score(float(right == len(got) == len(want)), right, right, len(got), len(want))


def joint(*scores: Score) -> Score:
    """Products of EM, precision and recall, and the F1 of the latter two (Yang et al. 2018, §5.1).

    HotpotQA multiplies answer and sentences; 2WikiMultiHopQA also evidence.
    """
    product = lambda name: float(np.prod([getattr(score, name) for score in scores]))
    precision, recall = product("precision"), product("recall")
    return Score(product("em"), _f1(precision, recall), precision, recall)


def mean(scores: Sequence[Score]) -> Score:
    """Means over questions.

    Raises:
      UserError: no scores.
    """
    if not scores:
        raise UserError("metrics: got no scores to average, expected at least one question")
    return Score(*np.mean([dataclasses.astuple(score) for score in scores], axis=0).tolist())


def official(dataset: str, score: Score) -> Score:
    """A mean as the set's own script prints it: 2WikiMultiHopQA in hundredths to 2 places, MuSiQue to 3 places."""
    digits = {"2wikimultihopqa": lambda x: round(100 * x, 2), "musique": lambda x: round(x, 3)}.get(dataset, float)
    return Score(*map(digits, dataclasses.astuple(score)))


def recall_at(ranking: Sequence[int], gold: Iterable[int], k: int) -> float:
    """|gold among the first k| / |gold|.

    Raises:
      UserError: k below 1, no gold, or a candidate that is ranked twice.
    """
    want = set(gold)
    if k < 1 or not want:
        raise UserError(f"metrics: got k = {k} and {len(want)} supporting segments, expected at least one of each")
    if len(set(ranking)) != len(ranking):
        raise UserError("metrics: got a ranking with a candidate in it twice, expected each once")
    return len(want.intersection(ranking[:k])) / len(want)


def all_gold_at(ranking: Sequence[int], gold: Iterable[int], k: int) -> float:
    """1 where the first k hold all that the answer needs, else 0: what mean recall hides."""
    return float(recall_at(ranking, gold, k) == 1)


def retrieval(
    questions: Sequence[Question], rankings: Sequence[Sequence[int]], ks: Sequence[int]
) -> dict[str, np.ndarray]:
    """`recall@k` and `all@k` of every question: arrays [questions], whose means are the published figures."""
    if len(questions) != len(rankings):
        raise UserError(f"metrics: got {len(rankings)} rankings of {len(questions)} questions, expected one for each")
    pairs = [(ranking, question.supporting) for question, ranking in zip(questions, rankings, strict=True)]
    table = {}
    for k in ks:
        table[f"recall@{k}"] = np.array([recall_at(*pair, k) for pair in pairs])
        table[f"all@{k}"] = np.array([all_gold_at(*pair, k) for pair in pairs])
    return table


def by_hops(questions: Sequence[Question], values: np.ndarray) -> Mapping[int, tuple[float, int]]:
    """For each number of hops the mean of the values and the number of questions."""
    hops = np.array([question.hops for question in questions])
    return {int(h): (float(values[hops == h].mean()), int((hops == h).sum())) for h in np.unique(hops)}
