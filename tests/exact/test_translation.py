"""In float64 models of different tokenizers write the text that a loop gives which tokenizes it anew at each turn."""

import codecs
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.engine import translating
from molora_jax.engine.blueprint import Model
from molora_jax.engine.request import EngineConfig, Rendering, Request
from molora_jax.models import transformer
from molora_jax.nn.layout import dense
from molora_jax.routing.program import UNLIMITED
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.deferral import Deferral
from molora_jax.text.spelling import Interpreter
from molora_jax.text.tokenizer import Tokenizer
from tests.routing import routed
from tests.routing.naive_route import Sampler, _compiled
from tests.text import tiny

LENGTH, PAD = 96, 3
KINDS = {"byte_level": tiny.byte_level, "gemma": lambda: tiny.sentencepiece("gemma")}
END = {"byte_level": "<|im_end|>", "gemma": "</s>"}
PROMPTS = ["The quick fox", "naïve 日本 café", "zero"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("translation")
    own = {kind: dict(tokenizer_config=dict(eos_token=END[kind])) for kind in KINDS}
    return [Tokenizer.load(tiny.write(folder / kind, make(), **own[kind])) for kind, make in KINDS.items()]


@pytest.fixture(scope="module")
def models(tokenizers) -> list[Model]:
    """Random decoders, whose logits tell tokens apart; their vocabularies are padded."""
    found = []
    for i, tokenizer in enumerate(tokenizers):
        cfg = dataclasses.replace(routed.config(1 + i), vocab=tokenizer.vocab + PAD)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), transformer.init(cfg, i))
        params["head"]["weight"] *= 20
        found.append(Model(cfg, params))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _logits(cfg, params, tokens, length):
    layout = dense(1, LENGTH, valid=(jnp.arange(LENGTH) < length)[None])
    return transformer.logits(cfg, params, transformer.apply(cfg, params, tokens, layout).hidden[length - 1][None])[0]


class Naive:
    """One request, everything read anew; texts by the tokenizers' own decoding of bytes."""

    def __init__(self, program, models, tokenizers, request: Request):
        self.program, self.models, self.tokenizers, self.request = program, models, tokenizers, request
        self.tokens = [list(rendering.prompt) for rendering in request.renderings]
        self.kept = [len(tokens) for tokens in self.tokens]
        self.held = [0, 0]  # answer tokens behind the kept ones
        self.answer, self.marks = [], []
        self.sampler = Sampler(request.temperature, request.seed)

    def spell(self, writer: int, token: int) -> bytes | str:
        """Bytes, or the name of a special token."""
        tokenizer = self.tokenizers[writer]
        name = tokenizer.backend.id_to_token(token)
        if token in tokenizer.special:
            return name
        if writer == 1:
            return bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in printable]
        byte = {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(rest)}
        return bytes(byte[char] for char in name) if all(char in byte for char in name) else name.encode()

    def whole(self, answer) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for writer, token in answer:
            spelled = self.spell(writer, token)
            decoder.decode(b"", final=True) if isinstance(spelled, str) else decoder.decode(spelled)
        return not decoder.getstate()[0]

    def enter(self, model: int) -> None:
        """Model `model` reads the text from where it had read to, in its own tokens."""
        run, ids = b"", []
        plain = type(self.tokenizers[model].backend).from_str(self.tokenizers[model].backend.to_str())
        plain.encode_special_tokens = True
        for writer, token in [*self.answer[self.held[model] :], (None, None)]:
            spelled = None if writer is None else self.spell(writer, token)
            if isinstance(spelled, bytes):
                run += spelled
                continue
            ids += plain.encode(run.decode("utf-8", "replace"), add_special_tokens=False).ids
            run = b""
            own = self.tokenizers[model].backend.token_to_id(spelled) if spelled else None
            ids += [own] if own in self.tokenizers[model].special else []
        self.tokens[model] = self.tokens[model][: self.kept[model]] + ids
        self.first = len(self.answer), len(self.tokens[model])

    def leave(self, model: int, unread: int) -> None:
        """What it has read, up to a whole character, stays."""
        for count in range(len(self.answer) - unread, self.first[0] - 1, -1):
            if self.whole(self.answer[:count]):
                break
        self.held[model] = count
        self.kept[model] = self.first[1] + count - self.first[0]

    def generate(self) -> str:
        program, knobs = (
            self.program,
            {k: jnp.float32(v) for k, v in {**self.program.knobs, **self.request.knobs}.items()},
        )
        key = self.sampler.key(0, 0, 2)
        state, first = _compiled(program, "start")({}, knobs, program.init({}, knobs, key))
        model, home, left = int(first.next_model), int(first.next_model), UNLIMITED
        self.enter(model)
        while True:
            own = self.tokens[model]
            if len(own) >= LENGTH:
                return "length"
            padded = np.zeros(LENGTH, np.int32)
            padded[: len(own)] = own
            cfg = self.models[model].cfg
            logits = np.asarray(_logits(cfg, self.models[model].params, padded, len(own)))[: cfg.vocab - PAD]
            token = self.sampler.token(logits, len(own), model)
            sig = _compiled(program, "measure")(
                logits=logits, token=np.int32(token), position=np.int32(len(own)), recent=None, hidden=None
            )
            state, asked = _compiled(program, "step")({}, knobs, state, np.int32(model), sig)
            left = UNLIMITED if left == UNLIMITED else left - 1
            to, drop = int(asked.next_model), int(asked.drop)
            spent = to == model and left <= 0
            to = home if spent else to
            with_token = [*self.answer, (model, token)]
            if to != model and not self.whole(with_token[: len(with_token) - drop]):
                to, drop, spent = model, 0, False
            if not drop:
                self.answer, self.tokens[model] = with_token, [*own, token]
            ended = len(self.answer) >= self.request.max_new_tokens or len(self.tokens[model]) >= LENGTH
            if self.answer and not drop and token in self.request.renderings[model].stops:
                return "stop"
            if ended and not drop:
                return "length"
            if to != model:
                self.leave(model, unread=1 - drop)
                home, left = model, UNLIMITED if spent else max(int(asked.budget), 1)
                model = to
                self.enter(model)


def requests(tokenizers, count: int, knobs) -> list[Request]:
    asked = []
    for i in range(count):
        text = PROMPTS[i % len(PROMPTS)]
        own = [Rendering(tok.encode(text), tok.eos if i % 2 else ()) for tok in tokenizers]
        how = dict(
            temperature=0.0 if i == 1 else 1.0,
            seed=i,
            max_new_tokens=(LENGTH - max(len(each.prompt) for each in own), 25, 1)[i % 3],
        )
        asked.append(Request(prompt=(), renderings=tuple(own), knobs=knobs, **how))
    return asked


PROGRAMS = {
    "bernoulli": (Bernoulli(), dict(share=0.3)),
    "small": (Bernoulli(), dict(share=0.0)),
    "large": (Bernoulli(), dict(share=1.0)),
    "deferral": (Deferral("entropy"), dict(threshold=0.3, budget=3)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_is_that_of_a_loop_which_tokenizes_anew(name, models, tokenizers):
    program, knobs = PROGRAMS[name]
    interpreter = Interpreter(tokenizers)
    config = EngineConfig(max_rows=3, max_length=LENGTH, page_size=4, prefill_chunk=24, block=5)
    own = dict(
        interpreter=interpreter,
        vocabs=[tok.vocab for tok in tokenizers],
        transitions=[jnp.asarray(each.transitions) for each in interpreter.spellings],
    )
    asked = requests(tokenizers, 7, knobs)
    turns, waited, cut = 0, 0, 0
    with translating.in_threads(models, program, config=config, **own) as engine:
        engine.warm_up()
        for request, event in zip(asked, engine.run(asked), strict=True):
            naive = Naive(program, models, tokenizers, request)
            finished = naive.generate()
            assert list(zip(event.writers, event.tokens, strict=True)) == naive.answer
            assert event.finished == finished
            turns += np.count_nonzero(np.diff(event.writers))
            cut += finished == "length" and len(event.tokens) < request.max_new_tokens
            waited += sum(not naive.whole(naive.answer[:n]) for n in range(len(naive.answer)))
    assert waited > 2  # characters that several tokens spell
    assert name in ("small", "large") or (turns > 20 and cut > 0)
