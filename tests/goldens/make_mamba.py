"""Makes `mamba/*.npz` beside it: random Mamba-1 blocks with the outputs, gradients and states that mambapy gives.

    pip install torch==2.13.0 mambapy==1.2.0
    python tests/goldens/make_mamba.py

Each file holds the weights under their checkpoint names (`weights/...`), inputs `x` [B T D], outputs `y`, a cotangent
`dy`, the gradients of ⟨y, dy⟩ (`dx`, `gradients/...`), and the last state (`conv` [B K-1 C], `ssm` [B C N]), all
fp32. The script also checks that mambapy's parallel scan, its loop and its step agree.
"""

import pathlib

import numpy as np
import torch
from mambapy.mamba import MambaBlock, MambaConfig

VARIANTS = {
    "default": dict(d_model=12, n_layers=1, d_state=5),
    "odd": dict(d_model=7, n_layers=1, d_state=3, expand_factor=3, d_conv=3, dt_rank=2, bias=True),
}
ROWS, LENGTH = 2, 13
FOLDER = pathlib.Path(__file__).parent / "mamba"


def block(fields: dict, *, pscan: bool) -> MambaBlock:
    """The same random block for the same fields, with every weight far from its neutral start."""
    torch.manual_seed(0)
    made = MambaBlock(MambaConfig(pscan=pscan, **fields))
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return made


def step_by_step(made: MambaBlock, x: torch.Tensor):
    """(y [B T D], (ssm [B C N], conv [B C K-1])) by the decoding step."""
    taps = made.config.d_conv
    cache = None, torch.zeros(ROWS, made.config.d_inner, taps - 1)
    ys = []
    for token in x.unbind(1):
        y, cache = made.step(token, cache)
        ys.append(y)
    return torch.stack(ys, 1), cache


def main():
    for name, fields in VARIANTS.items():
        made = block(fields, pscan=True)
        x, dy = (torch.randn(ROWS, LENGTH, fields["d_model"]) for _ in range(2))
        x.requires_grad_()
        y = made(x)
        y.backward(dy)
        with torch.no_grad():
            stepped, (ssm, conv) = step_by_step(made, x)
            torch.testing.assert_close(stepped, y, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(block(fields, pscan=False)(x), y, rtol=1e-5, atol=1e-6)
        arrays = dict(x=x, y=y, dy=dy, dx=x.grad, conv=conv.transpose(1, 2), ssm=ssm)
        for key, weight in made.named_parameters():
            arrays[f"weights/{key}"], arrays[f"gradients/{key}"] = weight, weight.grad
        arrays = {key: value.detach().contiguous().numpy().astype(np.float32) for key, value in arrays.items()}
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main()
