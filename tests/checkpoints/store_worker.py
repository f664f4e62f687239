"""Saves to a folder until it is killed, or until the largest file that it may write is too small."""

import resource
import signal
import sys

import jax.numpy as jnp
import numpy as np

from molora_jax.checkpoints.store import Store
from molora_jax.config import UserError


def arrays(step: int) -> dict:
    rng = np.random.default_rng(step)
    return {f"trained/{i}.w": jnp.asarray(rng.standard_normal(50_000), jnp.float32) for i in range(4)}


def main(folder: str, how: str) -> None:
    with Store(folder) as store:
        if how == "forever":
            for step in range(10**6):
                store.save(step, arrays(step), dict(step=step))
                print(step, flush=True)
        store.save(1, arrays(1), score=1.0)
        store.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        store.save(2, arrays(2), score=0.5)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as e:
        sys.exit(f"error: {e}")
