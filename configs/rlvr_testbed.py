"""An expert of a testbed domain by reinforcement from verifiable rewards, over the testbed's large base.

    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc
    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc --config.shuffled_rewards=True --out=runs/control

After the colon: calc, logic, text, list or date.
"""

from molora_jax.training import rlvr_settings, settings


def get_config(name: str = "calc"):
    return settings.editable(rlvr_settings.testbed(name))
