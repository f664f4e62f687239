"""Subservers without threads: who acts next is drawn from a seed, so that any order of events can be had again."""

import collections
import queue
import time

import numpy as np

from molora_jax.engine.messages import FRONT, Kind, Message, decode, encode
from molora_jax.engine.subserver import Subserver


class Puppets:
    """Stands for `Threads` or `Processes`; every message takes its form as bytes on the way."""

    def __init__(self, subservers: list[Subserver], forms, seed: int):
        self.subservers, self.forms, self.rng = subservers, forms, np.random.default_rng(seed)
        self.inbox = self
        self._mail = [collections.deque() for _ in (*subservers, FRONT)]
        self.sent = collections.Counter()

    def start(self) -> None:
        for i in range(len(self.subservers)):
            self.post(FRONT, Message(Kind.READY, np.int32(i)))

    def close(self) -> None:
        pass

    def post(self, to: int, message: Message) -> None:
        self.sent[message.kind] += 1
        self._mail[to].append(encode(message))

    def get_nowait(self) -> Message:
        if not self._mail[FRONT]:
            raise queue.Empty
        return decode(self._mail[FRONT].popleft(), self.forms)

    def get(self, timeout: float | None = None) -> Message:
        """The front end waits, and the others act, until it gets something or nobody can act any more."""
        while not self._mail[FRONT] and self._act():
            pass
        return self.get_nowait()

    def _act(self) -> bool:
        """One of them takes some of its messages, or runs its model."""
        patience = [subserver.patience() for subserver in self.subservers]
        able = [i for i, wait in enumerate(patience) if self._mail[i] or wait == 0]
        if not able:
            finite = [wait for wait in patience if wait is not None]
            time.sleep(min(finite, default=0))
            return bool(finite)
        i = self.rng.choice(able)
        for _ in range(self.rng.integers(0, len(self._mail[i]) + 1)):
            self.subservers[i].handle(decode(self._mail[i].popleft(), self.forms))
        if self.subservers[i].patience() == 0 and self.rng.random() < 0.7:
            for to, message in self.subservers[i].run():
                self.post(to, message)
        return True
