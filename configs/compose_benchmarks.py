"""A router over the five experts of configs/benchmarks.py, by the kind of mixture that stands after the colon.

    make benchmarks                                          # has the whole command

Cost: 40 steps of 2 × 512 tokens, some minutes on two idle cores.
"""

from molora_jax.training import settings
from molora_jax.training.compose import ComposeConfig
from molora_jax.training.mixture import MixtureConfig


def get_config(kind: str = "hard"):
    how = dict(rows=2, length=512, steps=40, warmup=4, held_out=1, evaluate_every=40, save_every=20)
    return settings.editable(ComposeConfig(mixture=MixtureConfig(kind=kind, rank=16), **how))
