"""A router over frozen experts of the testbed, by the kind of mixture that stands after the colon.

    python -m experiments.compose --config=configs/compose_testbed.py:hard --model=testbed:large …

Kinds: hard (the default; sparse straight-through, as released), hard_dense (the gradient of all experts), switch,
gumbel, soft, top2, loramoe, mixlora, smear, mole, xlora, soup, phatgoose, lorahub. `--config.mixture.rank=0` trains the
router alone.
"""

from molora_jax.training import settings
from molora_jax.training.compose import ComposeConfig
from molora_jax.training.mixture import MixtureConfig


def get_config(kind: str = "hard"):
    return settings.editable(ComposeConfig(mixture=MixtureConfig(kind=kind)))
