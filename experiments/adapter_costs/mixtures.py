"""PEFT's ways to run several adapters in one batch, on torch: `adapter_names`, X-LoRA and Arrow."""

import pathlib
from collections.abc import Callable, Sequence

import numpy as np


def forwards(
    base: pathlib.Path, adapters: Sequence[pathlib.Path], tokens: np.ndarray, threads: int
) -> dict[str, Callable[[], None]] | None:
    """Whole forward passes in fp32 over tokens [B, T]: by the base alone, and by each way. None without PEFT.

    The rows of `mixed` have one adapter each, which is all that it can do; the others choose for each token.

    Args:
      base: folder of a model.
      adapters: folders of adapters of one rank.
    """
    try:
        import peft
        import torch
        import transformers
        from peft.tuners.lora.arrow import create_arrow_model
    except ImportError:
        return None
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ids = torch.tensor(tokens)
    names = [str(i) for i in range(len(adapters))]

    def model():
        found = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        found.config.use_cache = False  # X-LoRA refuses it
        return found

    def mixed():
        found = peft.PeftModel.from_pretrained(model(), adapters[0], adapter_name="0")
        for name, folder in zip(names[1:], adapters[1:], strict=True):
            found.load_adapter(folder, adapter_name=name)
        return found.eval()

    def xlora():
        width = model().config.hidden_size
        experts = dict(zip(names, map(str, adapters), strict=True))
        config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=width, adapters=experts)
        return peft.get_peft_model(model(), config).eval()

    def arrow():
        return create_arrow_model(model(), list(map(str, adapters)), peft.ArrowConfig(top_k=1)).eval()

    def run(model, **kwargs) -> Callable[[], None]:
        def forward() -> None:
            with torch.no_grad():
                model(input_ids=ids, **kwargs)

        return forward

    rows = [names[row % len(names)] for row in range(len(tokens))]
    return {
        "base": run(model()),
        "mixed": run(mixed(), adapter_names=rows),
        "xlora": run(xlora()),
        "arrow": run(arrow()),
    }
