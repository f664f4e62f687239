"""Whether two mathematical answers are the same, decided in worker processes that may be killed.

Plain numbers are compared exactly and at once. Anything else goes to math-verify (the extra `train`), whose parser can
run forever or fill the memory on a model's output, and whose own timeouts need a main thread. So each comparison runs
in a process of its own (`math_worker.py`) and gets so many seconds; one that takes longer counts as different and its
process is replaced.
"""

import atexit
import concurrent.futures
import fractions
import functools
import importlib.util
import json
import queue
import re
import selectors
import subprocess
import sys
from collections.abc import Sequence

from molora_jax.config import UserError

_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d*)?|[-+]?\.\d+")
_START_SECONDS = 60.0


def number(text: str) -> fractions.Fraction | None:
    """The value of a plain number; `$`, commas between thousands and a full stop at the end are allowed."""
    plain = text.strip().replace("$", "").removesuffix(".").strip()
    if len(plain) > 100 or not _NUMBER.fullmatch(plain):
        return None
    return fractions.Fraction(plain.replace(",", "").removesuffix("."))


def equal(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether each (expected, given) pair is the same; comparisons that need math-verify share `default_pool()`."""
    results: list[bool | None] = []
    for expected, given in pairs:
        a, b = number(expected), number(given)
        results.append(a == b if a is not None and b is not None else True if expected == given else None)
    hard = [i for i, result in enumerate(results) if result is None]
    if hard:
        for i, result in zip(hard, default_pool().equal([pairs[i] for i in hard]), strict=True):
            results[i] = result
    return results


@functools.cache
def default_pool() -> "Pool":
    """Two workers with five seconds a comparison, closed when the program ends."""
    pool = Pool(workers=2, seconds=5.0)
    atexit.register(pool.close)
    return pool


class Pool:
    """Worker processes that compare answers with math-verify.

    Args:
      workers: number of processes; each is started when it is first needed.
      seconds: time of one comparison.
    """

    def __init__(self, *, workers: int, seconds: float):
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("maths: the package math-verify is missing; pip install 'molora_jax[train]'")
        self._seconds = seconds
        self._threads = concurrent.futures.ThreadPoolExecutor(workers)
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker() for _ in range(workers)]
        for worker in self._all:
            self._workers.put(worker)

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether `given` means the same as `expected`, in order of the pairs; the relation is not symmetric.

        math-verify takes an expected inequality for a given interval, but not the other way round.
        """
        return list(self._threads.map(self._one, pairs))

    def _one(self, pair: tuple[str, str]) -> bool:
        worker = self._workers.get()
        try:
            return worker.equal(pair, self._seconds)
        finally:
            self._workers.put(worker)

    def close(self) -> None:
        """Ends the processes."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.stop()


class _Worker:
    """One process, spoken to in lines of JSON."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def equal(self, pair: tuple[str, str], seconds: float) -> bool:
        """False when the process does not answer in time or dies of the comparison."""
        try:
            process = self._started()
            process.stdin.write(json.dumps(pair).encode() + b"\n")
            process.stdin.flush()
            answer = self._line(seconds)
        except BrokenPipeError:
            answer = b""
        if not answer:
            self.stop()
        return answer == b"true\n"

    def _started(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            command = [sys.executable, "-m", "molora_jax.data.tasks.math_worker"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if self._line(_START_SECONDS) != b"ready\n":
                self.stop()
                raise UserError(f"maths: the process of math-verify does not start; try {' '.join(command)}")
        return self._process

    def _line(self, seconds: float) -> bytes:
        """The next line of the process, empty when none comes in time. It writes a line at once, so one byte is all."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() if selector.select(seconds) else b""

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None
