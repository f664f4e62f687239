"""An expert of a testbed domain by reinforcement from verifiable rewards, over the testbed's large base.

    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc
    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc --config.shuffled_rewards=True --out=runs/control

After the colon: calc, logic, text, list or date.
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
    return dataclasses.replace(RLVRConfig(data=f"testbed:{name}"), length=prompt + most, max_new_tokens=most)


def get_config(name: str = "calc"):
    return settings.editable(rlvr(name))
