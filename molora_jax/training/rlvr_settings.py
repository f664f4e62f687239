"""The settings of a run of reinforcement from verifiable rewards."""

import dataclasses

from molora_jax.checkpoints.model import DTYPES
from molora_jax.config import UserError
from molora_jax.data.questions import BARE
from molora_jax.data.testbed.recipe import INTERLEAVED, SEVERAL
from molora_jax.training.algorithms import algorithm
from molora_jax.training.prompts import reward
from molora_jax.training.settings import FREE
from molora_jax.training.specialist import AdapterConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLVRConfig:
    """One run. It takes one device.

    Attributes:
      model: a folder, a .gguf file, `testbed:large`, `pypi:PACKAGE` or a hub name.
      dtype: as in `settings.SFTConfig`.
      data: `testbed:DOMAIN`, or a benchmark of `data.tasks`.
      data_dir: folder of the benchmarks; by default the one that MOLORA_DATA_DIR names.
      strict: a malformed row is an error; otherwise it is skipped and counted.
      levels, signs: difficulties of the prompts from the testbed, and their share of signs, the operations that a
        domain reads by its own rule; its problems stay those of the specialist's task.
      start: folder of the adapter that it starts from, and whose kind and rank it keeps; by default one of a short
        supervised run.
      adapter: what trains, where `start` does not say it.
      sft_steps, sft_rate, sft_rows, sft_length: of the supervised run; without steps the adapter starts from nothing.
      algorithm: one of `algorithms.ALGORITHMS`.
      reward: `testbed`, `exact` or `released`.
      prompts: P of a batch.
      per_prompt: G rollouts of each.
      length: most tokens of a prompt and what follows it.
      max_new_tokens: most that follows it; prompts that leave less room are left out.
      temperature: of the rollouts.
      updates: parts that a batch is cut into, each an update.
      accumulate: microbatches that each of these is cut into.
      steps: batches of the run.
      rate, router_rate: learning rates, constant after `warmup` updates; the second is that of a router (stage 3).
      clip: largest norm of the gradient.
      beta: weight of the KL to the adapter that it starts from.
      overlong: last tokens of `max_new_tokens` over which DAPO's penalty on length grows; 0 for none.
      mask_truncated: rollouts that were cut at their limit are not learnt from.
      shuffled_rewards: a control: rewards are permuted within the batch, so that nothing can be learnt.
      seed: of the adapter, the order of the data, the rollouts.
      remat: computes each layer once more in the backward pass: less memory, about a third more time.
      problems: on which it is evaluated, the same ones for every seed.
      split: of these problems.
      log_every, evaluate_every, save_every: batches between two lines, evaluations (0: before and after), checkpoints.
    """

    model: str = "testbed:large"
    dtype: str | None = None
    data: str = "testbed:calc"
    data_dir: str | None = None
    strict: bool = False
    levels: tuple[int, ...] = (1, 2)
    signs: float = 0.5
    start: str | None = None
    adapter: AdapterConfig = AdapterConfig()
    sft_steps: int = 40
    sft_rate: float = 2e-3
    sft_rows: int = 8
    sft_length: int = 128
    algorithm: str = "grpo"
    reward: str = "testbed"
    prompts: int = 16
    per_prompt: int = 8
    length: int = 64
    max_new_tokens: int = 44
    temperature: float = 1.0
    updates: int = 1
    accumulate: int = 1
    steps: int = 40
    rate: float = 1e-3
    router_rate: float = 1e-3
    warmup: int = 0
    clip: float = 1.0
    beta: float = 0.0
    overlong: int = 0
    mask_truncated: bool = False
    shuffled_rewards: bool = False
    seed: int = 0
    remat: bool = False
    problems: int = 256
    split: str = "test"
    log_every: int = 1
    evaluate_every: int = 0
    save_every: int = 20

    @property
    def free(self) -> tuple[str, ...]:
        """What may change when it is resumed."""
        return (*FREE, "steps")

    def __post_init__(self):
        algorithm(self.algorithm)
        reward(self.reward)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"config: got dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.per_prompt < 2:
            raise UserError(f"config: got {self.per_prompt} rollouts of a prompt, expected at least 2 to compare")
        rows, parts = self.prompts * self.per_prompt, self.updates * self.accumulate
        if min(self.prompts, self.updates, self.accumulate) < 1 or rows % parts:
            raise UserError(
                f"config: got {rows} rollouts in {self.updates} updates of {self.accumulate} microbatches, "
                "expected a multiple"
            )
        rates = self.rate, self.router_rate, self.sft_rate
        if min(*rates, self.clip, self.temperature) <= 0 or min(self.beta, self.sft_steps) < 0:
            raise UserError("config: got a rate, clip, temperature or weight out of range, expected positive ones")
        if not 0 < self.max_new_tokens < self.length or not 0 <= self.overlong <= self.max_new_tokens:
            raise UserError(
                f"config: got max_new_tokens={self.max_new_tokens} and overlong={self.overlong} for rows of "
                f"{self.length}, expected fewer than that, and no more than it"
            )
        if self.problems < 1:
            raise UserError(f"config: got {self.problems} problems, expected at least one")


ROOM = {"calc": (20, 44), "logic": (38, 42), "text": (20, 52), "list": (20, 44), "date": (32, 58)}
ROOM |= dict.fromkeys((SEVERAL, BARE, INTERLEAVED), (48, 80))
"""Tokens of the longest prompt and of what follows it, by domain of the testbed, and of its prompts of several."""


def testbed(name: str, **how) -> RLVRConfig:
    """The settings of a domain of the testbed, or of its prompts of several domains, for a router: a short supervised
    start of what is an adapter, then its task; `how` are other fields.

    Raises:
      UserError: there is no such domain.
    """
    if name not in ROOM:
        raise UserError(f"config: got {name!r}, expected one of {', '.join(ROOM)}")
    prompt, most = ROOM[name]
    own = dict(data=f"testbed:{name}", length=prompt + most, max_new_tokens=most)
    return RLVRConfig(**own | dict(sft_steps=16, levels=(1, 2, 3), signs=0.25) | how)
