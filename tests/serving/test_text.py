"""Events become text whose parts are those of the tokens."""

import pytest

from molora_jax.engine.request import Event, Request
from molora_jax.serving.text import TextEngine
from molora_jax.text.tokenizer import Tokenizer
from tests.text import tiny


class Recorded:
    """An engine that gives recorded events."""

    def __init__(self, events):
        self.events, self.aborted, self.request = list(events), [], None

    def submit(self, request) -> int:
        self.request = request
        return 7

    def step(self):
        return [self.events.pop(0)]

    def abort(self, number) -> None:
        self.aborted.append(number)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load(tiny.write(folder, tiny.byte_level(), tokenizer_config=dict(eos_token="<|im_end|>")))


def pieces(tokenizer, *events, stop=()):
    engine = Recorded(events)
    texts = TextEngine(engine, tokenizer)
    texts.submit(Request(prompt=(1,)), stop)
    assert engine.request.stops == tokenizer.eos
    return engine, [texts.step()[0] for _ in events]


def test_parts_are_the_tokens_shares(tokenizer):
    ids = tokenizer.encode("dog ☃!", special=False)
    columns = dict(writers=[i % 2 for i in range(len(ids))], entropy=[0.5] * len(ids))
    _, (piece,) = pieces(tokenizer, Event(7, ids, None, "length", **columns))
    assert piece.text == "".join(piece.parts) == "dog ☃!"
    assert len(piece.parts) == len(ids)
    assert piece.writers == columns["writers"]
    assert piece.entropy == columns["entropy"]
    snowman = next(i for i, part in enumerate(piece.parts) if "☃" in part)
    assert snowman > 0
    assert piece.parts[snowman - 1] == ""  # the first bytes of a character show nothing


def test_what_one_step_tells_after_the_end_is_not_shown(tokenizer):
    """Models that run apart may tell of one request twice in a step."""
    ids = tokenizer.encode("fox", special=False)
    engine = Recorded([])
    texts = TextEngine(engine, tokenizer)
    texts.submit(Request(prompt=(1,)), ("ox",))
    engine.step = lambda: [Event(7, ids, None, None), Event(7, ids, None, "length")]
    (piece,) = texts.step()
    assert piece.text == "f"
    assert piece.finished == "stop"
    assert engine.aborted == [7]


def test_a_stop_token_shows_nothing(tokenizer):
    ids = [*tokenizer.encode("fox", special=False), tokenizer.eos[0]]
    _, (piece,) = pieces(tokenizer, Event(7, ids, None, "stop"))
    assert piece.text == "fox"
    assert piece.parts[-1] == ""
    assert len(piece.parts) == len(ids)


def test_bytes_that_end_no_character_belong_to_the_last_token(tokenizer):
    ids = tokenizer.encode("a☃", special=False)[:-1]
    _, (piece,) = pieces(tokenizer, Event(7, ids, None, "length"))
    assert piece.parts[-1] == piece.text[len("a") :] != ""


def test_a_stop_string_aborts_and_hides_itself(tokenizer):
    first, second = (tokenizer.encode(text, special=False) for text in ("dog f", "ox x"))
    engine, (one, two) = pieces(tokenizer, Event(7, first, None, None), Event(7, second, None, None), stop=("fox",))
    assert one.text + two.text == "dog "
    assert (one.finished, two.finished) == (None, "stop")
    assert engine.aborted == [7]
    assert len(two.parts) == len(second)
