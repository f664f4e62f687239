"""The selective state-space scan of Mamba, with an initial state, a final state, pads and packed rows."""

from pallas_kernels.selective_scan.api import selective_scan

__all__ = ["selective_scan"]
