"""Every program by its name: with parameters of a real tokenizer's kind, it runs, and reads the text as it should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.routing import heads, signals
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import Mode, check, knob_values
from molora_jax.serving import programs
from molora_jax.serving.programs import PROGRAMS, Options, build
from molora_jax.text.tokenizer import Tokenizer
from tests import fakes
from tests.routing import naive_route
from tests.text import tiny

WIDTH = 4
NEEDS = {"proxy-tuning": 3, "rsd": 3, "token-adapters-gate": 1, "token-adapters-table": 1, "token-adapters-control": 1}
"""Models of the programs that are not for a pair."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Model]:
    """Three whose tables are padded differently; only their vocabulary and width matter here."""
    tok = tiny.byte_level()
    tok.add_tokens(["\n\n", " Wait", "<call>", "</call>", "</think>"])
    tokenizer = Tokenizer.load(tiny.write(tmp_path_factory.mktemp("tokenizer"), tok))
    found = []
    for padding in (8, 3, 16):
        cfg = dataclasses.replace(fakes.config((0,)), vocab=tokenizer.vocab + padding, width=WIDTH)
        embedding = np.random.default_rng(padding).normal(0, 1, (cfg.vocab, WIDTH)).astype(np.float32)
        found.append(Model(cfg, {"embed": {"weight": embedding}}, tokenizer))
    return found


def options(name: str, **kw) -> Options:
    if name.startswith("token-adapters"):
        kw |= dict(slots={"a": 1, "b": 0})
        kw |= {} if name.endswith("gate") else dict(rule={7: "a", 9: None, 11: "b"})
    return Options(**kw)


def routed(routing, readers, prompt, *, new=24, stops=()) -> naive_route.Answer:
    given = dict(params=routing.params, knobs=routing.knobs, limit=len(prompt) + new, stops=stops)
    return naive_route.generate(routing.program, readers, prompt, **given)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_takes_the_parameters_that_it_is_given(name, models, capsys):
    own = models[: NEEDS.get(name, 2)]
    routing = build(name, own, options(name))
    program, params = routing.program, routing.params
    assert program.models == len(own)
    check(program)
    told = capsys.readouterr().err
    drawn = hasattr(program, "head") or name in ("token-adapters-gate", "replay")
    assert (told != "") == drawn
    assert all("seed 0" in line and "for none was given" in line for line in told.splitlines())

    def life(key, logits, hidden):
        knobs = knob_values(program, routing.knobs)
        state, first = program.start(params, knobs, program.init(params, knobs, key))
        whole = np.int32(3)
        known = dict(position=whole, since_handoff=whole, mode=whole, stop=whole > 2, score=logits[0], accepted=whole)
        known |= dict(hidden=hidden, span_logprobs=logits[: program.draft], token=whole)
        recent = np.zeros(signals.window(program.patterns), np.int32)
        sig = signals.measure(program, logits=logits, recent=recent, **known)
        if Mode.FUSE in program.modes:
            assert program.fuse(params, knobs, state, np.ones((len(own), vocab), np.float32)).shape == (vocab,)
        if Mode.SCORE in program.modes:
            assert program.read(params, knobs, state, logits).shape == ()
        after, decision = program.step(params, knobs, state, first.next_model, sig)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
        return decision

    vocab = min(model.cfg.vocab for model in own)
    floats = lambda n: jax.ShapeDtypeStruct((n,), np.float32)
    decision = jax.eval_shape(life, jax.random.key(0), floats(vocab), floats(WIDTH))
    assert {leaf.shape for leaf in jax.tree.leaves(decision)} == {()}


def test_programs_of_any_number_of_models_take_them_all(models):
    for name in ("model-ensemble", "logit-ensemble-logit", "session-cascade", "single"):
        assert build(name, models, Options()).program.models == 3


def script(models, text: str, prompt: int, *, elsewhere: str = "z", asked: int | None = None, reply: str = ""):
    """A model that writes `text` by position, then `elsewhere`; to a sequence longer than `asked` it replies."""
    encode = lambda text: models[0].tokenizer.encode(text, special=False)
    wanted, rest, vocab = encode(text), encode(elsewhere)[0], min(model.cfg.vocab for model in models)

    def read(tokens, adapters):
        logits = np.zeros((len(tokens), vocab), np.float32)
        for i in range(len(tokens)):
            at = i + 1 - prompt
            logits[i, wanted[at] if 0 <= at < len(wanted) else rest] = 9
        if reply and tuple(tokens[-len(asked) :]) == asked:
            logits[-1] = 0
            logits[-1, encode(reply)[0]] = 9
        return logits, np.zeros((len(tokens), WIDTH), np.float32)

    return read


def written(models, answer) -> list[str]:
    """The text of each writer's runs, in order, each led by its index."""
    decode = models[0].tokenizer.decode
    starts = [i for i, w in enumerate(answer.writers) if i == 0 or w != answer.writers[i - 1]]
    ends = [*starts[1:], len(answer.tokens)]
    return [f"{answer.writers[s]}{decode(answer.tokens[s:e])}" for s, e in zip(starts, ends, strict=True)]


def test_a_call_is_read_as_its_number(models):
    routing = build("relay", models[:2], Options())
    readers = [script(models, "a<call>12</call>", 1), script(models, "", 1, elsewhere="y")]
    answer = routed(routing, readers, [5], new=20)
    assert written(models, answer) == ["0a<call>12</call>", "1" + 12 * "y", "0" + 3 * "z"]


def test_the_answer_after_a_thought_is_the_large_models(models):
    routing = build("glimp-router", models[:2], Options(knobs={"threshold": 99.0}))
    readers = [script(models, "ab</think>", 1), script(models, "", 1, elsewhere="y")]
    assert written(models, routed(routing, readers, [5], new=6)) == ["0ab</think>", "1yyy"]


def test_a_step_that_begins_with_a_turn_is_the_large_models(models):
    routing = build("speculative-thinking", models[:2], Options())
    readers = [script(models, "a\n\nb Wait\n\n Wait", 1), script(models, "", 1, elsewhere="y")]
    answer = routed(routing, readers, [5], new=9)
    assert written(models, answer) == ["0a\n\nb Wait\n\n Wait", "1yyy"]  # inside a step the word is none


@pytest.mark.parametrize(("reply", "rewritten"), [("8", False), ("3", True)])
def test_a_grade_is_read_as_a_digit(reply, rewritten, models):
    routing = build("spec-reason", models[:2], Options())
    asked = routing.program.score_tokens
    assert models[0].tokenizer.decode(asked) == programs.GRADE
    small = script(models, "ab\n\nc", 1)
    large = script(models, "uv\n\n", 1, elsewhere="y", asked=asked, reply=reply)
    answer = routed(routing, [small, large], [5], new=4)  # the last token ends a step too
    assert written(models, answer) == (["1uv\n\ny"] if rewritten else ["0ab\n\nc"])


@pytest.mark.parametrize(("reply", "rewritten"), [("+", False), ("-", True)])
def test_a_reward_is_that_of_a_verdict(reply, rewritten, models):
    routing = build("rsd", models, Options(delimiter="z", score_prompt="so?"))
    asked = routing.program.score_tokens
    small, target = script(models, "abz", 1), script(models, "uvz", 1, elsewhere="y")
    judge = script(models, "", 1, asked=asked, reply=reply)
    answer = routed(routing, [small, target, judge], [5], new=3)
    assert written(models, answer) == (["1uvz"] if rewritten else ["0abz"])


def test_a_trace_is_replayed(models):
    trace = [0, 0, 0, 1, 0, 1]
    routing = build("replay", models[:2], Options(trace=trace))
    readers = [script(models, "", 2), script(models, "", 2, elsewhere="y")]
    assert written(models, routed(routing, readers, [5, 6], new=5)) == ["0z", "1y", "0z", "1y", "0z"]


def test_control_tokens_switch_to_the_slot_of_a_name(models):
    routing = build("token-adapters-control", models[:1], options("token-adapters-control"))
    given = iter([4, 7, 4, 9, 11])
    reader = lambda tokens, adapters: (
        np.eye(models[0].cfg.vocab)[[next(given)] * len(tokens)],
        np.zeros((len(tokens), WIDTH)),
    )
    assert routed(routing, [reader], [5], new=5).adapters == [-1, 1, 1, -1, 0]


def test_a_gates_outputs_are_its_experts(models, tmp_path):
    cfg = HeadConfig(kind="linear", hidden=WIDTH, outputs=2)
    params = heads.init(cfg)
    heads.save(tmp_path, cfg, params, 0.0)
    routing = build("token-adapters-gate", models[:1], options("token-adapters-gate", head=str(tmp_path)))
    own = np.asarray(params["output"]["weight"])
    np.testing.assert_array_equal(routing.params["weight"], own[[1, 0]])  # a is output 0 and lies in slot 1


def test_a_trained_head_brings_its_threshold(models, tmp_path, capsys):
    cfg = HeadConfig(kind="r2r", hidden=WIDTH, width=6, top_k=5, blocks=1)
    params = heads.init(cfg, 3)
    heads.save(tmp_path, cfg, params, 0.375)
    routing = build("r2r", models[:2], Options(head=str(tmp_path)))
    assert routing.knobs == {"threshold": 0.375}
    assert routing.program.top_k == 5
    assert capsys.readouterr().err == ""
    jax.tree.map(np.testing.assert_array_equal, routing.params["head"], params)
    given = Options(head=str(tmp_path), knobs={"threshold": 0.5})
    assert build("r2r", models[:2], given).knobs == {"threshold": 0.5}


BAD = {
    "a program": ("nope", {}, "program: got 'nope', expected one of bernoulli, bild, .*token-adapters-table"),
    "a knob": ("bild", dict(knobs={"x": 1.0}), "knob x: BiLD has no such knob, expected one of: fallback, rollback"),
    "a head for nothing": ("bild", dict(head="h"), "head: got it for bild, expected a program that has a use for it"),
    "a trace for nothing": ("bild", dict(trace=[0]), "trace: got it for bild"),
    "experts for nothing": ("bild", dict(slots={"a": 0}), "adapters: got it for bild"),
    "no experts": ("token-adapters-gate", {}, "token-adapters-gate: got no experts, expected --adapters=name=folder"),
    "no rule": ("token-adapters-table", dict(slots={"a": 0}), "rule: got 0 tokens, expected --rule with tables"),
    "a trace of three": ("replay", dict(trace=[0, 2]), r"trace: got the writers \[0, 2\], expected 0 and 1"),
    "no delimiter": ("glimp-router", dict(delimiter="nowhere"), "delimiter: got 'nowhere', expected a text that"),
    "no folder": ("citer", dict(head="/nowhere"), "/nowhere: got no head.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_built_is_one_line(case, models):
    name, given, message = BAD[case]
    with pytest.raises(UserError, match=message) as caught:
        build(name, models[:2], Options(**given))
    assert "\n" not in str(caught.value)


def test_a_head_of_another_kind_is_one_line(models, tmp_path):
    heads.save(tmp_path, cfg := HeadConfig(kind="linear", hidden=WIDTH + 1), heads.init(cfg), 0.5)
    wanted = "head: got kind linear, hidden 5, outputs 1 in .*, expected kind mlp, hidden 4, outputs 1"
    with pytest.raises(UserError, match=wanted):
        build("citer", models[:2], Options(head=str(tmp_path)))


def test_knobs_are_read_by_name():
    assert programs.read_knobs(["threshold=0.4", "budget=2"]) == {"threshold": 0.4, "budget": 2.0}
    for item in ("threshold", "=3", "threshold=high"):
        with pytest.raises(UserError, match=f"knob: got '{item}', expected name=number"):
            programs.read_knobs([item])
    with pytest.raises(UserError, match="each name once"):
        programs.read_knobs(["a=1", "a=2"])
