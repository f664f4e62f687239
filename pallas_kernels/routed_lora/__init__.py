"""Low-rank experts applied token by token: y_n = g_n · s_e · B_e (r_n ⊙ A_e x_n), e the expert of token n."""

from pallas_kernels.routed_lora.api import routed_lora

__all__ = ["routed_lora"]
