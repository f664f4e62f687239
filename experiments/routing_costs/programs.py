"""Published programs on one pair, at about the same share of the large model."""

from collections.abc import Sequence

from experiments.routing_costs import policies
from experiments.routing_costs.pair import PROMPT, prompts
from molora_jax import benchmarking
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.routed import Model, RoutedEngine
from molora_jax.routing import heads
from molora_jax.routing.heads import HeadConfig
from molora_jax.routing.programs.model_ensemble import ModelEnsemble
from molora_jax.routing.programs.r2r import R2R
from molora_jax.routing.programs.r_stitch import RStitch


def published(
    bench: benchmarking.Bench, models: Sequence[Model], rows: int, new: int, shares: Sequence[float], repeats: int
) -> None:
    """R2R with a random head, R-Stitch, and an ensemble by weights, each eager and delayed, at some shares."""
    vocab = min(own.cfg.vocab for own in models)
    head = HeadConfig(kind="r2r", hidden=models[0].cfg.width, width=64, top_k=20, blocks=2)
    params = dict(head=heads.init(head), embedding=models[0].params["embed"]["weight"])
    config = EngineConfig(max_rows=rows, max_length=PROMPT + new, prefill_chunk=16 * rows, block=32)
    for name, program, own in (("R2R", R2R(head), params), ("R-Stitch", RStitch(vocab), {})):
        engine = RoutedEngine(models, program, own, config)
        engine.time(PROMPT + new // 2)
        for share in shares:
            _measure(bench, name, engine, new, dict(threshold=_threshold(engine, share, new)), share, repeats)
    engine = RoutedEngine(models, ModelEnsemble(models=2), config=config)
    engine.time(PROMPT + new // 2)
    for share in shares:
        _measure(bench, "ME", engine, new, dict(w0=1 - share, w1=share), share, repeats)


def _measure(
    bench: benchmarking.Bench,
    name: str,
    engine: RoutedEngine,
    new: int,
    knobs: dict[str, float],
    share: float,
    repeats: int,
) -> None:
    rows = engine.config.max_rows
    asked = prompts(rows, new, vocab=engine.fleet.vocab, knobs=knobs)
    engine.run(asked)  # so that the thresholds follow from how these requests move
    found = {policy: [] for policy in ("fused eager", "fused")}
    thresholds = dict(zip(found, ((1, 1), engine.tune(rows)), strict=True))

    def run(policy: str) -> float:
        found[policy].append(policies.measure(engine, asked, thresholds[policy]))
        return 1 / found[policy][-1].rate

    times = benchmarking.interleave({policy: lambda policy=policy: run(policy) for policy in found}, repeats)
    for policy, runs in found.items():
        best = max(runs, key=lambda one: one.rate)
        row = dict(program=name, policy=policy, requests=rows, share=share, threshold=thresholds[policy][1])
        row |= dict(tokens_per_s=best.rate, median=1 / times[policy].median)
        bench.add(**row, realised=best.share, rows=best.rows, padding=best.padding)


def _threshold(engine: RoutedEngine, share: float, new: int) -> float:
    """By bisection over short runs: a higher threshold routes less."""
    low, high, short = 0.0, 1.0, min(new, 32)
    for _ in range(8):
        middle = (low + high) / 2
        asked = prompts(engine.config.max_rows, short, vocab=engine.fleet.vocab, knobs=dict(threshold=middle))
        low, high = (middle, high) if policies.measure(engine, asked, (1, 1)).share > share else (low, middle)
    return (low + high) / 2
