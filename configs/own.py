"""A specialist of your own data: a JSONL file of prompts with completions, or of conversations.

    python -m experiments.train --config=configs/own.py --config.data=rows.jsonl --out=runs/own

A line is {"prompt": "…", "completion": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}. The kinds after the
colon are those of configs/gsm8k.py. Rows hold 512 tokens and as many documents as fit; longer ones are left out and
counted. Cost: as configs/gsm8k.py, twice as much a step. Expect the held-out loss to fall from its first line on.
"""

import dataclasses

from molora_jax.training import settings
from molora_jax.training.settings import SFTConfig
from molora_jax.training.specialist import named


def get_config(kind: str = "lora"):
    usual = SFTConfig(data="rows.jsonl", length=512, steps=300)
    return settings.editable(dataclasses.replace(usual, adapter=named(kind)))
