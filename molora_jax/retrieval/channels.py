"""What a router may see beside frozen encodings: word overlap and sentence similarity, by segment and by pair.

An option, and no part of the published router. Channels are of one segment and its question. Links are of a pair: what
an anchor that was picked says about a candidate, so that a chain over encodings made once still reads its anchors.
Nothing is trained here, and nothing depends on the order of the segments.
"""

import collections
import math
import re
from collections.abc import Sequence

import numpy as np

from molora_jax.data.multihop.question import Question
from molora_jax.retrieval import baselines
from molora_jax.retrieval.baselines import words
from molora_jax.typing import Float

LEXICAL = ("bm25", "tfidf", "title_bm25", "coverage", "title_in_question", "question_title_share", "length")
LEXICAL_LINKS = ("title_in_anchor", "anchor_title_in", "tfidf", "coverage_of_rest")
DENSE, DENSE_LINKS = ("dense", "dense_lead"), ("dense",)


def lexical(question: Question) -> Float[np.ndarray, "G F"]:
    """`LEXICAL`, each segment against the question; scores without a scale are standardised over the candidates."""
    asked, texts, titles = words(question.question), baselines.documents(question), _titles(question)
    idf = _idf(texts)
    heads = [words(title) for title in titles]
    named = [_holds(asked, head) for head in heads]
    share = [len(set(head) & set(asked)) / max(len(set(head)), 1) for head in heads]
    scores = [baselines.bm25(question), baselines.tfidf(question), [_weight(set(h) & set(asked), idf) for h in heads]]
    lengths = [math.log1p(len(text)) for text in texts]
    columns = [*map(standard, scores), coverage(asked, texts, idf), named, share, standard(lengths)]
    return np.stack([np.asarray(column, np.float32) for column in columns], axis=1)


def lexical_links(question: Question) -> Float[np.ndarray, "A G C"]:
    """`LEXICAL_LINKS`, of each segment as an anchor (A = G) to each as a candidate.

    `title_in_anchor`: the anchor names the candidate, by its title; `anchor_title_in`: the other way round; `tfidf`:
    cosine of their words; `coverage_of_rest`: share of what the question asks and the anchor lacks, in the candidate.
    """
    asked, texts = words(question.question), baselines.documents(question)
    idf, heads = _idf(texts), [words(title) for title in _titles(question)]
    bodies = [words(segment.text) for segment in question.segments]
    names = np.array([[_holds(body, head) for head in heads] for body in bodies], np.float32)
    rest = [coverage([word for word in asked if word not in set(text)], texts, idf) for text in texts]
    links = np.stack([names, names.T, _cosines(texts, idf), np.array(rest)], axis=-1).astype(np.float32)
    links[np.arange(len(texts)), np.arange(len(texts))] = 0
    return links


def dense(query: Float[np.ndarray, "D"], segments: Float[np.ndarray, "G D"]) -> Float[np.ndarray, "G 2"]:
    """`DENSE` from unit vectors: the cosine standardised over the candidates, and how far below the best one it is."""
    cosines = segments @ query
    return np.stack([standard(cosines), 4 * (cosines - cosines.max())], axis=1).astype(np.float32)


def dense_links(segments: Float[np.ndarray, "G D"]) -> Float[np.ndarray, "A G 1"]:
    """`DENSE_LINKS` from unit vectors: cosines of all pairs, 0 of a segment with itself."""
    cosines = (segments @ segments.T).astype(np.float32)
    np.fill_diagonal(cosines, 0)
    return cosines[:, :, None]


def standard(scores: Sequence[float]) -> Float[np.ndarray, "G"]:
    """Less their mean, over their standard deviation; zeros where all are equal."""
    scores = np.asarray(scores, np.float64)
    spread = scores.std()
    return (scores - scores.mean()) / spread if spread > 1e-12 else np.zeros(len(scores))


def coverage(asked: Sequence[str], texts: Sequence[Sequence[str]], idf: dict[str, float]) -> Float[np.ndarray, "G"]:
    """Share of the words asked for that a text has, weighted by how rare they are; 0 where none is known."""
    known = {word for word in asked if word in idf}
    whole = _weight(known, idf)
    return np.array([_weight(known & set(text), idf) / whole if whole else 0.0 for text in texts])


def _titles(question: Question) -> list[str]:
    """Titles without what stands in brackets behind them."""
    return [re.sub(r"\s*\([^)]*\)\s*$", "", segment.title) for segment in question.segments]


def _holds(text: Sequence[str], part: Sequence[str]) -> bool:
    """Whether some words stand in a text, one after the other; no words stand nowhere."""
    part, size = list(part), len(part)
    return bool(size) and any(list(text[i : i + size]) == part for i in range(len(text) - size + 1))


def _idf(texts: Sequence[Sequence[str]]) -> dict[str, float]:
    """ln(1 + (G - df + ½) / (df + ½)), as in `baselines.bm25`."""
    df = collections.Counter(word for text in texts for word in set(text))
    return {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in df.items()}


def _weight(chosen: set[str], idf: dict[str, float]) -> float:
    return sum(idf.get(word, 0.0) for word in sorted(chosen))


def _cosines(texts: Sequence[Sequence[str]], idf: dict[str, float]) -> Float[np.ndarray, "G G"]:
    order = {word: i for i, word in enumerate(sorted(idf))}
    counts = np.zeros((len(texts), len(order)))
    for row, text in enumerate(texts):
        for word in text:
            counts[row, order[word]] += idf[word]
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    unit = np.divide(counts, lengths, out=np.zeros_like(counts), where=lengths > 0)
    return unit @ unit.T
