"""PEFT on torch, as the conformance rows use it: every call with the settings that it has by itself."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import peft
import torch
import transformers
from peft.utils import hotswap

from experiments.conformance.inputs import TOKENS, Inputs

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
_Q = "base_model.model.model.layers.0.self_attn.q_proj"
_DTYPES = {"untied": torch.float32, "tied": torch.float32, "bfloat16": torch.bfloat16}


class Peft:
    """See `side.Side`; a group is a `PeftModel`."""

    name = "peft"

    def __init__(self, inputs: Inputs):
        self.inputs, self.said = inputs, []

    def bare(self, folder: pathlib.Path) -> np.ndarray:
        return _logits(_model(folder, torch.float32))[0]

    def load(self, folders: Mapping[str, pathlib.Path], base: str = "untied") -> peft.PeftModel:
        (first, folder), *others = folders.items()
        base_model = _model(self.inputs.base(base), _DTYPES[base])
        model = peft.PeftModel.from_pretrained(base_model, folder, adapter_name=first)
        for name, folder in others:
            model.load_adapter(folder, adapter_name=name)
        return model.eval()

    def logits(self, group: peft.PeftModel, name: str = "x") -> np.ndarray:
        group.set_adapter(name)
        return _logits(group)[0]

    def mixed(self, group: peft.PeftModel, names: Sequence[str]) -> np.ndarray:
        return _logits(group, len(names), adapter_names=list(names))

    def scales(self, group: peft.PeftModel) -> dict[str, float]:
        adapted = [(name, m) for name, m in group.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        return {name.removeprefix("base_model.model.model."): module.scaling["x"] for name, module in adapted}

    def dtypes(self, group: peft.PeftModel) -> set[str]:
        found = {value.dtype for name, value in group.named_parameters() if ".lora_" in name}
        return {str(dtype).removeprefix("torch.") for dtype in found}

    def delta(self, group: peft.PeftModel, name: str = "x") -> np.ndarray:
        return group.get_submodule(_Q).get_delta_weight(name).detach().float().numpy()

    def combine(self, group: peft.PeftModel, weights: Mapping[str, float], method: str) -> peft.PeftModel:
        names = [name.rstrip("'") for name in weights]
        if "sum" in group.peft_config:
            group.delete_adapter("sum")
        group.add_weighted_adapter(names, list(weights.values()), "sum", combination_type=method)
        return group

    def merge(self, group: peft.PeftModel, folder: pathlib.Path) -> np.ndarray:
        merged = group.merge_and_unload()
        merged.save_pretrained(folder)
        return _logits(merged)[0]

    def merged_weight(self, group: peft.PeftModel) -> tuple[np.ndarray, bool]:
        group.merge_adapter()
        return self._weight(group), False

    def toggled(self, group: peft.PeftModel, times: int) -> np.ndarray:
        for _ in range(times):
            group.merge_adapter()
            group.unmerge_adapter()
        return self._weight(group)

    def _weight(self, group: peft.PeftModel) -> np.ndarray:
        return group.get_submodule(_Q).base_layer.weight.detach().float().numpy()

    def save(self, group: peft.PeftModel, folder: pathlib.Path) -> dict[str, pathlib.Path]:
        group.save_pretrained(folder)
        return {name: folder / name for name in group.peft_config}

    def swap(self, group: peft.PeftModel, folder: pathlib.Path) -> peft.PeftModel:
        hotswap.prepare_model_for_compiled_hotswap(group, target_rank=8)
        hotswap.hotswap_adapter(group, str(folder), adapter_name="x", torch_device="cpu")
        return group

    def decode_xlora(self, folders: Mapping[str, pathlib.Path], base: str = "untied") -> tuple[bool, str]:
        model = _model(self.inputs.base(base), _DTYPES[base])
        config = peft.XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=64, adapters={str(i): str(f) for i, f in enumerate(folders.values())}
        )
        mixture = peft.get_peft_model(model, config).eval()
        mixture.generate(input_ids=torch.tensor(TOKENS[None]), max_new_tokens=4, use_cache=True)
        return True, "decodes"


def _model(folder: pathlib.Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _logits(model: torch.nn.Module, rows: int = 1, **kwargs) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(np.tile(TOKENS, (rows, 1))), **kwargs).logits.float().numpy()
