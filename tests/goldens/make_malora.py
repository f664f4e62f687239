"""Makes `malora/*.pt` beside it: small checkpoints in the layout of MaLoRA's released code, and what they compute.

    pip install torch==2.13.0 mambapy==1.2.0
    python tests/goldens/make_malora.py

Each is for `llama_tied`, of the q and v projections, the second of which has no gate in the first layer. Beside it,
KIND.npz holds an input `x` [B T D] and for every module its gate λ [B T 1 or R], in fp32. The gates are written here
from the formulas of the paper, under the names of the release.
"""

import math
import pathlib

import numpy as np
import torch
from mambapy.mamba import MambaBlock, MambaConfig
from torch import nn

FOLDER = pathlib.Path(__file__).parent / "malora"
D, RANK, ROWS, LENGTH = 36, 4, 2, 9
MODULES = {"q_proj": 36, "v_proj": 12}
PLAIN = dict(rank=RANK, alpha=8, gate_activation="softplus", target_modules=list(MODULES), gate_sharing="per_matrix")
MAMBA = dict(gate_type="mamba", d_state=3, d_conv=3, expand_factor=2, hproj_mode=True, n_layers=1)
KINDS = {
    "mamba": PLAIN | MAMBA | dict(scalar_output=True),
    "mamba_diagonal": PLAIN | MAMBA | dict(scalar_output=False, gate_activation="sigmoid", gate_scale=2.0),
    "mamba_direct": PLAIN | MAMBA | dict(hproj_mode=False, direct_mode=True, scalar_output=True, gate_clamp_max=1.2),
    "gru": PLAIN | dict(gate_type="gru", rnn_hidden=5, hproj_mode=True, scalar_output=True),
    "lstm": PLAIN | dict(gate_type="lstm", rnn_hidden=4, hproj_mode=True, scalar_output=False),
    "linear": PLAIN | dict(gate_type="linear", scalar_output=True, gate_activation="sigmoid"),
    "toplora": PLAIN | dict(gate_type="toplora"),
}


class Gate(nn.Module):
    """The state dict of a released gate; `forward` gives λ of x [B T D]."""

    def __init__(self, config: dict):
        super().__init__()
        self.config, kind = config, config["gate_type"]
        scalar = config.get("scalar_output", False)
        if kind == "linear":
            self.linear = nn.Linear(D, 1 if scalar else RANK)
        elif kind == "toplora":
            self.weight, self.rms_norm = nn.Parameter(torch.randn(D, RANK) / 6), nn.RMSNorm([RANK])
        else:
            if not config.get("direct_mode", False):
                self.down = nn.Linear(D, RANK, bias=False)
            width = RANK
            if kind == "mamba":
                sizes = {key: config[key] for key in ("d_state", "d_conv", "expand_factor")}
                self.mamba = MambaBlock(MambaConfig(d_model=RANK, n_layers=1, **sizes))
            else:
                width = config["rnn_hidden"]
                self.rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](RANK, width, batch_first=True)
            if scalar or kind != "mamba":
                self.out = nn.Linear(width, 1 if scalar else RANK, bias=False)
            self.gate_bias = nn.Parameter(torch.full([RANK], 0.8))

    def forward(self, x, h):
        kind, scalar = self.config["gate_type"], self.config.get("scalar_output", False)
        if kind == "toplora":
            return torch.exp(self.rms_norm(x @ self.weight))
        if kind == "linear":
            z = self.linear(x)
        else:
            u = self.down(x) if hasattr(self, "down") else h
            s = self.mamba(u) if kind == "mamba" else self.rnn(u)[0]
            z = (self.out(s) if hasattr(self, "out") else s) + self.gate_bias[: 1 if scalar else RANK]
        if self.config["gate_activation"] == "softplus":
            lam = nn.functional.softplus(z)
        else:
            lam = torch.sigmoid(z) * (1 if kind == "linear" else 2)
        return lam.clamp(max=self.config.get("gate_clamp_max", math.inf))


def main():
    FOLDER.mkdir(exist_ok=True)
    for kind, config in KINDS.items():
        torch.manual_seed(0)
        x, states, arrays, gates = torch.randn(ROWS, LENGTH, D), {}, {}, []
        for layer in range(2):
            for name, width in MODULES.items():
                a, b = nn.Linear(D, RANK, bias=False), nn.Linear(RANK, width, bias=False)
                gate = nn.Module() if (layer, name) == (0, "v_proj") else Gate(config)
                for weight in gate.parameters():
                    weight.data.add_(0.3 * torch.randn_like(weight))
                module = f"model.layers.{layer}.self_attn.{name}"
                a, b = a.bfloat16(), b.bfloat16()
                states[module] = dict(lora_A=a.state_dict(), lora_B=b.state_dict(), gate=gate.state_dict())
                if isinstance(gate, Gate):
                    gates.append(gate.state_dict())
                    with torch.no_grad():
                        arrays[module] = gate(x, x @ a.weight.float().T).numpy()
        file = dict(epoch=2, train_loss=0.5, val_loss=0.25, config=config, gated_lora_states=states, gate_modules=gates)
        torch.save(file, FOLDER / f"{kind}.pt")
        np.savez_compressed(FOLDER / f"{kind}.npz", x=x.numpy(), **arrays)


if __name__ == "__main__":
    main()
