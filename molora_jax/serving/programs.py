"""Routing programs from what a user types: by name, with the parameters that the models and their tokenizer give."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.checkpoints.model import Model
from molora_jax.checkpoints.resolve import part
from molora_jax.config import UserError
from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import KEEP, LARGE, NO_ADAPTER, SMALL, Program, knob_values
from molora_jax.routing.programs.bernoulli import Bernoulli
from molora_jax.routing.programs.bild import BiLD
from molora_jax.routing.programs.citer import CITER
from molora_jax.routing.programs.co_llm import CoLLM
from molora_jax.routing.programs.contrastive import Contrastive
from molora_jax.routing.programs.critical_tokens import CriticalTokens
from molora_jax.routing.programs.deferral import Deferral
from molora_jax.routing.programs.glimp_router import GlimpRouter
from molora_jax.routing.programs.logit_ensemble import LogitEnsemble
from molora_jax.routing.programs.model_ensemble import ModelEnsemble
from molora_jax.routing.programs.proxy_tuning import ProxyTuning
from molora_jax.routing.programs.r2r import R2R
from molora_jax.routing.programs.r_stitch import RStitch
from molora_jax.routing.programs.relay import Relay
from molora_jax.routing.programs.replay import Replay
from molora_jax.routing.programs.rsd import RSD
from molora_jax.routing.programs.session_cascade import SessionCascade
from molora_jax.routing.programs.single import Single
from molora_jax.routing.programs.spec_reason import SpecReason
from molora_jax.routing.programs.speculative import Speculative
from molora_jax.routing.programs.speculative_cascade import SpeculativeCascade
from molora_jax.routing.programs.speculative_thinking import AFFIRM, REFLECT, VERIFY, SpeculativeThinking
from molora_jax.routing.programs.token_adapters import TokenAdapters
from molora_jax.serving.fleet import one_tokenizer
from molora_jax.text import lexicon
from molora_jax.typing import Params

CUES = {
    **dict.fromkeys(("yes", "yeah", "right", "indeed", "confident"), AFFIRM),
    **dict.fromkeys(("wait", "but", "however", "alternatively", "hmm", "another", "hold", "actually"), REFLECT),
    **dict.fromkeys(("check", "verify", "recap", "confirm", "again"), VERIFY),
}
"""Words that may begin a step of thought, after the lists of Speculative Thinking (§3)."""

ANY_TOKENIZER = (
    *("bernoulli", "citer", "co-llm", "critical-tokens", "deferral-entropy", "deferral-margin", "deferral-max-prob"),
    *("model-ensemble", "r-stitch", "r2r", "single"),
)
"""Programs for models of any tokenizers: those that take back no more than one token."""

GRADE = "\n\nHow useful is the last step, from 0 (useless) to 9 (perfect)? The grade is \\boxed{"
REWARD = "\n\nIs the last step right (+) or wrong (-)? The verdict is \\boxed{"
SHARE = 0.2
"""Of the large model's tokens in a drawn trace."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may say beside a program's name; every program takes what it needs.

    Attributes:
      knobs: values by name, for all requests.
      head: folder of a trained head, or `testbed:r2r`; without one a head has random weights, drawn from `seed`.
      delimiter: the text that ends a step: the tokens that hold it do.
      score_prompt: what asks the scoring model about a step; by default `GRADE` or `REWARD`.
      trace: of Replay, the model of each token of prompt and answer; without one it is drawn from `seed`.
      slots: of TokenAdapters, the experts' slots in the bank, by name.
      rule: of TokenAdapters, the expert's name (None: the base) that token ids call for.
    """

    knobs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    head: str | None = None
    delimiter: str = "\n\n"
    score_prompt: str | None = None
    trace: Sequence[int] | None = None
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rule: Mapping[int, str | None] = dataclasses.field(default_factory=dict)
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class _Site:
    """Where a program is to run."""

    models: Sequence[Model]
    options: Options

    @property
    def tokenizer(self):
        return self.models[-1].tokenizer

    @property
    def vocab(self) -> int:
        """Token ids that all models know, padding of their tables included."""
        return min(model.cfg.vocab for model in self.models)

    @property
    def delimiter(self) -> np.ndarray:
        return lexicon.holding(self.tokenizer, self.vocab, self.options.delimiter)

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, special=False))

    def single(self, text: str) -> int:
        return lexicon.single(self.tokenizer, text)


@dataclasses.dataclass(frozen=True)
class Routing:
    """A program that is ready to run.

    Attributes:
      params: what it shares between requests.
      knobs: of every request, where they differ from the program's own.
    """

    program: Program
    params: Params = dataclasses.field(default_factory=dict)
    knobs: Mapping[str, float] = dataclasses.field(default_factory=dict)


def build(name: str, models: Sequence[Model], options: Options) -> Routing:
    """The program `name` for `models`, from the quickest to the slowest; what is drawn at random is told.

    Raises:
      UserError: no such program or knob, an option that the program has no use for, or a vocabulary that lacks a token
        which it needs.
    """
    if name not in PROGRAMS:
        raise UserError(f"program: got {name!r}, expected one of {', '.join(PROGRAMS)}")
    if name not in ANY_TOKENIZER and not one_tokenizer(models):
        raise UserError(
            f"program: got {name} for models of several tokenizers, expected one that looks at no tokens of one "
            f"vocabulary: {', '.join(ANY_TOKENIZER)}"
        )
    routing = PROGRAMS[name](_Site(models, options))
    program = routing.program
    takes = dict(
        head=hasattr(program, "head") or name == "token-adapters-gate",
        trace=isinstance(program, Replay),
        score_prompt=isinstance(program, SpecReason),
        slots=isinstance(program, TokenAdapters),
    )
    for option, useful in takes.items():
        if getattr(options, option) and not useful:
            flag = "adapters" if option == "slots" else option
            raise UserError(f"{flag}: got it for {name}, expected a program that has a use for it")
    knobs = {**routing.knobs, **options.knobs}
    knob_values(program, knobs)
    return Routing(program, jax.tree.map(jnp.asarray, routing.params), knobs)


def read_knobs(items: Sequence[str]) -> dict[str, float]:
    """Knobs from "name=value" each.

    Raises:
      UserError: something else, or one knob twice.
    """
    found: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = None
        if number is None or not name or name in found:
            raise UserError(f"knob: got {item!r}, expected name=number, and each name once")
        found[name] = number
    return found


def _plain(make: Callable[[], Program], site: _Site) -> Routing:
    return Routing(make())


def _counted(make: Callable[..., Program], site: _Site) -> Routing:
    """A program of as many models as there are."""
    return Routing(make(models=len(site.models)))


def _headed(make: Callable[[HeadConfig], Program], kind: str, site: _Site) -> Routing:
    cfg, params, knobs = _head(kind, site)
    return Routing(make(cfg), dict(head=params), knobs)


def _r2r(site: _Site) -> Routing:
    cfg, params, knobs = _head("r2r", site)
    embedding = site.models[SMALL].params["embed"]["weight"]
    return Routing(R2R(cfg), dict(head=params, embedding=embedding), knobs)


def _head(kind: str, site: _Site, outputs: int = 1) -> tuple[HeadConfig, Params, dict[str, float]]:
    """A head's architecture, its parameters, and the knob that it was trained for."""
    width, folder = site.models[SMALL].cfg.width, site.options.head
    if folder is None:
        sizes = dict(width=128, top_k=min(100, site.vocab), blocks=2) if kind == "r2r" else dict(width=128)
        cfg = HeadConfig(kind=kind, hidden=width, outputs=outputs, **sizes)
        _say(f"head: {kind}, RANDOM weights of seed {site.options.seed}, for none was given: --head=FOLDER")
        return cfg, heads.init(cfg, site.options.seed), {}
    cfg, params, threshold = heads.load(part(folder))
    wanted = dict(kind=kind, hidden=width, outputs=outputs)
    got = {name: getattr(cfg, name) for name in wanted}
    if got != wanted:
        show = lambda fields: ", ".join(f"{name} {value}" for name, value in fields.items())
        raise UserError(f"head: got {show(got)} in {folder}, expected {show(wanted)}")
    return cfg, params, dict(threshold=threshold)


def _glimp(site: _Site) -> Routing:
    return Routing(GlimpRouter(site.tokens("</think>")), dict(delimiter=site.delimiter))


def _relay(site: _Site) -> Routing:
    numbers = lexicon.numbers(site.tokenizer, site.vocab)
    return Routing(Relay(site.tokens("<call>"), site.tokens("</call>")), dict(digits=numbers))


def _replay(site: _Site) -> Routing:
    trace = site.options.trace
    if trace is None:
        _say(f"trace: DRAWN from seed {site.options.seed}, {SHARE:.0%} by the large model, for none was given: --trace")
        trace = np.random.default_rng(site.options.seed).random(4096) < SHARE
    elif set(trace) - {SMALL, LARGE}:
        raise UserError(f"trace: got the writers {sorted(set(trace))}, expected 0 and 1: a trace is of a pair")
    return Routing(Replay(), dict(trace=np.asarray(trace, np.int32)))


def _thinking(site: _Site) -> Routing:
    cue = lexicon.words(site.tokenizer, site.vocab, CUES)
    return Routing(SpeculativeThinking(), dict(delimiter=site.delimiter, cue=cue))


def _graded(make: type[SpecReason], question: str, answers: Sequence[str], site: _Site) -> Routing:
    asked = site.tokens(site.options.score_prompt or question)
    if not asked:
        raise UserError("score_prompt: got no tokens, expected a text that asks about the step before it")
    digits = tuple(site.single(answer) for answer in answers)
    return Routing(make(asked, digits=digits), dict(delimiter=site.delimiter))


def _adapters(by: str, site: _Site) -> Routing:
    slots, rule = site.options.slots, site.options.rule
    if not slots:
        raise UserError(f"token-adapters-{by}: got no experts, expected --adapters=name=folder,…")
    if bool(rule) != (by != "gate"):
        raise UserError(f"rule: got {len(rule)} tokens, expected --rule with tables and control tokens, and only there")
    if by == "gate":
        _, head, _ = _head("linear", site, outputs=len(slots))
        order = np.argsort(list(slots.values()))  # output e is of the e-th expert, row s of slot s
        return Routing(TokenAdapters(by), {name: leaf[order] for name, leaf in head["output"].items()})
    table = np.full(site.vocab, NO_ADAPTER if by == "table" else KEEP, np.int32)
    if rule and max(rule) >= site.vocab:
        raise UserError(f"rule: got token id {max(rule)}, expected one below {site.vocab}, which all models have")
    for token, name in rule.items():
        table[token] = NO_ADAPTER if name is None else slots[name]
    return Routing(TokenAdapters(by), dict(table=table))


PROGRAMS: dict[str, Callable[[_Site], Routing]] = {
    "bernoulli": functools.partial(_plain, Bernoulli),
    "bild": functools.partial(_plain, BiLD),
    "citer": functools.partial(_headed, CITER, "mlp"),
    "co-llm": functools.partial(_headed, CoLLM, "linear"),
    "contrastive": functools.partial(_plain, Contrastive),
    "critical-tokens": functools.partial(_headed, CriticalTokens, "mlp"),
    "deferral-entropy": functools.partial(_plain, lambda: Deferral("entropy")),
    "deferral-margin": functools.partial(_plain, lambda: Deferral("margin")),
    "deferral-max-prob": functools.partial(_plain, lambda: Deferral("max_prob")),
    "glimp-router": _glimp,
    "logit-ensemble-logit": functools.partial(_counted, lambda models: LogitEnsemble(models, "logit")),
    "logit-ensemble-probability": functools.partial(_counted, lambda models: LogitEnsemble(models)),
    "model-ensemble": functools.partial(_counted, ModelEnsemble),
    "proxy-tuning": functools.partial(_plain, ProxyTuning),
    "r-stitch": lambda site: Routing(RStitch(min(site.vocab, site.tokenizer.vocab))),
    "r2r": _r2r,
    "relay": _relay,
    "replay": _replay,
    "rsd": functools.partial(_graded, RSD, REWARD, ("+", "-")),
    "session-cascade": functools.partial(_counted, SessionCascade),
    "single": lambda site: Routing(Single(len(site.models) - 1)),
    "spec-reason": functools.partial(_graded, SpecReason, GRADE, "0123456789"),
    "speculative": functools.partial(_plain, Speculative),
    "speculative-cascade-chow": functools.partial(_plain, lambda: SpeculativeCascade(rule="chow")),
    "speculative-cascade-diff": functools.partial(_plain, lambda: SpeculativeCascade(rule="diff")),
    "speculative-cascade-opt": functools.partial(_plain, lambda: SpeculativeCascade(rule="opt")),
    "speculative-cascade-token": functools.partial(_plain, lambda: SpeculativeCascade(rule="token")),
    "speculative-thinking": _thinking,
    "token-adapters-control": functools.partial(_adapters, "control"),
    "token-adapters-gate": functools.partial(_adapters, "gate"),
    "token-adapters-table": functools.partial(_adapters, "table"),
}
"""What builds each program, by the name that a user types."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
