"""Step-synchronous routing: all models run what they have at once, and nobody goes on before the last one ends."""

import collections
import concurrent.futures
import queue
from collections.abc import Callable, Sequence

import numpy as np

from molora_jax.engine.messages import FRONT, Kind, Message
from molora_jax.engine.subserver import Subserver


class Rounds:
    """Stands for `engine.threads.Threads`: messages are given out between rounds only."""

    def __init__(self, builders: Sequence[Callable[[], Subserver]]):
        self._subservers = [build() for build in builders]
        self._mail = [collections.deque() for _ in (*builders, FRONT)]
        self._pool = concurrent.futures.ThreadPoolExecutor(len(builders))
        self.inbox = self

    def start(self) -> None:
        for i, subserver in enumerate(self._subservers):
            subserver.warm_up()
            self.post(FRONT, Message(Kind.READY, np.int32(i)))

    def post(self, to: int, message: Message) -> None:
        self._mail[to].append(message)

    def get_nowait(self) -> Message:
        if not self._mail[FRONT]:
            raise queue.Empty
        return self._mail[FRONT].popleft()

    def get(self, timeout: float | None = None) -> Message:
        """Plays rounds until the front end is told something."""
        while not self._mail[FRONT] and self._round():
            pass
        return self.get_nowait()

    def _round(self) -> bool:
        for subserver, mail in zip(self._subservers, self._mail, strict=False):
            while mail:
                subserver.handle(mail.popleft())
        able = [subserver for subserver in self._subservers if subserver.patience() == 0]
        for posts in list(self._pool.map(Subserver.run, able)):
            for to, message in posts:
                self.post(to, message)
        return bool(able)

    def close(self) -> None:
        self._pool.shutdown()
