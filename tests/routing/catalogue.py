"""Every program, with parameters and hooks' inputs of a vocabulary of 12 and a width of 4."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.program import Mode, Program, Signals, TopK
from molora_jax.routing.programs import (
    bernoulli,
    bild,
    citer,
    co_llm,
    contrastive,
    critical_tokens,
    deferral,
    glimp_router,
    logit_ensemble,
    model_ensemble,
    proxy_tuning,
    r2r,
    r_stitch,
    relay,
    replay,
    rsd,
    session_cascade,
    single,
    spec_reason,
    speculative,
    speculative_cascade,
    speculative_thinking,
    token_adapters,
)

VOCAB, WIDTH = 12, 4
R2R = HeadConfig(kind="r2r", hidden=WIDTH, width=5, top_k=3, blocks=1)
MLP = HeadConfig(kind="mlp", hidden=WIDTH, width=5)
GATE = HeadConfig(kind="linear", hidden=WIDTH)

PROGRAMS = [
    bernoulli.Bernoulli(),
    bild.BiLD(),
    citer.CITER(MLP),
    co_llm.CoLLM(GATE),
    contrastive.Contrastive(),
    critical_tokens.CriticalTokens(MLP),
    deferral.Deferral("entropy"),
    deferral.Deferral("max_prob"),
    deferral.Deferral("margin"),
    glimp_router.GlimpRouter((7, 8)),
    logit_ensemble.LogitEnsemble(models=3),
    logit_ensemble.LogitEnsemble(space="logit"),
    model_ensemble.ModelEnsemble(models=4),
    proxy_tuning.ProxyTuning(),
    r2r.R2R(R2R),
    r_stitch.RStitch(VOCAB),
    relay.Relay((9,), (8, 10)),
    replay.Replay(),
    rsd.RSD((1, 2), digits=(3, 4)),
    session_cascade.SessionCascade(),
    single.Single(2),
    spec_reason.SpecReason((1,), digits=(3, 4)),
    speculative.Speculative(),
    speculative_cascade.SpeculativeCascade(rule="opt"),
    speculative_cascade.SpeculativeCascade(rule="token"),
    speculative_thinking.SpeculativeThinking(),
    token_adapters.TokenAdapters("gate"),
    token_adapters.TokenAdapters("table"),
    token_adapters.TokenAdapters("control"),
]

KNOBS = {
    "Bernoulli": dict(share=0.5),
    "R2R": dict(threshold=0.465),
    "Deferral-entropy": dict(threshold=0.3),
    "Deferral-max_prob": dict(threshold=0.9999),
    "Deferral-margin": dict(threshold=0.9999),
    "GlimpRouter": dict(threshold=0.1),
    "SessionCascade": dict(threshold=-0.01),
    "SpecReason": dict(threshold=3.5),
    "RSD": dict(threshold=0.5),
}
"""With which these programs move between models of random weights."""


def name(program: Program) -> str:
    kind = [getattr(program, field) for field in ("by", "space", "rule") if hasattr(program, field)]
    return "-".join([type(program).__name__, *kind])


@functools.cache
def params(program: Program):
    """Parameters of any program: each takes what it knows."""
    rng = np.random.default_rng(0)
    floats = lambda *shape: rng.normal(0, 1, shape).astype(np.float32)
    given = dict(
        embedding=floats(VOCAB, WIDTH),
        weight=floats(3, WIDTH),
        bias=floats(3),
        table=rng.integers(-2, 3, VOCAB).astype(np.int32),
        trace=rng.integers(0, 2, 9).astype(np.int32),
        digits=rng.integers(-1, 3, VOCAB).astype(np.int32),
        delimiter=rng.random(VOCAB) < 0.4,
        cue=rng.integers(0, 4, VOCAB).astype(np.int32),
    )
    return given | (dict(head=heads.init(program.head)) if hasattr(program, "head") else {})


def signals(program: Program, rows: int, rng) -> Signals:
    """Random values of what the program declares, one row for each request."""
    ints = lambda high: rng.integers(0, high, rows).astype(np.int32)
    floats = lambda *shape: rng.normal(0, 1, (rows, *shape)).astype(np.float32)
    modes = rng.choice(sorted(program.modes), rows).astype(np.int32)
    values = dict(
        token=ints(VOCAB),
        position=ints(12),
        since_handoff=ints(5),
        mode=modes,
        stop=rng.random(rows) < 0.3,
        pattern_hits=rng.random((rows, len(program.patterns))) < 0.4,
        top_k=TopK(-np.sort(-floats(program.top_k)), np.zeros((rows, program.top_k), np.int32)),
        hidden=floats(WIDTH),
        span_logprobs=-np.abs(floats(program.draft)),
        accepted=ints(3) if Mode.VERIFY in program.modes else None,
        **{key: np.abs(floats()) for key in ("entropy", "max_prob", "margin", "score")},
        logprob=-np.abs(floats()),
    )
    return jax.tree.map(jnp.asarray, Signals(**{key: values[key] for key in program.signals}))
