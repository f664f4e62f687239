"""The models that requests are routed between, from what a user types: by name, or one with layers left out."""

import itertools
import re
from collections.abc import Sequence

from molora_jax.checkpoints import model as models
from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.models.depth import without_layers


def load(
    model: str | None,
    names: Sequence[str],
    drop_layers: Sequence[str],
    *,
    dtype: str | None = None,
    stacked: bool | None = None,
) -> list[Model]:
    """The models from the quickest to the slowest.

    Args:
      model: the slowest, alone or with `drop_layers`; else `names` are all of them.
      drop_layers: a quicker model for each: `model` without the layers "FIRST-LAST", or "FIRST-LAST+FIRST-LAST".

    Raises:
      UserError: a flag that reads otherwise, or a model that cannot be read.
    """
    if (model is None) == (not names) or (names and drop_layers):
        raise UserError(
            "models: got --model and --models, or neither, expected --model with --drop_layers, or --models"
        )
    if names:
        return [models.load(name, dtype=dtype, stacked=stacked) for name in names]
    left_out = [cuts(each) for each in drop_layers]
    full = models.load(model, dtype=dtype, stacked=stacked)
    return [*(_shallow(full, each) for each in left_out), full]


def cuts(text: str) -> list[tuple[int, int]]:
    """The runs of layers that "FIRST-LAST+FIRST-LAST" names, in ascending order."""
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split("+")]
    if not all(parts):
        raise UserError(f"drop_layers: got {text!r}, expected FIRST-LAST, as 12-17, or several with + between them")
    found = sorted((int(part[1]), int(part[2] or part[1])) for part in parts)
    if any(following[0] <= before[1] for before, following in itertools.pairwise(found)):
        raise UserError(f"drop_layers: got {text!r}, expected runs of layers without one in common")
    return found


def _shallow(full: Model, left_out: list[tuple[int, int]]) -> Model:
    cfg, params = full.cfg, full.params
    for first, last in reversed(left_out):  # from above, so that the numbers below stay what they are
        cfg, params = without_layers(cfg, params, first, last)
    return Model(cfg, params, full.tokenizer)


def one_tokenizer(found: Sequence[Model]) -> bool:
    """Whether all models have the same tokens; the sizes of their tables may differ."""
    words = [model.tokenizer.backend.get_vocab(with_added_tokens=True) for model in found]
    return all(own == words[-1] for own in words)
