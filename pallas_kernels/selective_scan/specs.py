"""Named shapes of the operation, shared by tests, tuning and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """B batch rows · T tokens · C channels · N states."""

    B: int
    T: int
    C: int
    N: int
    dtype: str = "float32"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.B, self.T, self.C, self.N


# A gate of MaLoRA works in r = 16 dimensions, so on 32 channels; a retriever on few, wide segments.
DEVICE = {
    "tiny": Spec(B=1, T=3, C=5, N=3),
    "gate": Spec(B=4, T=4096, C=32, N=16),
    "block_256": Spec(B=4, T=4096, C=256, N=16),
    "block_256_bf16": Spec(B=4, T=4096, C=256, N=16, dtype="bfloat16"),
    "mamba_1.4b": Spec(B=8, T=2048, C=4096, N=16),
    "segments": Spec(B=8, T=20, C=512, N=64),
}

CPU = {
    "gate": Spec(B=4, T=1024, C=32, N=16),
    "block_256": Spec(B=1, T=4096, C=256, N=16),
    "segments": Spec(B=8, T=20, C=512, N=64),
    "decode": Spec(B=8, T=1, C=32, N=16),
}
