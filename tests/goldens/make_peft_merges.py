"""Makes `peft/merges.npz`: what PEFT's `add_weighted_adapter` makes of three adapters of one layer.

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2
    python tests/goldens/make_peft_merges.py

The file holds the adapters (`SITE/e/a` [R, D], `SITE/e/b` [F, R]; their alphas are `alphas`), their weights, and the
result of each case of `cases` (a JSON list): A and B where PEFT combines factors (`i/SITE/a`, `i/SITE/b`), else the
product with its scale (`i/SITE/product` [F, D]). DARE's random choice is replaced by `kept`, which the test repeats.
"""

import json
import pathlib
import warnings

import make_peft
import numpy as np
import peft
import torch

SITES = ("v_proj", "k_proj")
ALPHAS, WEIGHTS, RANK = (3, 6, 4.5), (0.7, -0.4, 1.1), 3
CASES = [
    dict(combination_type="cat"),
    dict(combination_type="linear"),
    dict(combination_type="svd"),
    dict(combination_type="svd", svd_rank=5),
    *(
        dict(combination_type=f"{kind}{svd}", density=0.4, **majority, **({"svd_rank": 12} if svd else {}))
        for svd in ("", "_svd")
        for kind in ("ties", "dare_linear", "dare_ties", "magnitude_prune")
        for majority in ([{}, {"majority_sign_method": "frequency"}] if kind == "ties" else [{}])
    ),
]


def kept(shape: tuple[int, ...], density: float) -> np.ndarray:
    """A choice that is spread over the entries, the same in every call."""
    return (np.arange(np.prod(shape)) * 7 % 10 < round(10 * density)).reshape(shape)


def main() -> None:
    model = make_peft.base("llama_tied")
    for e, alpha in enumerate(ALPHAS):
        config = peft.LoraConfig(r=RANK, lora_alpha=alpha, target_modules=list(SITES), layers_to_transform=[0])
        model = peft.get_peft_model(model, config, str(e)) if e == 0 else model
        if e:
            model.add_adapter(str(e), config)
        model.set_adapter(str(e))
        make_peft.randomise(model, f"merge {e}")
    attention = model.base_model.model.model.layers[0].self_attn
    found = dict(alphas=ALPHAS, weights=WEIGHTS, cases=json.dumps(CASES))
    for site in SITES:
        module = getattr(attention, site)
        for e in range(len(ALPHAS)):
            found[f"{site}/{e}/a"] = module.lora_A[str(e)].weight.detach().numpy()
            found[f"{site}/{e}/b"] = module.lora_B[str(e)].weight.detach().numpy()
    torch.bernoulli = lambda p: torch.from_numpy(kept(tuple(p.shape), float(p.flatten()[0]))).to(p.dtype)
    for i, case in enumerate(CASES):
        model.add_weighted_adapter([str(e) for e in range(len(ALPHAS))], list(WEIGHTS), f"case{i}", **case)
        for site in SITES:
            module = getattr(attention, site)
            if case["combination_type"] == "cat" or "svd" in case["combination_type"]:
                found[f"{i}/{site}/product"] = module.get_delta_weight(f"case{i}").detach().numpy()
            else:
                assert module.scaling[f"case{i}"] == 1
                found[f"{i}/{site}/a"] = module.lora_A[f"case{i}"].weight.detach().numpy()
                found[f"{i}/{site}/b"] = module.lora_B[f"case{i}"].weight.detach().numpy()
    file = pathlib.Path(__file__).parent / "peft" / "merges.npz"
    np.savez_compressed(file, **found)
    print(f"{len(CASES)} cases, {file.stat().st_size:,} B")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*gradient_check.*")
    main()
