"""Makes the golden adapters of `peft/`: folders as PEFT saves them, with the logits of PEFT's model.

`peft/matching.json` holds, for a table of configs, which modules of a small Llama PEFT adapts, and with what.

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2
    PYTHONHASHSEED=0 python tests/goldens/make_peft.py

Each adapter sits on one of the models of `make.py`. Beside PEFT's two files, `logits.npz` holds the name of that model
(`base`), a row of tokens [T] and its fp32 logits [T, V] with the adapter active and not merged. The script also checks,
of the reference itself, that PEFT reads the folder back to the same logits and that every tensor in it matters.
"""

import json
import pathlib
import shutil
import warnings

import make
import numpy as np
import peft
import safetensors.torch
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "peft"
LENGTH = 13

# name: (base, keyword arguments of LoraConfig)
ADAPTERS = {
    "plain": ("llama_tied", dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "rslora": ("qwen2", dict(r=3, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"])),
    "dora": ("qwen3", dict(r=3, lora_alpha=6, use_dora=True, target_modules=["k_proj", "o_proj", "gate_proj"])),
    "lora_bias": ("llama_bias", dict(r=2, lora_alpha=3, lora_bias=True, target_modules=["q_proj", "up_proj"])),
    "patterns": (
        "llama_untied",
        dict(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            rank_pattern={"q_proj": 16, r"layers\.[02]\.self_attn\.v_proj": 1},
            alpha_pattern={"layers.1.self_attn.q_proj": 64, "self_attn.v_proj": 2, "v_proj": 5},
        ),
    ),
    "layers": (
        "llama_untied",
        dict(r=2, lora_alpha=4, target_modules=["k_proj"], layers_to_transform=[0, 2], layers_pattern="layers"),
    ),
    "regex": (
        "mistral_window",
        dict(
            r=1,
            lora_alpha=1,
            target_modules=r"model\.layers\.\d+\.(mlp\.(up|down)_proj|self_attn\.[qk]_proj)",
            exclude_modules=r".*\.1\..*k_proj",
        ),
    ),
    "embeddings": (
        "llama_tied",
        dict(r=2, lora_alpha=6, use_rslora=True, target_modules=["o_proj", "embed_tokens", "lm_head"]),
    ),
    "embedding_dora": (
        "qwen2_window",
        dict(r=2, lora_alpha=4, use_dora=True, target_modules=["v_proj", "embed_tokens"]),
    ),
    "embedding_scaled": ("gemma3", dict(r=2, lora_alpha=4, target_modules=["embed_tokens"])),
    "tied": (
        "llama_tied",
        dict(r=2, lora_alpha=4, target_modules=["q_proj", "embed_tokens", "lm_head"], ensure_weight_tying=True),
    ),
    "saved": (
        "llama_untied",
        dict(
            r=2,
            lora_alpha=4,
            target_modules=["o_proj"],
            modules_to_save=["embed_tokens", "lm_head", "input_layernorm"],
        ),
    ),
    "saved_head": ("llama_tied", dict(r=2, lora_alpha=4, target_modules=["o_proj"], modules_to_save=["lm_head"])),
    "saved_embedding": (
        "llama_tied",
        dict(r=1, lora_alpha=1, target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
    ),
    "biases": ("llama_bias", dict(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], bias="all")),
    "bfloat16": ("llama_tied", dict(r=4, lora_alpha=8, target_modules=["gate_proj", "k_proj"])),
}


# Configs whose meaning for a Llama of twelve layers goes into matching.json.
MATCHING = [
    dict(target_modules="all-linear"),
    dict(target_modules="ALL-Linear", exclude_modules=["o_proj", "layers.1.mlp.up_proj"]),
    dict(target_modules=["q_proj", "1.mlp.up_proj", "lm_head"]),
    dict(target_modules=["q_proj", "lm_head", "embed_tokens"], exclude_modules=r".*\.\d\..*"),
    dict(target_modules=[f"model.layers.{i}.self_attn.v_proj" for i in (1, 11)]),
    dict(target_modules=["v_proj", "model.layers.5.mlp.up_proj"], layers_to_transform=1),
    dict(target_modules=["v_proj"], layers_to_transform=[0, 11], layers_pattern="layers"),
    dict(target_modules=["v_proj"], layers_to_transform=[3], layers_pattern=["blocks", "layers"]),
    dict(target_modules=["v_proj"], layers_to_transform=[]),
    dict(target_modules=r".*\.layers\.1\.(self_attn|mlp)\.(q|gate)_proj"),
    dict(target_modules=r"(model\.)?layers\.1.?\.mlp\.up_proj|model.embed_tokens"),
    dict(target_modules=["q_proj", "up_proj"], modules_to_save=["mlp"]),
    dict(target_modules=["q_proj"], modules_to_save=["norm", "lm_head"]),
    dict(target_modules=["q_proj"], modules_to_save=["model.layers.1.mlp.up_proj"]),
    dict(target_modules=["q_proj"], rank_pattern={"layers.1.self_attn.q_proj": 3, "q_proj": 5}),
    dict(target_modules=["q_proj"], rank_pattern={"q_proj": 5, "layers.1.self_attn.q_proj": 3}),
    dict(target_modules=["q_proj", "k_proj"], rank_pattern={r"layers\.1\d?\.self_attn\.[qk]_proj": 7}, use_rslora=True),
    dict(
        target_modules=["q_proj", "k_proj"], alpha_pattern={"(q|k)_proj": 1.5, "q_proj": 9}, rank_pattern={"k_proj": 2}
    ),
    dict(target_modules=["q_proj"], rank_pattern={"1.self_attn.q_proj": 3, r"model\.layers\.2\..*": 4}),
]


def base(variant: str) -> torch.nn.Module:
    fields, _ = make.VARIANTS[variant]
    return make.build(variant, make.SIZES | fields)[0]


@torch.no_grad()
def randomise(model: peft.PeftModel, name: str) -> list[str]:
    """Draws all that the adapter trains; magnitudes and whole weights are moved by a third. Returns their names."""
    changed = []
    for key, param in model.named_parameters():
        if not param.requires_grad:
            continue
        noise = torch.from_numpy(make.seeded(name, key).standard_normal(tuple(param.shape))).float()
        if "lora_A" in key or "lora_embedding_B" in key:
            param.copy_(noise / param.shape[-1] ** 0.5)
        elif "lora_B" in key or "lora_embedding_A" in key:
            param.copy_(noise * 0.5)
        else:
            param.mul_(1 + 0.3 * noise).add_(0.05 * noise)
        changed.append(key)
    return changed


def assert_all_matter(model: peft.PeftModel, row: np.ndarray) -> None:
    model(torch.from_numpy(row)[None], use_cache=False).logits.square().mean().backward()
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert param.grad.abs().max() > 1e-3, (name, param.grad.abs().max())


def assert_reloads(folder: pathlib.Path, variant: str, row: np.ndarray, logits: np.ndarray) -> None:
    """PEFT reads the folder on a fresh base, without a missing or a left-over tensor, to the same logits."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        model = peft.PeftModel.from_pretrained(base(variant), folder).eval()
    (again,) = make.rows_alone(model, [row])
    assert np.abs(again - logits).max() <= 1e-5 * np.abs(logits).max(), folder


def save(folder: pathlib.Path, model: peft.PeftModel, *, bfloat16: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    if bfloat16:
        file = folder / "adapter_model.safetensors"
        values = {k: v.to(torch.bfloat16) for k, v in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(values, file, metadata={"format": "pt"})
    for file in folder.iterdir():
        file.chmod(0o644)


def make_adapter(name: str) -> None:
    variant, fields = ADAPTERS[name]
    model = peft.get_peft_model(base(variant), peft.LoraConfig(task_type="CAUSAL_LM", **fields)).eval()
    randomise(model, name)
    if name == "bfloat16":
        for key, param in model.named_parameters():
            if "lora_" in key:
                param.data = param.data.to(torch.bfloat16).float()
    row = make.seeded(name, "row").integers(0, make.SIZES["vocab_size"], LENGTH)
    assert_all_matter(model, row)
    (logits,) = make.rows_alone(model, [row])
    (plain,) = make.rows_alone(base(variant), [row])
    change = np.abs(logits - plain).max() / np.abs(plain).max()
    assert change > 0.02, (name, change)
    save(FOLDER / name, model, bfloat16=name == "bfloat16")
    assert_reloads(FOLDER / name, variant, row, logits)
    np.savez_compressed(FOLDER / name / "logits.npz", base=variant, tokens=row.astype(np.int32), logits=logits)
    size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
    print(f"{name:18} {size:8,} B  logits ±{np.std(logits):.2f}  changed by {change:.2f}")


def matching() -> list[dict]:
    """What each config of MATCHING adapts: module, rank, alpha and scale; and which modules it saves as a whole."""
    sizes = dict(hidden_size=4, intermediate_size=6, num_hidden_layers=12, num_attention_heads=1, head_dim=4)
    hf = dict(model_type="llama", vocab_size=5, num_key_value_heads=1, tie_word_embeddings=False) | sizes
    cases = []
    for fields in MATCHING:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **fields)).base_model.model
        modules = dict(model.named_modules())
        sites = {
            name: [m.r["default"], m.lora_alpha["default"], m.scaling["default"]]
            for name, m in modules.items()
            if isinstance(m, peft.tuners.lora.LoraLayer)
        }
        saved = [name for name, m in modules.items() if isinstance(m, peft.utils.other.ModulesToSaveWrapper)]
        assert sites
        cases.append(dict(config=dict(r=4, lora_alpha=8) | fields, sites=sites, saved=saved))
    return [dict(base=hf)] + cases


if __name__ == "__main__":
    warnings.filterwarnings(
        "ignore", message=".*(tie_word_embeddings|save_embedding_layers|invalid shape|gradient_check).*"
    )
    for adapter in ADAPTERS:
        make_adapter(adapter)
    lines = ",\n".join(map(json.dumps, matching()))
    (FOLDER / "matching.json").write_text(f"[\n{lines}\n]\n")
