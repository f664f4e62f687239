"""Reinforcement from verifiable rewards: of one adapter (stage 1), or of the router over frozen experts (stage 3)."""

import dataclasses
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import jax

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.digest import adapter_digest, composition_digest
from molora_jax.checkpoints import composition, peft
from molora_jax.checkpoints.model import DTYPES, Model
from molora_jax.config import UserError
from molora_jax.data.document import Source
from molora_jax.data.example import Example
from molora_jax.data.questions import TESTBED, source
from molora_jax.training import algorithms, compose, curve, loop, policy_loss, settings, sft, specialist
from molora_jax.training import policy as policies
from molora_jax.training.actor import Actor
from molora_jax.training.collector import Collector, Drawing, Round
from molora_jax.training.optimiser import OptimiserConfig, Schedule
from molora_jax.training.policy import Policy
from molora_jax.training.prompts import Prompts, reward
from molora_jax.training.rlvr_settings import RLVRConfig
from molora_jax.training.step import Metrics, State, Trainer


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run came to, on its problems.

    Attributes:
      out: the folder that it was exported to.
      before, after: problems that were right at the start and in the end, answered greedily.
      sampled_before, sampled_after: likewise, answered at the temperature of the rollouts.
      problems: of how many.
      seconds: of the reinforcement alone, as far as this call did it.
    """

    out: Path
    before: int
    after: int
    sampled_before: int
    sampled_after: int
    problems: int
    seconds: float


def run(config: RLVRConfig, folder: Path | str, *, progress: bool = True) -> Result:
    """Trains an adapter, or resumes the run in `folder`, and exports.

    The folder gets `start`, where the supervised run is that it starts from, `config.json`, `checkpoints`,
    `metrics.jsonl`, `tensorboard`, `reward.png` and `adapter`, a PEFT folder.

    Raises:
      UserError: any input that cannot be used.
    """
    folder = Path(folder)
    model, _ = sft.load(config)
    adapter = dataclasses.replace(_start(config, model, folder, progress), name=folder.resolve().name)
    settings.remember(config, folder, start=adapter_digest(adapter))
    policy = policies.of_adapter(model, adapter, rate=config.rate, remat=config.remat)
    found, seconds = _reinforced(config, folder, model, policy, specialist.count(adapter), progress)
    peft.save(folder / "adapter", model.cfg, found)
    result = _result(config, folder, folder / "adapter", seconds)
    print(f"adapter: --model={config.model} --adapters={found.name}={result.out} --adapter={found.name}")
    return result


def refine(
    config: RLVRConfig, folder: Path | str, model: Model, found: Composition, *, progress: bool = True
) -> Result:
    """The optional third stage: the router and the attention LoRA of a composition learn from rewards, experts frozen.

    Trains or resumes as `run` does, from the composition; the config's `start`, `adapter` and `sft_*` do not count. The
    folder gets `router` and `attention`.

    Raises:
      UserError: any input that cannot be used, or a router that `policy.of_composition` refuses.
    """
    folder = Path(folder)
    rates = dict(rate=config.rate, router_rate=config.router_rate)
    policy = policies.of_composition(model, found, **rates, remat=config.remat)
    experts = [adapter_digest(expert) for expert in found.experts]
    settings.remember(config, folder, start=composition_digest(found), experts=experts)
    count = sum(compose.parameters(found).values())
    trained, seconds = _reinforced(config, folder, model, policy, count, progress)
    composition.save(folder, model, trained)
    return _result(config, folder, folder, seconds)


def _reinforced(
    config: RLVRConfig, folder: Path, model: Model, policy: Policy, count: int, progress: bool
) -> tuple[Any, float]:
    """What a policy has learnt in the end, and the seconds."""
    if jax.process_count() > 1:
        raise UserError(f"rlvr: got {jax.process_count()} processes, expected one: its engine plays on one device")
    learner = Learner.of(config, model, policy)
    print(
        f"rlvr: {config.algorithm}, {config.steps} batches of {config.prompts} prompts × {config.per_prompt} rollouts, "
        f"{count:,} parameters train",
        flush=True,
    )
    begun = time.monotonic()
    state = loop.run(
        learner,
        learner.collector,
        loop.LoopConfig(
            steps=config.steps,
            log_every=config.log_every,
            evaluate_every=config.evaluate_every or config.steps,
            save_every=config.save_every,
            score="accuracy",
            best="highest",
        ),
        folder=folder,
        evaluate=functools.partial(learner.evaluate, _problems(config)),
        progress=progress,
    )
    return learner.trained(state), time.monotonic() - begun


class Learner:
    """A trainer for `training.loop` whose steps are the updates by one batch of rollouts.

    Attributes:
      trainer: of the policy.
      actor: plays it.
      collector: draws the batches.
    """

    def __init__(self, config: RLVRConfig, trainer: Trainer, actor: Actor, prompts: Prompts, scores):
        self.config, self.trainer, self.actor = config, trainer, actor
        start = trainer.computed(trainer.init())
        dtype = start["params"]["embed"]["weight"].dtype
        how = dict(trained=self.trained, tree=trainer.computed, start=start, scores=scores, dtype=dtype)
        self.collector = Collector(drawing(config), actor, prompts, **how)

    @classmethod
    def of(cls, config: RLVRConfig, model: Model, policy: Policy) -> "Learner":
        """That of a run, which starts from the policy as it is."""
        how = dict(temperature=config.temperature)
        algorithm = algorithms.algorithm(config.algorithm)
        loss = policy_loss.loss(model.cfg, algorithm, policy.decode, beta=config.beta, **how)
        trainer = Trainer(
            policy.tree,
            loss,
            OptimiserConfig(
                groups=policy.groups,
                schedule=Schedule(warmup=config.warmup),
                clip=config.clip,
            ),
            accumulate=config.accumulate,
            dtype=None if config.dtype is None else DTYPES[config.dtype],
            seed=config.seed,
        )
        actor = Actor(
            model.cfg,
            model.tokenizer,
            policy,
            rows=config.prompts * config.per_prompt,
            length=config.length,
            most=config.max_new_tokens,
        )
        scores = jax.jit(functools.partial(policy_loss.logprobs, model.cfg, policy.decode, **how))
        return cls(config, trainer, actor, _prompts(config, model), scores)

    def init(self) -> State:
        """Before the first batch."""
        return self.trainer.init()

    def step(self, state: State, drawn: Round) -> tuple[State, Metrics]:
        """After `config.updates` updates by as many parts of the batch; the numbers are their means."""
        parts, found = self.config.updates, []
        for number in range(parts):
            state, metrics = self.trainer.step(state, drawn.experience.rows(slice(number, None, parts)))
            found.append(metrics)
        mean = {name: sum(metrics[name] for metrics in found) / parts for name in found[0]}
        finite = functools.reduce(lambda a, b: a & b, (metrics["finite"] for metrics in found))
        return state, drawn.facts | mean | dict(finite=finite)

    def trained(self, state: State) -> Any:
        """The adapter or the composition as it is in `state`."""
        return self.actor.policy.trained(self.trainer.tree(state))

    def evaluate(self, problems: list[Example], state: State) -> dict[str, float]:
        """How it does on some problems."""
        self.actor.sync(self.trained(state))
        return self.actor.solves(problems, reward(self.config.reward), temperature=self.config.temperature)


def drawing(config: RLVRConfig) -> Drawing:
    """How the batches of a run are drawn."""
    return Drawing(
        how=algorithms.algorithm(config.algorithm),
        prompts=config.prompts,
        per_prompt=config.per_prompt,
        temperature=config.temperature,
        reward=reward(config.reward),
        overlong=config.overlong,
        mask_truncated=config.mask_truncated,
        shuffled=config.shuffled_rewards,
        beta=config.beta,
        updates=config.updates,
        seed=config.seed,
    )


def _start(config: RLVRConfig, model: Model, folder: Path, progress: bool) -> Adapter:
    """The adapter of `config.start`, that of a short supervised run, or one that changes nothing yet."""
    if config.start is None and not config.sft_steps:
        return specialist.new(model.cfg, model.params, config.adapter, folder.name, seed=config.seed)
    start = Path(config.start) if config.start else folder / "start" / "adapter"
    if config.start is None and not start.exists():
        supervised = settings.SFTConfig(
            model=config.model,
            dtype=config.dtype,
            data=config.data,
            data_dir=config.data_dir,
            strict=config.strict,
            adapter=config.adapter,
            rows=config.sft_rows,
            length=config.sft_length,
            steps=config.sft_steps,
            rate=config.sft_rate,
            warmup=config.sft_steps // 10,
            seed=config.seed,
            remat=config.remat,
            evaluate_every=config.sft_steps,
            save_every=config.sft_steps,
        )
        sft.run(supervised, start.parent, progress=progress)
    return peft.load(start, model.cfg)[0]


def _prompts(config: RLVRConfig, model: Model) -> Prompts:
    """Those that leave room for what follows them."""
    how = dict(levels=config.levels, signs=config.signs)
    found = source(config.data, "train", data_dir=config.data_dir, strict=config.strict, **how)
    if not config.data.startswith(TESTBED):
        room = config.length - config.max_new_tokens
        kept = [example for example in found if len(model.tokenizer.encode(example.prompt)) <= room]
        print(f"data: {config.data}, {len(kept)} prompts of at most {room} tokens, {len(found) - len(kept)} left out")
        found = kept
    return Prompts(found, config.seed)


def _problems(config: RLVRConfig) -> list[Example]:
    """The first of the split."""
    found: Source[Example] = source(config.data, config.split, data_dir=config.data_dir, strict=config.strict)
    return [found[i] for i in itertools.islice(range(len(found)), config.problems)]


def _result(config: RLVRConfig, folder: Path, out: Path, seconds: float) -> Result:
    """Read off the run's own numbers, and told."""
    picture = curve.rewards(
        folder, f"{config.algorithm} on {config.data}" + ", rewards shuffled" * config.shuffled_rewards
    )
    right, sampled, count = (curve.values(folder, f"eval_{name}")[1] for name in ("right", "sampled_right", "problems"))
    ends = [int(values[i]) for values in (right, sampled) for i in (0, -1)]
    result = Result(out, *ends, int(count[0]), seconds)
    print(
        f"{config.split} problems right: {result.before} of {result.problems} before, {result.after} after "
        f"{config.steps} batches; sampled, {result.sampled_before} and {result.sampled_after}; {seconds:.0f} s"
    )
    if picture:
        print(f"curve: {picture}")
    return result
