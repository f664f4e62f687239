"""Policies as the only variable: the same requests, models and programs, run in different order."""

from collections.abc import Sequence

from experiments.routing_costs import baselines, policies
from experiments.routing_costs.pair import PROMPT, prompts
from molora_jax import benchmarking
from molora_jax.engine import tuning
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.routed import Model, RoutedEngine
from molora_jax.engine.throughput import Routing, StepTimes
from molora_jax.routing.programs.bernoulli import Bernoulli


class Grid:
    """One pair of models, `rows` requests at once, `new` tokens each."""

    def __init__(self, bench: benchmarking.Bench, models: Sequence[Model], rows: int, new: int, repeats: int):
        self.bench, self.models, self.rows, self.new, self.repeats = bench, models, rows, new, repeats
        self.length = PROMPT + new
        config = EngineConfig(max_rows=rows, max_length=self.length, prefill_chunk=16 * rows, block=32)
        self.engine = RoutedEngine(models, Bernoulli(), config=config)
        self.engine.warm_up()
        self.measured = self.engine.time(PROMPT + new // 2, repeats)
        self.servers = [baselines.alone(own, rows, self.length) for own in models]

    def prompts(self, **knobs: float):
        return prompts(self.rows, self.new, vocab=self.engine.fleet.vocab, knobs=knobs)

    def alone(self) -> tuple[float, float]:
        """Tokens per second of the small and of the large model alone."""
        rates = []
        for name, run in zip(("small only", "large only"), self.servers, strict=True):
            asked = prompts(self.rows, self.new, vocab=self.engine.fleet.vocab)
            timing = benchmarking.interleave({name: lambda run=run, asked=asked: 1 / run(asked)}, self.repeats)[name]
            rates.append(1 / timing.min)
            self.bench.add(policy=name, requests=self.rows, tokens_per_s=rates[-1], median=1 / timing.median)
        return rates[0], rates[1]

    def routed(self, share: float, thresholds: Sequence[int] = ()) -> tuple[int, dict[str, policies.Measured]]:
        """Eager, delayed and fused at `share`, and delayed at further `thresholds`, in turn.

        Returns:
          The threshold of the delayed policy, which the throughput model chose, and the quickest run of each.
        """
        best = self.chosen(share, 1)
        ways = {"eager": (1, 1), "delayed": (best, 1), "fused": (self.chosen(share, None), None)}
        ways |= {f"delayed B={b}": (b, 1) for b in thresholds if b not in (1, best)}
        found: dict[str, list[policies.Measured]] = {name: [] for name in ways}

        def run(name: str) -> float:
            threshold, block = ways[name]
            found[name].append(policies.measure(self.engine, self.prompts(share=share), (1, threshold), block))
            return 1 / found[name][-1].rate

        times = benchmarking.interleave({name: lambda name=name: run(name) for name in ways}, self.repeats)
        quickest = {name: max(runs, key=lambda each: each.rate) for name, runs in found.items()}
        for name, (threshold, _) in ways.items():
            one = quickest[name]
            row = dict(policy=name, requests=self.rows, share=share, threshold=threshold, tokens_per_s=one.rate)
            row |= dict(median=1 / times[name].median, realised=one.share, looks=one.looks, runs=one.runs)
            row |= dict(padding=one.padding, rows=one.rows)
            self.bench.add(**row, predicted=self.predicted(share, *ways[name]))
        return best, quickest

    def chosen(self, share: float, block: int | None) -> int:
        """The threshold of the large model that promises most."""
        return tuning.best(Routing.pair(share), self.times(block), self.rows, range(1, self.rows + 1))[1]

    def times(self, block: int | None) -> tuple[StepTimes, ...]:
        """Measured step times; where the host starts every run (`block` 1), its look is part of each."""
        return tuning.step_times(self.engine.plan, self.measured.seconds, self.measured.look if block == 1 else 0.0)

    def predicted(self, share: float, threshold: int, block: int | None) -> float:
        """Tokens per second that the simulator promises from them."""
        return policies.predict(self.times(block), share, threshold, self.rows, self.new)
