"""An expert of a testbed domain by reinforcement from verifiable rewards, over the testbed's large base.

    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc
    python -m experiments.rlvr --config=configs/rlvr_testbed.py:calc --config.shuffled_rewards=True --out=runs/control

After the colon: calc, logic, text, list or date, and a supervised run of 16 steps comes first. Or several, bare or
interleaved, prompts of several domains, for a router over experts:

    python -m experiments.rlvr --config=configs/rlvr_testbed.py:several --composition=testbed:hard --out=runs/refined \\
        --experts=calc=testbed:calc,logic=testbed:logic,text=testbed:text,list=testbed:list,date=testbed:date

Cost: 2.2 s of CPU a batch of 128 rollouts, half of it the update, and half a minute of CPU to compile. Expect what the
README's table of experts shows after 40 batches. In `reward.png` the share that is right is shown for the rollouts and
for the problems, greedy and sampled.
"""

from molora_jax.training import rlvr_settings, settings


def get_config(name: str = "calc"):
    return settings.editable(rlvr_settings.testbed(name))
