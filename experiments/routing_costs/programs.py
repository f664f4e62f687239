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


def published(bench: benchmarking.Bench, models: Sequence[Model], rows: int, new: int, share: float) -> None:
    """R2R with a head of random weights, R-Stitch, and an ensemble by weights, each eager and delayed."""
    vocab = min(own.cfg.vocab for own in models)
    head = HeadConfig(kind="r2r", hidden=models[0].cfg.width, width=64, top_k=20, blocks=2)
    params = dict(head=heads.init(head), embedding=models[0].params["embed"]["weight"])
    config = EngineConfig(max_rows=rows, max_length=PROMPT + new, prefill_chunk=16 * rows, block=32)
    for name, program, own in (("R2R", R2R(head), params), ("R-Stitch", RStitch(vocab), {})):
        engine = RoutedEngine(models, program, own, config)
        _measure(bench, name, engine, new, dict(threshold=_threshold(engine, share)))
    engine = RoutedEngine(models, ModelEnsemble(models=2), config=config)
    _measure(bench, "ME", engine, new, dict(w0=1 - share, w1=share))


def _measure(bench: benchmarking.Bench, name: str, engine: RoutedEngine, new: int, knobs: dict[str, float]) -> None:
    rows = engine.config.max_rows
    asked = prompts(rows, new, vocab=engine.fleet.vocab, knobs=knobs)
    engine.time(PROMPT + new // 2)
    engine.run(asked)
    for policy, thresholds in (("fused eager", (1, 1)), ("fused", engine.tune(rows))):
        best = max((policies.measure(engine, asked, thresholds) for _ in range(3)), key=lambda one: one.rate)
        row = dict(program=name, policy=policy, threshold=thresholds[1], tokens_per_s=best.rate)
        bench.add(**row, realised=best.share, rows=best.rows, padding=best.padding)


def _threshold(engine: RoutedEngine, share: float) -> float:
    """By bisection over short runs: a higher threshold routes less."""
    low, high = 0.0, 1.0
    for _ in range(8):
        middle = (low + high) / 2
        asked = prompts(engine.config.max_rows, 32, vocab=engine.fleet.vocab, knobs=dict(threshold=middle))
        low, high = (middle, high) if policies.measure(engine, asked, (1, 1)).share > share else (low, middle)
    return (low + high) / 2
