"""Named shapes of the operation, shared by tests, tuning and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """N tokens · D width in · F width out · E experts · R rank."""

    N: int
    D: int
    F: int
    E: int
    R: int
    dtype: str = "bfloat16"


def model(name: str, width: int, mlp_width: int, experts: int, rank: int) -> dict[str, Spec]:
    """The MLP projection of one model, for a decode step of 32 requests and a prefill of 4,096 tokens."""
    size = dict(D=width, F=mlp_width, E=experts, R=rank)
    return {f"{name}_decode": Spec(N=32, **size), f"{name}_prefill": Spec(N=4096, **size)}


DEVICE = {
    **model("qwen3_1.7b", 2048, 6144, 8, 16),
    **model("llama3_8b_r16", 4096, 14336, 16, 16),
    **model("llama3_8b_r64", 4096, 14336, 16, 64),
    **model("llama3_8b_e64", 4096, 14336, 64, 64),
}

CPU = {
    "e64_n1024": Spec(N=1024, D=1024, F=1024, E=64, R=16, dtype="float32"),
    "e16_n32": Spec(N=32, D=1024, F=1024, E=16, R=16, dtype="float32"),
    "e8_n32": Spec(N=32, D=1024, F=1024, E=8, R=16, dtype="float32"),
}
