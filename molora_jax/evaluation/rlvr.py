"""What a run of reinforcement gave: accuracy before and after on held-out problems, with intervals."""

import json
from pathlib import Path

from molora_jax.config import UserError
from molora_jax.evaluation.accuracy import Accuracy
from molora_jax.training.grpo import Result
from molora_jax.training.rlvr_settings import RLVRConfig

REPORT = "report.json"


def report(config: RLVRConfig, result: Result, folder: Path) -> str:
    """Writes `report.json` into the folder of a run, and says it in a line.

    Raises:
      UserError: the folder cannot be written to.
    """
    names = ("before", "after", "sampled_before", "sampled_after")
    found = {name: Accuracy(getattr(result, name), result.problems) for name in names}
    values = dict(
        data=config.data,
        split=config.split,
        algorithm=config.algorithm,
        shuffled_rewards=config.shuffled_rewards,
        seed=config.seed,
        steps=config.steps,
        rollouts=config.steps * config.prompts * config.per_prompt,
        problems=result.problems,
        seconds=round(result.seconds, 1),
        **{name: _values(accuracy) for name, accuracy in found.items()},
    )
    try:
        (folder / REPORT).write_text(json.dumps(values, indent=1) + "\n")
    except OSError as e:
        raise UserError(f"{folder}: got {e.strerror!r} writing there, expected a folder with room") from None
    said = {way: f"{found[way + 'before']} right before, {found[way + 'after']} after" for way in ("", "sampled_")}
    return f"{config.data}: greedy, {said['']}; sampled, {said['sampled_']}; {folder / REPORT}"


def _values(accuracy: Accuracy) -> dict[str, float]:
    """Without the number of problems, which is the same for all."""
    return {name: value for name, value in accuracy.values.items() if name != "n"}
