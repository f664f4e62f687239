"""An expert of one of the five published benchmarks over SmolLM2-135M, by its name after the colon.

    for name in gsm8k arc boolq cola medqa; do
        python -m experiments.train --config=configs/benchmarks.py:$name --out=runs/real/$name
    done

The adapters are in the MLP alone, as those of Molavi et al. 2026, so that a router can compose them
(`experiments.distil`, then `experiments.compose --config=configs/compose_benchmarks.py`, then `experiments.evaluate`).

Cost: about 6 s of CPU a step of 4 × 256 tokens, so that 60 steps of each of the five are about half an hour on two idle
cores; the router and an evaluation of 100 questions of each take as long again. Expect the form of the answers to be
learnt (the loss falls within 20 steps), and little knowledge: 135 M parameters know little of medicine.
"""

from molora_jax.config import UserError
from molora_jax.training import settings
from molora_jax.training.settings import SFTConfig
from molora_jax.training.specialist import AdapterConfig

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = ("gsm8k", "arc", "boolq", "cola", "medqa")


def get_config(name: str = "gsm8k"):
    if name not in NAMES:
        raise UserError(f"config: got {name!r}, expected one of {', '.join(NAMES)}")
    adapter = AdapterConfig(rank=16, sites=MLP)
    return settings.editable(SFTConfig(data=name, adapter=adapter, length=384, steps=60, warmup=5, held_out=32))
