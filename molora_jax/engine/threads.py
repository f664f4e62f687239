"""Subservers as threads of one process, each on a device; compiled programs let go of the interpreter's lock."""

import functools
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

from molora_jax.engine.loop import Inbox, serve
from molora_jax.engine.messages import FRONT, Kind, Message, text
from molora_jax.engine.subserver import Subserver


class Threads:
    """Runs a subserver per model; messages are handed over as they are."""

    def __init__(self, builders: Sequence[Callable[[], Subserver]]):
        """Each of the threads calls its own of `builders`."""
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inboxes = [*(queue.SimpleQueue() for _ in builders), self.inbox]  # the front end's last: `FRONT`
        self._threads = []
        for i, build in enumerate(builders):
            args = i, build, self._inboxes[i], functools.partial(post, self._inboxes)
            self._threads.append(threading.Thread(target=work, args=args, name=f"subserver-{i}", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def post(self, to: int, message: Message) -> None:
        """Sends a message to model `to`'s subserver."""
        self._inboxes[to].put(message)

    def close(self) -> None:
        """Ends all subservers, after the run that each may be in."""
        for i, thread in enumerate(self._threads):
            self.post(i, Message(Kind.CLOSE))
            if thread.ident is not None:
                thread.join()


def post(inboxes: Sequence[queue.SimpleQueue], to: int, message: Message) -> None:
    inboxes[to].put(message)


def work(index: int, build: Callable[[], Subserver | None], inbox: Inbox, post: Callable) -> None:
    """Builds a subserver, if one is wanted, and lets it serve; what goes wrong is told to the front end in one line."""
    try:
        subserver = build()
        if subserver is None:
            return
        subserver.warm_up()
        post(FRONT, Message(Kind.READY, np.int32(index)))
        serve(subserver, inbox, post)
    except BaseException as error:
        post(FRONT, failed(index, error))


def failed(index: int, error: BaseException) -> Message:
    """What a subserver says before it ends: the kind of error and its first line."""
    line = next(iter(str(error).splitlines()), "")
    return Message(Kind.FAILED, (np.int32(index), text(f"{type(error).__name__}: {line}")))
