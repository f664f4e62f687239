"""What a policy writes after prompts, sampled by the project's own engine, with the log-probability of every token.

    library = Library(BankSpec.holding([adapter]), model.params)
    library.add(adapter)
    engine = Engine(model.cfg, model.params, EngineConfig(max_rows=128, max_length=128, block=128),
                    Experts(library, model.cfg.vocab))
    found = rollouts(engine, prompts, per_prompt=8, max_new_tokens=96, stops=model.tokenizer.eos, adapter=adapter.name)
    library.add(updated)     # the same name and sizes, other values: the next rollouts are of it; nothing compiles

`adapter=None` leaves the experts to the engine's rule or router, or is the base alone. An engine with
`EngineConfig(trace=True)` gives back which expert each token used, for the update to replay (`chosen`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from molora_jax.adapters.route import NONE
from molora_jax.config import UserError
from molora_jax.engine.engine import Engine
from molora_jax.engine.request import Event, Request
from molora_jax.typing import Int


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One continuation of a prompt.

    Attributes:
      prompt: token ids.
      tokens: those that were sampled; of a finished one the last is the stop token.
      logprobs: of each of them, under the distribution that it was drawn from.
      finished: whether a stop token ended it; otherwise it was cut at its limit.
      trace: names of the experts that each token read, prompt first, the last token apart, which nothing has read:
        [tokens - 1][choices]; None of an engine that does not record them.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finished: bool
    trace: list[list[str | None]] | None = None


def rollouts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    per_prompt: int,
    max_new_tokens: int,
    stops: Sequence[int],
    temperature: float = 1.0,
    adapter: str | None = None,
    seed: int = 0,
) -> list[Rollout]:
    """`per_prompt` continuations of each prompt: those of the first, then those of the second, and so on.

    The same engine configuration, experts, prompts and seed give the same rollouts, bit for bit, whatever the engine
    has done before. Prompts may be few or many: those beyond the engine's rows wait.

    Args:
      max_new_tokens: of each; less where the engine's `max_length` leaves less.
      stops: tokens that end a continuation.
      temperature: at 0 all continuations of a prompt are the greedy one, its log-probabilities those at 1.
      seed: every continuation has a seed of its own, drawn from this one.

    Raises:
      UserError: an engine that is busy, a prompt that fills the engine's length, an adapter that is not there.
    """
    if per_prompt < 1 or not prompts:
        raise UserError(f"rollouts: got {len(prompts)} prompts, {per_prompt} each, expected at least one of one")
    room = engine.config.max_length
    if (longest := max(map(len, prompts))) >= room:
        raise UserError(f"rollouts: got a prompt of {longest} tokens, expected fewer than the engine's {room}")
    engine.forget()
    count = len(prompts) * per_prompt
    seeds = np.random.SeedSequence(seed).generate_state(count).reshape(len(prompts), per_prompt)
    how = dict(temperature=temperature, stops=tuple(stops), adapter=adapter, logprobs=True, tempered=True)
    # the first of every prompt goes first, so that the others find its pages; a prompt's own would wait for each other
    order = [(i, j) for j in range(per_prompt) for i in range(len(prompts))]
    requests = [
        Request(
            prompt=prompts[i],
            max_new_tokens=min(max_new_tokens, room - len(prompts[i])),
            seed=int(seeds[i, j]),
            **how,
        )
        for i, j in order
    ]
    found = dict(zip(order, engine.run(requests), strict=True))
    return [_rollout(prompts[i], found[i, j]) for i, j in sorted(order)]


def _rollout(prompt: Sequence[int], event: Event) -> Rollout:
    return Rollout(list(prompt), event.tokens, event.logprobs, event.finished == "stop", event.trace)


def chosen(rollout: Rollout, slots: Mapping[str, int]) -> Int[np.ndarray, "T K"]:
    """The recorded experts of all tokens, prompt first, as slots of a bank; K choices, as `engine.experts.traced` has.

    The last token, which nothing has read, has none.

    Args:
      slots: of the experts by name, as `Library.resident` gives them.

    Raises:
      UserError: nothing was recorded.
    """
    if rollout.trace is None:
        raise UserError("rollouts: got none of the experts that were used, expected an engine with trace=True")
    numbers = {None: NONE, **slots}
    ids = [[numbers[name] for name in row] for row in rollout.trace]
    return np.array([*ids, [NONE] * len(ids[0])], np.int32)
