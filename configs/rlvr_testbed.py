"""An expert of a testbed domain by reinforcement from verifiable rewards, over the testbed's large base.

    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc
    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc --config.shuffled_rewards=True --out=runs/control

After the colon: calc, logic, text, list or date. A supervised run of 80 steps comes first, after which a third of the
groups of eight rollouts are all right or all wrong; before it, half are.

Cost: 2.2 s of CPU a batch of 128 rollouts, half of it the update, and half a minute of CPU to compile. In `reward.png`
the share that is right is shown for the rollouts and for the problems, greedy and sampled.
"""

import dataclasses

from molora_jax.config import UserError
from molora_jax.training import settings
from molora_jax.training.rlvr_settings import RLVRConfig

ROOM = {"calc": (20, 44), "logic": (38, 42), "text": (20, 52), "list": (20, 44), "date": (32, 58)}
"""Tokens of the longest prompt and of what follows it, by domain."""


def rlvr(name: str = "calc") -> RLVRConfig:
    """The settings of that domain."""
    if name not in ROOM:
        raise UserError(f"config: got {name!r}, expected one of {', '.join(ROOM)}")
    prompt, most = ROOM[name]
    usual = RLVRConfig(sft_steps=80, levels=(1, 2, 3), signs=0.5, temperature=0.6, rate=7e-4)
    return dataclasses.replace(usual, data=f"testbed:{name}", length=prompt + most, max_new_tokens=most)


def get_config(name: str = "calc"):
    return settings.editable(rlvr(name))
