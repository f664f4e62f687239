"""What `make reproduce` does: sizes of every stage, the questions, and where results go."""

import dataclasses
from pathlib import Path

from molora_jax.config import UserError
from molora_jax.data.example import Example
from molora_jax.data.questions import questions
from molora_jax.data.testbed.domains import DOMAINS
from molora_jax.evaluation.pair import PairConfig
from molora_jax.training.mixture import KINDS

SINGLE = tuple(DOMAINS)
LATE = SINGLE[-1]
"""The expert that comes to a router of the others, and that leaves one of all."""
ADDED, REMOVED = f"{LATE} added later", f"{LATE} removed"

MIXED = ("several", "bare", "interleaved")
"""Prompts of two or three domains: with markers, without, and taking turns in mid-sentence."""

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""Sites of the experts, as in Molavi et al. 2026."""

ENDLESS = 1 << 30
"""Examples of a stream that is trained on; no run gets to their end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes; the defaults take under an hour on two cores.

    Attributes:
      large, small: the bases.
      seeds: of everything that is trained; the questions are the same for all.
      problems: test questions of each set.
      supervised, reinforced: updates of the two parts of stage 1.
      rank, rate: of the experts.
      traces: questions of each domain that experts answer for stage 2.
      composed: updates of stage 2.
      small_supervised: updates of each expert of the small base, which has no second part.
      kinds: mixtures that are compared.
      joint: updates of the one LoRA that is trained on all traces.
      gated: updates of each gate and its rivals.
      gate_domains: tasks on which they are compared.
      gates: their kinds.
      pair: sizes of the routed pair.
    """

    large: str = "testbed:large"
    small: str = "testbed:small"
    seeds: tuple[int, ...] = (0, 1, 2)
    problems: int = 100
    supervised: int = 16
    reinforced: int = 40
    rank: int = 16
    rate: float = 2e-3
    traces: int = 400
    composed: int = 200
    small_supervised: int = 600
    kinds: tuple[str, ...] = ("hard", "hard_dense", "soft", "top2", "xlora")
    joint: int = 300
    gated: int = 100
    gate_domains: tuple[str, ...] = ("text", "list")
    gates: tuple[str, ...] = ("malora", "equal", "scalar", "toplora", "gru")
    pair: PairConfig = PairConfig()

    def __post_init__(self):
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise UserError(f"reproduce: got the seeds {self.seeds}, expected different ones, at least one")
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise UserError(f"reproduce: got the kind {unknown[0]!r}, expected some of {', '.join(KINDS)}")
        if "hard" not in self.kinds:
            raise UserError(f"reproduce: got the kinds {', '.join(self.kinds)}, expected hard among them")

    def sets(self, *names: str) -> dict[str, list[Example]]:
        """The test questions of some sets by name, all sets without any; the same for every seed."""
        return {name: questions(f"testbed:{name}", "test", self.problems) for name in names or (*SINGLE, *MIXED)}


QUICK = Plan(
    seeds=(0,),
    problems=20,
    supervised=12,
    reinforced=2,
    traces=60,
    composed=12,
    small_supervised=12,
    kinds=("hard", "soft"),
    joint=12,
    gated=12,
    gate_domains=("logic",),
    gates=("malora", "equal"),
    pair=PairConfig(shares=(0.2,), train=100, validation=20, test=20, repeats=1),
)
"""A few minutes, to see that all of it runs; its numbers mean nothing."""


def seed_folder(runs: Path, seed: int) -> Path:
    """Of the adapters, routers and checkpoints of a seed."""
    return runs / f"seed{seed}"
