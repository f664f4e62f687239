"""Accelerator kernels with gradients, each beside its reference and an XLA path; independent of the models."""
