"""Texts become tokens whose loss weights fall on what the model is to write."""

import jax
import numpy as np
import pytest

from molora_jax.config import UserError
from molora_jax.data.document import Document, Mapped, fitting, from_example, from_messages, from_pair, short
from molora_jax.data.example import Example
from molora_jax.data.packing import assemble
from molora_jax.data.rows import Report
from molora_jax.data.testbed.recipe import PRETRAINING, Stream
from molora_jax.data.testbed.vocabulary import tokenizer
from molora_jax.nn.layout import dense
from molora_jax.text.tokenizer import Tokenizer
from tests.text import tiny

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = dict(bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    return Tokenizer.load(tiny.write(folder, tiny.byte_level(), tokenizer_config=NAMES | dict(chat_template=CHATML)))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    names = dict(bos_token="<s>", eos_token="</s>")
    made = tiny.with_bos(tiny.sentencepiece("llama"), "<s>")
    return Tokenizer.load(tiny.write(tmp_path_factory.mktemp("sp"), made, tokenizer_config=names))


def trained(text: Tokenizer, document: Document) -> str:
    return text.decode(document.tokens[document.weights > 0], skip_special=False)


@pytest.mark.parametrize("prompt_weight", [0.0, 0.25])
def test_the_completion_and_its_end_are_trained(prompt_weight):
    text = tokenizer()
    for example in Stream(PRETRAINING, "train", 0, 20):
        document = from_example(text, example, prompt_weight=prompt_weight)
        assert document.id == example.id
        prompt = text.encode(example.prompt)
        assert document.tokens.tolist()[: len(prompt)] == prompt
        assert document.weights[0] == 0
        assert (document.weights[1 : len(prompt)] == prompt_weight).all()
        assert (document.weights[len(prompt) :] == 1).all()
        assert text.decode(document.tokens[len(prompt) :], skip_special=False) == example.completion + "<|eos|>"


def test_examples_that_have_room(capsys):
    text, examples = tokenizer(), [*Stream(PRETRAINING, "train", 0, 20)]
    sizes = sorted(len(from_example(text, example)) for example in examples)
    found = short(text, examples, sizes[9], "mine")
    assert f"mine: {len(found)} of 20 questions have at most {sizes[9]} tokens" in capsys.readouterr().out
    assert 10 <= len(found) < 20
    assert [e for e in examples if len(from_example(text, e)) <= sizes[9]] == found
    assert short(text, examples, sizes[0] - 1, "mine") == []


@pytest.mark.parametrize(
    ("prompt", "completion"), [("the quick ", "brown fox"), ("the qu", "ick"), ("", "dog"), ("fox", "")]
)
def test_the_prompt_keeps_the_tokens_it_has_alone(sentencepiece, byte_level, prompt, completion):
    for text in (sentencepiece, byte_level):
        document = from_pair(text, "x", prompt, completion)
        alone = [*text.prefix, *text.encode(prompt, special=False)]
        assert document.tokens.tolist()[: len(alone)] == alone
        assert document.tokens[-1] == text.eos[0]
        assert not document.weights[: len(alone)].any()
        assert document.weights[max(len(alone), 1) :].all()


def test_no_space_creeps_in_between_prompt_and_completion(sentencepiece):
    document = from_pair(sentencepiece, "x", "the quick brown", " fox")
    assert sentencepiece.decode(document.tokens) == "the quick brown fox"


def test_a_conversation_trains_on_what_the_assistant_says(byte_level):
    messages = [
        dict(role="system", content="Be brief."),
        dict(role="user", content="the dog"),
        dict(role="assistant", content="the fox"),
        dict(role="user", content="lazy"),
        dict(role="assistant", content="quick"),
        dict(role="user", content="unanswered"),
    ]
    document = from_messages(byte_level, "x", messages)
    assert trained(byte_level, document) == "the fox<|im_end|>quick<|im_end|>"
    whole = byte_level.decode(document.tokens, skip_special=False)
    assert whole.startswith("<|bos|><|im_start|>system\nBe brief.<|im_end|>\n")
    assert whole.endswith("<|im_start|>assistant\nquick<|im_end|>\n")
    weighted = from_messages(byte_level, "x", messages, prompt_weight=0.5)
    assert set(weighted.weights) == {0.0, 0.5, 1.0}
    assert ((weighted.weights == 1) == (document.weights == 1)).all()


def test_conversations_that_cannot_be_used(byte_level, sentencepiece, tmp_path):
    question = dict(role="user", content="the dog")
    with pytest.raises(UserError, match="no assistant message"):
        from_messages(byte_level, "x", [question])
    with pytest.raises(UserError, match="no assistant message"):
        from_messages(byte_level, "x", ["hello"])
    with pytest.raises(UserError, match="no chat template"):
        from_messages(sentencepiece, "x", [question, dict(role="assistant", content="fox")])
    last_only = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else '...' }}")
    folder = tiny.write(tmp_path, tiny.byte_level(), tokenizer_config=NAMES | dict(chat_template=last_only))
    turn = [question, dict(role="assistant", content="fox")]
    with pytest.raises(UserError, match="rewrites the turns before message"):
        from_messages(Tokenizer.load(folder), "x", turn + turn)


def test_a_tokenizer_without_an_end(tmp_path):
    text = Tokenizer.load(tiny.write(tmp_path, tiny.byte_level(), tokenizer_config={}))
    with pytest.raises(UserError, match="no end-of-text token"):
        from_pair(text, "x", "a", "b")


def test_long_documents_are_reported():
    text, report = tokenizer(), Report()
    examples = [
        Example(id=f"e{n}", task="x", prompt="1" * n, completion="2", answer="2", split="train") for n in (3, 5)
    ]
    documents = Mapped(examples, lambda example: from_example(text, example))
    assert [d.id for d in fitting(documents, 6, report)] == ["e3"]
    assert (report.used, str(report.skipped[0])) == (1, "e5: has 8 tokens, more than the 6 of a row")


def test_a_batch_is_a_pytree_whose_layout_counts_the_same_positions():
    documents = [Document(f"d{n}", np.arange(n, dtype=np.int32), np.ones(n, np.float32)) for n in (3, 1, 4)]
    batch = assemble([documents[:2], documents[2:], []], 6)
    layout = dense(3, 6, valid=batch.valid, segments=batch.segments)
    counted = np.where(batch.valid, np.asarray(layout.positions), 0)
    np.testing.assert_array_equal(counted, batch.positions)
    assert batch.segments.tolist() == [[1, 1, 1, 2, 0, 0], [1, 1, 1, 1, 0, 0], [0] * 6]
    assert batch.ids == (("d0", "d1"), ("d2",), ()) or batch.ids == (("d3", "d1"), ("d4",), ())
    leaves, structure = jax.tree.flatten(batch)
    assert len(leaves) == 5
    assert structure == jax.tree.structure(assemble([documents[2:], [], []], 6))
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: x * 2, b))(batch)
    np.testing.assert_array_equal(doubled.tokens, batch.tokens * 2)
    assert doubled.ids == ()
