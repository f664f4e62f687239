"""Prompts, decoding and scores of answers."""

import pytest

from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.engine.request import Request
from molora_jax.retrieval import answer
from molora_jax.retrieval.answer import Answer
from tests import fakes, naive
from tests.retrieval.questions import Letters, question

CFG, PARAMS = fakes.model("llama_tied")
MODEL = Model(CFG, PARAMS, Letters())


def test_the_prompt_to_the_letter():
    got = answer.prompt(question(), [2, 0])
    assert got == "Context:\nT2: text 2\n\nT0: text 0\n\nQuery: Who?\n\nAnswer:"


def test_one_beam_is_greedy():
    texts = ["abc", "what is it", "z", "one more", "and a fifth"]
    found = answer.answers(MODEL, texts, width=1, max_new_tokens=5, cut=str)
    rows = [Letters().encode(text) for text in texts]
    written = [naive.generate(CFG, PARAMS, Request(prompt=ids, max_new_tokens=5, stops=Letters.eos))[0] for ids in rows]
    passes = [max(len(new) for new in part) - 1 for part in (written[:4], written[4:])]  # those asked together
    for i, (ids, new, got) in enumerate(zip(rows, written, found, strict=True)):
        assert got == Answer(Letters().decode(new), CFG.layers * len(ids), CFG.layers * passes[i // 4])


def test_an_answer_is_its_first_line():
    assert answer.first_line(" Paris, the capital\nQuery: next") == "Paris, the capital"
    assert answer.first_line("\n\n") == ""


def test_scores_by_the_rules_of_the_set():
    own = [question(answer="Paris", aliases=("the City of Light",)), question(answer="no", dataset="hotpotqa")]
    [first, second] = answer.scores(own, [Answer("City of light.", 1, 1), Answer("no way", 1, 1)])
    assert (first.em, first.f1) == (1, 1)
    assert (second.em, second.f1) == (0, 0)
    [half] = answer.evidence(own[:1], [(0, 1)])
    assert (half.em, half.f1) == (0, 0.5)


def test_what_a_prompt_holds():
    own, rankings = [question(support=(1, 3))], [(2, 3, 0, 1)]
    show = lambda mode, k: answer.contexts(mode, own, rankings, k)[0]
    assert show("all", 2) == (0, 1, 2, 3)
    assert show("gold", 1) == (1, 3)
    assert show("top", 3) == (2, 3, 0)
    assert show("oracle", 3) == (1, 3, 2)
    assert show("oracle", 1) == (1, 3)
    with pytest.raises(UserError, match="expected all"):
        show("some", 1)


def test_a_prompt_that_is_too_long_is_said():
    with pytest.raises(UserError, match="take fewer segments"):
        answer.answers(MODEL, ["a" * CFG.max_positions])
