"""The loop of a subserver, in whatever thread or process: messages are taken in between runs."""

import queue
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from molora_jax.engine.messages import FRONT, Kind, Message
from molora_jax.engine.subserver import Subserver


class Inbox(Protocol):
    """A queue of messages; raises `queue.Empty` as `queue.SimpleQueue` does."""

    def get(self, timeout: float | None = None) -> Message: ...

    def get_nowait(self) -> Message: ...


def serve(subserver: Subserver, inbox: Inbox, post: Callable[[int, Message], None]) -> None:
    """Serves until a message says to close."""
    patience: float | None = 0.0
    while True:
        for message in taken(inbox, patience):
            if message.kind == Kind.CLOSE:
                return
            if message.kind == Kind.TIME:
                times = subserver.time(*map(int, message.payload))
                post(FRONT, Message(Kind.TIMES, (np.int32(subserver.index), times.seconds, np.float64(times.look))))
                continue
            subserver.handle(message)
        patience = subserver.patience()
        if patience == 0:
            for to, message in subserver.run():
                post(to, message)


def taken(inbox: Inbox, timeout: float | None) -> Iterator[Message]:
    """The messages that are there; the first is waited for."""
    try:
        yield inbox.get(timeout=timeout)
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return
