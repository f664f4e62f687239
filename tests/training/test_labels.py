"""Labels of routers against what two models of token pairs write, worked out by hand and by a loop over the pairs."""

import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.data.testbed.verifier import parse
from molora_jax.training import labels
from molora_jax.training.labels import DIVERGENT, IDENTICAL, NEUTRAL
from tests.numerics import assert_close
from tests.training import bigrams
from tests.training.bigrams import END, TOKENIZER, WIDTH, token

LARGE = {"a": " ->", " ->": "b", "b": "c", "c": "", "x": " ->", "d": "", "e": " ->", "f": "f", "g": "b"}
SMALL = {"a": "x", " ->": "d", "b": "c", "c": "d", "e": "", "f": "x", "x": " ->"}
EXAMPLES = [
    bigrams.example(0, "a", "bc"),
    bigrams.example(1, "g", "bc"),  # the large model writes "bc" without an arrow: wrong
    bigrams.example(2, "f", "bc"),  # it never ends
    bigrams.example(3, "e", "bc"),
]
LENGTH = 24


@pytest.fixture(scope="module")
def found():
    pair = bigrams.model(SMALL), bigrams.model(LARGE)
    return labels.label(*pair, EXAMPLES, top_k=3, rows=2, length=LENGTH)


def test_what_each_token_would_lead_to(found):
    want = [
        (0, "x", NEUTRAL),  # a x -> b c: one token more, the same answer
        (0, "d", DIVERGENT),  # a -> d
        (0, "c", IDENTICAL),
        (0, "d", DIVERGENT),  # a -> b c d
        (3, "", DIVERGENT),  # ends without an answer
        (3, "d", DIVERGENT),
        (3, "c", IDENTICAL),
        (3, "d", DIVERGENT),
    ]
    got = list(zip(found.question.tolist(), found.token.tolist(), found.kind.tolist(), strict=True))
    assert got == [(question, token(text), kind) for question, text, kind in want]
    assert found.divergent.tolist() == [kind == DIVERGENT for _, _, kind in want]


def test_features_are_those_that_the_token_was_written_from(found):
    params = bigrams.model(SMALL).params
    embed, head = (np.asarray(params[name]["weight"], np.float64) for name in ("embed", "head"))
    read = [token(text) for text in ("a", " ->", "b", "c", "e", " ->", "b", "c")]
    states = embed[read] / np.sqrt(np.mean(embed[read] ** 2, axis=1, keepdims=True) + 1e-6)
    assert_close(found.hidden, states, "model")
    assert_close(found.top_logits, np.sort(states @ head.T, axis=1)[:, ::-1][:, :3], "model")
    assert found.hidden.shape == (8, WIDTH)


def chain(table: dict[int, int], tokens: list[int]) -> list[int]:
    """All tokens up to the end or `LENGTH`."""
    tokens = list(tokens)
    while len(tokens) < LENGTH and tokens[-1] != END:
        tokens.append(table.get(tokens[-1], END))
    return tokens


def drawn(seed: int) -> tuple[dict[str, str], dict[str, str]]:
    """A large model that walks through a few letters, and a small one that often walks elsewhere."""
    rng, letters = np.random.default_rng(seed), list("abcdefghij")
    order = rng.permutation(letters).tolist()
    large = dict(zip(order, [*order[1:5], " ->", *order[6:], ""], strict=True)) | {" ->": order[6]}
    small = {first: str(rng.choice([second, *letters, ""])) for first, second in large.items()}
    return small, large


def test_labels_of_a_random_pair():
    small, large = drawn(9)
    own, other = bigrams.ids(small), bigrams.ids(large)
    text = lambda tokens, prompt: parse(TOKENIZER.decode(tokens[len(prompt) :]))
    examples, want = [], []
    for number, letter in enumerate("abcdefghij"):
        prompt = TOKENIZER.encode(letter)
        path = chain(other, prompt)
        answer = text(path, prompt)
        examples.append(bigrams.example(number, letter, answer or "z"))
        for at in range(len(prompt), len(path) if answer else 0):
            choice = own.get(path[at - 1], END)
            same = text(chain(other, [*path[:at], choice]), prompt) == answer
            kind = IDENTICAL if choice == path[at] else NEUTRAL if same else DIVERGENT
            want.append((number, choice, kind))
    got = labels.label(bigrams.model(small), bigrams.model(large), examples, top_k=1, rows=3, length=LENGTH)
    assert list(zip(got.question.tolist(), got.token.tolist(), got.kind.tolist(), strict=True)) == want
    assert {kind for _, _, kind in want} == {IDENTICAL, NEUTRAL, DIVERGENT}


def test_one_label_a_question():
    right = np.array([True, False, False, True])
    got = labels.label_questions(bigrams.model(SMALL), EXAMPLES, right, top_k=2, rows=3, length=LENGTH)
    assert got.token.tolist() == [token(SMALL.get(example.prompt, "")) for example in EXAMPLES]
    assert got.divergent.tolist() == [False, True, True, False]
    assert got.at(got.divergent).question.tolist() == [1, 2]


def test_a_large_model_that_answers_nothing_is_refused():
    pair = bigrams.model(SMALL), bigrams.model(LARGE)
    with pytest.raises(UserError, match="labels: got no right answer of the large model to 2 questions"):
        labels.label(*pair, EXAMPLES[1:3], top_k=1, rows=2, length=LENGTH)
