"""The routers that hundreds of questions can train, and how."""

import dataclasses

from molora_jax.retrieval.comparison import Inputs
from molora_jax.retrieval.mara import MaraConfig
from molora_jax.retrieval.mixers import ORDER_FREE, Kind
from molora_jax.retrieval.training import TrainingConfig

TRAINING = TrainingConfig(passes=3, epochs=10, rows=16, rate=5e-3, encoding_rate=2e-4, dropout=0.5)


def router(inputs: Inputs, *, bare: bool = False, mixer: Kind = "sorted") -> MaraConfig:
    """A small router, chained, with the channels and links that the inputs have; `bare` reads encodings alone.

    Unlike the published one it pools by mean unless the inputs are tokens; it has an eighth of the width, half the
    layers, a quarter of the states, and no global head where the mixer is free of the candidates' order.
    """
    beside = {} if bare else dict(channels=inputs.beside.channels, links=inputs.beside.links)
    pooling = "attention" if inputs.pooling == "attention" else "mean"
    small = dict(width=32, layers=1, states=16, slots=0 if mixer in ORDER_FREE else 20, pooling=pooling)
    return MaraConfig(encoding=inputs.width, mixer=mixer, chained=True, standard=True, **small, **beside)


def rivals(inputs: Inputs) -> dict[str, MaraConfig]:
    """The same with other mixers in Mamba's place, and with none."""
    found = {mixer: router(inputs, mixer=mixer) for mixer in ("mamba", "bimamba", "transformer", "gru", "mlp")}
    return found | {"alone": dataclasses.replace(router(inputs, mixer="mlp"), layers=0)}
