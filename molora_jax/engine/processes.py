"""Subservers as processes, which share nothing: each loads its own model; messages travel through pipes, as bytes."""

import contextlib
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import jax
import numpy as np

from molora_jax.config import ModelConfig, Rope, UserError
from molora_jax.engine.blueprint import Blueprint, check_adapters
from molora_jax.engine.messages import FRONT, PLAIN, Kind, Message, decode, encode, forms, read_text, text
from molora_jax.engine.request import EngineConfig
from molora_jax.engine.run import Fleet
from molora_jax.engine.subserver import Subserver
from molora_jax.engine.threads import failed, work
from molora_jax.routing.program import Program

SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
"""Of jax: what decides about tokens, or spares a compilation, is in all processes as in the first."""

PATIENCE = 30.0
"""Seconds that a process is given to end by itself, or to let others write."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a process gets its model, or the program, from: nothing is sent but these strings.

    Attributes:
      factory: "module:function"; called with `arguments`, it gives a `Model`, or a `Program` and its parameters.
      environment: variables set before jax looks for devices, as ("CUDA_VISIBLE_DEVICES", "1").
      cores: CPU cores that the process may use; none: all.
    """

    factory: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    cores: tuple[int, ...] = ()

    def load(self) -> Any:
        """Raises `UserError` for a factory that cannot be found."""
        module, _, name = self.factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"factory: got {self.factory!r}, expected module:function ({error})") from None
        return factory(*self.arguments)


class Mailbox:
    """Messages as bytes, read when they are taken; before `forms` are set only those that tell of no request."""

    def __init__(self):
        self.forms: Mapping[Kind, jax.tree_util.PyTreeDef] = PLAIN
        self._raw: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def put(self, data: bytes) -> None:
        self._raw.put(data)

    def get(self, timeout: float | None = None) -> Message:
        return decode(self._raw.get(timeout=timeout), self.forms)

    def get_nowait(self) -> Message:
        return decode(self._raw.get_nowait(), self.forms)


class Processes:
    """Runs a subserver per model in a process of its own."""

    def __init__(self, models: Sequence[Source], program: Source):
        """Starts the processes, which load their models. A script that does so must be guarded by `__main__`."""
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(len(models) + 1)]
        readers, self._writers = zip(*pipes, strict=True)
        self._locks = [context.Lock() for _ in pipes]
        self.inbox, self._closing, self._processes = Mailbox(), False, []
        settings = tuple(getattr(jax.config, name) for name in SETTINGS)
        for i, source in enumerate(models):
            own = dataclasses.astuple(source), dataclasses.astuple(program), settings
            args = i, *own, readers[i], self._writers, self._locks
            self._processes.append(context.Process(target=_live, args=args, name=f"subserver-{i}", daemon=True))
            self._processes[-1].start()
            readers[i].close()
        threading.Thread(target=self._pump, args=(readers[-1],), daemon=True).start()

    def meet(self, program: Program, config: EngineConfig, **kept) -> Blueprint:
        """Waits until all models are loaded, and says what is to be kept; `kept` are further fields of `Blueprint`.

        Raises:
          UserError: a model that could not be loaded.
        """
        known: dict[int, dict] = {}
        while len(known) < len(self._processes):
            message = self.inbox.get()
            index, line = message.payload
            if message.kind == Kind.FAILED:
                raise UserError(f"models[{index}]: {read_text(line)}")
            known[int(index)] = json.loads(read_text(line))
        told = [known[i] for i in range(len(known))]
        self._plan = dict(
            cfgs=[each["cfg"] for each in told],
            dtypes=[each["dtype"] for each in told],
            experts=any(each["experts"] for each in told),
            config=dataclasses.asdict(config),
            **kept,
        )
        return _blueprint(program, self._plan)

    def start(self) -> None:
        """Lets the subservers be built, after `meet`."""
        for i in range(len(self._processes)):
            self.post(i, Message(Kind.PLAN, text(json.dumps(self._plan))))

    def post(self, to: int, message: Message) -> None:
        """Sends a message to model `to`'s subserver; one that has ended gets none."""
        with contextlib.suppress(OSError):
            send(self._writers, self._locks, to, message)

    def close(self) -> None:
        """Ends all processes, after the run that each may be in."""
        self._closing = True
        for i, process in enumerate(self._processes):
            if process.is_alive():
                self.post(i, Message(Kind.CLOSE))
        for process in self._processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.terminate()
                process.join()

    def _pump(self, reader: Connection) -> None:
        """Takes what comes, so that no sender has to wait, and notices who ends unasked."""
        ends = {process.sentinel: i for i, process in enumerate(self._processes)}
        while ends:
            there = wait([reader, *ends])
            while reader.poll():
                self.inbox.put(reader.recv_bytes())
            for sentinel in ends.keys() & set(there):
                i = ends.pop(sentinel)
                self._processes[i].join()
                if not self._closing:
                    gone = RuntimeError(f"exit code {self._processes[i].exitcode}")
                    self.inbox.put(encode(failed(i, gone)))


def send(writers: Sequence[Connection], locks: Sequence, to: int, message: Message) -> None:
    """All write into the one pipe of whoever reads it, so that what is sent first arrives first.

    Raises:
      OSError: the reader has ended, or a writer in the middle of a message, which nobody can send after.
    """
    data = encode(message)
    if not locks[to].acquire(timeout=PATIENCE):
        raise TimeoutError("a process ended while it wrote")
    try:
        writers[to].send_bytes(data)
    finally:
        locks[to].release()


def _live(index: int, model: tuple, program: tuple, settings: tuple, reader: Connection, writers, locks) -> None:
    """A process from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end decides when to end
    source, mailbox = Source(*model), Mailbox()
    os.environ.update(source.environment)
    if source.cores:
        os.sched_setaffinity(0, source.cores)
    for name, value in zip(SETTINGS, settings, strict=True):
        jax.config.update(name, value)
    post = functools.partial(send, writers, locks)
    threading.Thread(target=_listen, args=(reader, mailbox), daemon=True).start()
    work(index, functools.partial(_build, index, source, Source(*program), mailbox, post), mailbox, post)


def _listen(reader: Connection, mailbox: Mailbox) -> None:
    """Takes what comes, so that no sender has to wait; ends the process with its parent."""
    parent = multiprocessing.parent_process().sentinel
    while parent not in wait([reader, parent]):
        mailbox.put(reader.recv_bytes())
    os._exit(1)


def _build(index: int, source: Source, program: Source, mailbox: Mailbox, post: Callable) -> Subserver | None:
    model = source.load()
    check_adapters([model])
    own = dict(cfg=dataclasses.asdict(model.cfg), dtype=np.dtype(model.dtype).name, experts=model.adapters is not None)
    post(FRONT, Message(Kind.HELLO, (np.int32(index), text(json.dumps(own)))))
    message = mailbox.get()
    if message.kind == Kind.CLOSE:
        return None
    routing, params = program.load()
    blueprint = _blueprint(routing, json.loads(read_text(message.payload)))
    mailbox.forms = forms(jax.eval_shape(lambda: blueprint.table(blueprint.departures(params))))
    return Subserver(index, blueprint, model, params, jax.devices()[0])


def _blueprint(program: Program, plan: Mapping[str, Any]) -> Blueprint:
    config = plan["config"] | dict(pages=plan["config"]["pages"] and tuple(plan["config"]["pages"]))
    fleet = Fleet(tuple(_model_config(cfg) for cfg in plan["cfgs"]), program)
    dtypes = tuple(np.dtype(name) for name in plan["dtypes"])
    kept = {name: plan[name] for name in ("experts", "entropy", "kv_bytes", "shadow")}
    return Blueprint(fleet, EngineConfig(**config), dtypes, **kept)


def _model_config(fields: Mapping[str, Any]) -> ModelConfig:
    ropes = {name: fields[name] and Rope(**fields[name]) for name in ("rope", "local_rope")}
    return ModelConfig(**{**fields, **ropes, "windows": tuple(fields["windows"])})
