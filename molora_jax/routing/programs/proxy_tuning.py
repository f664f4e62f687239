"""Proxy tuning (Liu et al. 2024, arXiv 2401.08565, §2): a large model moved by what tuning did to a small one."""

from molora_jax.routing.programs.fused import Fused


class ProxyTuning(Fused):
    """Samples from softmax(l_base + `strength` (l_expert - l_antiexpert)), strength 1 in the paper.

    Models: 0 is the untuned small one (anti-expert), 1 the tuned small one (expert), 2 the base.
    """

    models = 3
    knobs = {"strength": 1.0}

    def fuse(self, params, knobs, state, logits):
        anti, expert, base = logits
        return base + knobs["strength"].astype(logits.dtype) * (expert - anti)
