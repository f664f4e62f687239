"""Other people's programs that the benchmarks run beside this one; each needs an optional package."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np


def transformers_decode(folder: Path, threads: int) -> Callable[[Sequence[Sequence[int]], int], float] | None:
    """`generate` of transformers on torch in fp32: (prompts of equal length, new tokens) to seconds of decoding.

    The clock runs from the first token to the last, so that it leaves out the prompt. None if torch is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError:
        return None
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ticks: list[float] = []

    def tick(_, scores):
        ticks.append(time.perf_counter())
        return scores

    def decode(prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        ticks.clear()
        ids = torch.tensor(prompts)
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                do_sample=False,
                logits_processor=transformers.LogitsProcessorList([tick]),
                pad_token_id=0,
            )
        return ticks[-1] - ticks[0]

    return decode


def numpy_products(params, rows: int) -> Callable[[], None]:
    """The matrix products of one decode step alone, in numpy, on `rows` rows of the model's own weights."""
    arrays = lambda tree: {name: np.asarray(leaf["weight"]) for name, leaf in tree.items() if name.endswith("_proj")}
    layers = [(arrays(layer["attn"]), arrays(layer["mlp"])) for layer in params["layers"]]
    head = np.asarray(params.get("head", params["embed"])["weight"])
    x = np.random.default_rng(0).standard_normal((rows, head.shape[1]), np.float32)

    def run() -> None:
        y = x
        for attn, mlp in layers:
            q, _, _ = (y @ attn[name].T for name in ("q_proj", "k_proj", "v_proj"))
            y = q @ attn["o_proj"].T
            _, up = y @ mlp["gate_proj"].T, y @ mlp["up_proj"].T
            y = up @ mlp["down_proj"].T
            y /= np.abs(y).max()  # keeps the numbers in range
        y @ head.T

    return run
