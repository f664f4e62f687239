"""A specialist for school mathematics: SmolLM2-135M on GSM8K's training file.

    python -m experiments.train --config=configs/gsm8k.py --out=runs/gsm8k
    python -m experiments.train --config=configs/gsm8k.py:malora --out=runs/malora

After the colon: lora (the default), rslora, dora; the gates malora, mamba, gru, lstm, linear, toplora, gatera, scalar;
equal, which is LoRA with the parameters of mamba.
"""

import dataclasses

from molora_jax.adapters.gate import PUBLISHED, GateConfig
from molora_jax.config import UserError
from molora_jax.training import settings
from molora_jax.training.settings import SFTConfig
from molora_jax.training.specialist import AdapterConfig

PLAIN = ("lora", "rslora", "dora", "equal")
GATES = {
    "mamba": GateConfig(),
    "malora": PUBLISHED["malora"],
    "gru": GateConfig(kind="gru"),
    "lstm": GateConfig(kind="lstm"),
    "linear": GateConfig(kind="linear"),
    "toplora": PUBLISHED["toplora"],
    "gatera": PUBLISHED["gatera"],
    "scalar": PUBLISHED["scalar"],
}


def adapter(kind: str) -> AdapterConfig:
    """The adapter of that name."""
    if kind in PLAIN:
        return AdapterConfig(kind=kind)
    if kind not in GATES:
        raise UserError(f"config: got {kind!r}, expected one of {', '.join((*PLAIN, *GATES))}")
    return AdapterConfig(kind="gated", gate=GATES[kind])


def get_config(kind: str = "lora"):
    return settings.editable(dataclasses.replace(SFTConfig(data="gsm8k"), adapter=adapter(kind)))
