"""What a trained router must beat: word overlap, frozen encodings, chance, and the bound that no ranking passes.

Each gives a question's segments [G] scores, higher for better evidence; `ranking` sorts them. Trained rivals, with a
Transformer, a GRU, an MLP or nothing in Mamba's place, are mixers of `mara.MaraConfig`.
"""

import collections
import logging
import math
import re
import zlib

import numpy as np

from molora_jax.config import UserError
from molora_jax.data.multihop.question import Question
from molora_jax.typing import Array, Float


def words(text: str) -> list[str]:
    r"""Runs of `\w` in lower case. Splitting on white space instead costs BM25 6 to 8 points of recall@4."""
    return re.findall(r"\w+", text.lower())


def documents(question: Question) -> list[list[str]]:
    """Words of title and text of each segment."""
    return [words(f"{segment.title}: {segment.text}") for segment in question.segments]


def ranking(scores: Float[np.ndarray, "G"]) -> tuple[int, ...]:
    """Indices by falling score; of equal scores the earlier segment comes first."""
    return tuple(int(i) for i in np.argsort(-np.asarray(scores), kind="stable"))


def bm25(question: Question, *, k1: float = 1.5, b: float = 0.75) -> Float[np.ndarray, "G"]:
    """BM25 over the question's own segments, by bm25s: Σ_w idf_w tf / (tf + k1 (1 - b + b |d| / mean |d|)).

    Over the words of the query with their repeats, idf_w = ln(1 + (G - df + ½) / (df + ½)) (Lucene's; Kamphuis et al.
    2020, table 1).

    Raises:
      UserError: bm25s is not installed.
    """
    try:
        import bm25s
    except ImportError:
        raise UserError("bm25: got no package bm25s, expected it; pip install 'molora_jax[retrieval]'") from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells of every index
    texts, query = documents(question), words(question.question)
    known = set().union(*texts)
    if not known.intersection(query):
        return np.zeros(len(texts))
    index = bm25s.BM25(k1=k1, b=b, method="lucene", dtype="float64")
    index.index(texts, show_progress=False)
    return np.asarray(index.get_scores([word for word in query if word in known]), np.float64)


def tfidf(question: Question) -> Float[np.ndarray, "G"]:
    """Cosine of the query with each segment under tf · (ln((1 + G) / (1 + df)) + 1), over the question's own segments.

    Smoothed inverse document frequency (Salton & Buckley 1988, §2.2); words in no segment do not count.
    """
    bags = [collections.Counter(text) for text in documents(question)]
    frequency = collections.Counter(word for bag in bags for word in bag)
    idf = {word: math.log((1 + len(bags)) / (1 + df)) + 1 for word, df in frequency.items()}
    weigh = lambda bag: {word: tf * idf[word] for word, tf in bag.items() if word in idf}
    query = weigh(collections.Counter(words(question.question)))
    length = lambda vector: math.sqrt(sum(value**2 for value in vector.values()))
    scores = np.zeros(len(bags))
    for i, vector in enumerate(map(weigh, bags)):
        dot = sum(value * vector.get(word, 0.0) for word, value in query.items())
        scores[i] = dot / (length(query) * length(vector)) if dot else 0.0
    return scores


def cosine(query: Float[Array, "D"], segments: Float[Array, "G D"]) -> Float[np.ndarray, "G"]:
    """Cosine of encodings, such as the last token's of a frozen model; 0 for a vector of zeros."""
    query, segments = np.asarray(query).astype(np.float64), np.asarray(segments).astype(np.float64)
    lengths = np.linalg.norm(query) * np.linalg.norm(segments, axis=1)
    return np.divide(segments @ query, lengths, out=np.zeros(len(segments)), where=lengths > 0)


def chance(question: Question, seed: int) -> Float[np.ndarray, "G"]:
    """Uniform scores that depend on the seed and the question's id, not on which questions came before."""
    return np.random.default_rng([seed, zlib.crc32(question.id.encode())]).random(len(question.segments))


def oracle(question: Question) -> Float[np.ndarray, "G"]:
    """1 for evidence, else 0."""
    return np.array([float(segment.supporting) for segment in question.segments])
