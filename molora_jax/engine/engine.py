"""Continuous batching of one model: requests come in, blocks of tokens go out."""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.config import ModelConfig, UserError
from molora_jax.engine import buckets as bucketing
from molora_jax.engine.buckets import Bucket
from molora_jax.engine.experts import Assignment, Experts
from molora_jax.engine.extend import Report, advance
from molora_jax.engine.request import EngineConfig, Event, Request, Usage, check, check_sizes, entry, run_all
from molora_jax.engine.slots import Lease, Slots, pages_for
from molora_jax.engine.table import Entry, enter, new_memory, new_table, stop
from molora_jax.typing import Params


@dataclasses.dataclass
class _Running:
    """The host's view of a request that has a slot."""

    id: int
    request: Request
    lease: Lease
    tokens: list[int]
    anchor: int
    experts: Assignment | None = None

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.anchor


class Engine:
    """Runs requests on one model; programs are compiled ahead, one a bucket, and never again."""

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        config: EngineConfig = EngineConfig(),
        experts: Experts | None = None,
    ):
        check_sizes(config)
        if config.pages is not None and len(config.pages) != len(cfg.kinds):
            raise UserError(f"pages: got {len(config.pages)}, expected {len(cfg.kinds)}, one for each kind of layer")
        self.cfg, self.params, self.config, self.experts = cfg, params, config, experts
        chunk = min(config.prefill_chunk, config.max_length)
        self.decode = bucketing.decode_buckets(config.max_rows, config.block)
        self.prefill = bucketing.prefill_buckets(config.max_rows, chunk)
        sizes = dict(slots=config.max_rows, length=config.max_length, page_size=config.page_size)
        pages = config.pages or pages_for(cfg.kinds, chunk=chunk, **sizes)
        self.slots = Slots(cfg.kinds, pages=pages, chunk=chunk, **sizes)
        self._traced = experts.choices * cfg.layers if experts and config.trace else 0
        kept = dict(experts=experts is not None, traced=self._traced)
        self._table = new_table(config.max_rows, config.max_length, **kept)
        at = dict(pages=pages, page_size=config.page_size, dtype=_dtype(params))
        if experts:
            at |= dict(bank=experts.library.bank, scout=experts.scouts)
        self._memories = (new_memory(cfg, config.max_rows, config.max_length, **at),)
        self._programs: dict[Bucket, jax.stages.Compiled] = {}
        row = self._entry(Request(prompt=[0]), 0, np.zeros_like(self._memories[0].tables[:, 0]), None)
        lower_enter = jax.jit(enter, donate_argnums=(0, 1)).lower
        self._enter = lower_enter(self._memories, self._table, np.int32(0), row).compile()
        self._stop = jax.jit(stop, donate_argnums=0).lower(self._table, np.zeros(config.max_rows, bool)).compile()
        self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
        self._running: dict[int, _Running] = {}
        self._ids = itertools.count()
        self.usage = Usage()

    @property
    def kv_bytes(self) -> int:
        """Size of the KV table."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._memories[0].state))

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def warm_up(self, progress: Callable[..., Iterable] = lambda programs, **_: programs) -> None:
        """Compiles every program, on all cores; `progress` may wrap the iteration to show how far it is (tqdm does)."""
        buckets = (*self.decode, *self.prefill)
        with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, len(buckets))) as pool:
            for _ in progress(pool.map(self._program, buckets), total=len(buckets)):
                pass

    def submit(self, request: Request) -> int:
        """Queues a request; its number comes back in the events of `step`.

        Raises:
          UserError: a request that can never run, or that asks for something out of range.
        """
        check(self.cfg, self.config, request)
        if self.experts:
            self.experts.check(request.adapter, request.route)
        elif request.adapter is not None or request.route is not None:
            raise UserError(
                f"adapter: got {request.adapter or request.route!r}, expected none: this engine has no bank"
            )
        self.slots.check(len(request.prompt) + request.max_new_tokens)
        number = next(self._ids)
        self._waiting.append((number, request))
        return number

    def abort(self, number: int) -> None:
        """Ends a request wherever it is; it gives no further event."""
        self._waiting = collections.deque(item for item in self._waiting if item[0] != number)
        if number in self._running:
            self._end([self._running[number].lease.slot])
            self._retire(self._running[number])

    def step(self) -> list[Event]:
        """Admits what fits, runs one program (prompts first), and tells what came of it."""
        self._admit()
        if not self._running:
            return []
        pending = [running for running in self._running.values() if running.unread > 1]
        if pending:
            bucket = bucketing.pick(self.prefill, 1, sum(running.unread for running in pending))
            rows = pending[: bucket.rows]
        else:
            bucket = bucketing.pick(self.decode, len(self._running), len(self._running))
            rows = list(self._running.values())
        return self._collect(rows, self._run(bucket, [running.lease.slot for running in rows]))

    def run(self, requests: Sequence[Request]) -> list[Event]:
        """Runs `requests` to their ends: one event each, in their order."""
        return run_all(self, requests)

    def forget(self) -> None:
        """Forgets the prefixes that it kept for sharing: what follows is as of a new engine, bit for bit.

        Raises:
          UserError: requests wait or run.
        """
        if self.busy:
            raise UserError("engine: got requests at work, expected none: wait until they have ended")
        self.slots.forget()

    def _admit(self) -> None:
        while self._waiting and self.slots.free:
            number, request = self._waiting[0]
            assigned, prompt = None, request.prompt
            if self.experts:
                assigned = self.experts.assign(prompt, self.config.max_length, request.adapter, request.route)
                if assigned is None:
                    return
                prompt = self.experts.marked(assigned, prompt, self._own(number))
            lease = self.slots.lease(prompt, len(prompt) + request.max_new_tokens)
            if lease is None:
                if assigned:
                    self.experts.release(assigned)
                return
            self._waiting.popleft()
            running = _Running(number, request, lease, list(request.prompt), lease.shared, assigned)
            self._running[number] = running
            row = self._entry(request, lease.shared, lease.tables, assigned)
            self._memories, self._table = self._enter(self._memories, self._table, np.int32(lease.slot), row)

    def _entry(self, request: Request, shared: int, tables: np.ndarray, assigned: Assignment | None) -> Entry:
        ids = assigned.ids if assigned else None
        if self.experts and ids is None:
            ids = np.zeros(self.config.max_length, np.int32)
        row = entry(self.config, request, anchor=[shared], experts=ids, traced=self._traced)
        return Entry(row, (tables,))

    def _own(self, number: int) -> int | None:
        """A mark that keeps a request from sharing pages where what goes with them, choices or gates, is not kept."""
        return number if self.config.trace or self._memories[0].state.gates else None

    def _end(self, slots: Sequence[int]) -> None:
        mask = np.zeros(self.config.max_rows, bool)
        mask[list(slots)] = True
        self._table = self._stop(self._table, mask)

    def _program(self, bucket: Bucket) -> jax.stages.Compiled:
        if bucket not in self._programs:
            rows = np.full(bucket.rows, -1, np.int32)
            run = jax.jit(functools.partial(advance, self.cfg, bucket), donate_argnums=(2, 3))
            adapters = self.experts and self.experts.adapters
            memory = self._memories[0]
            lowered = run.lower(self.params, adapters, memory, self._table, rows, np.int32(0), np.int32(0))
            self._programs[bucket] = lowered.compile()
        return self._programs[bucket]

    def _run(self, bucket: Bucket, slots: Sequence[int]) -> Report:
        rows = np.full(bucket.rows, -1, np.int32)
        rows[: len(slots)] = slots
        begun = time.perf_counter()
        memory, self._table, report = self._program(bucket)(
            self.params,
            self.experts and self.experts.adapters,
            self._memories[0],
            self._table,
            rows,
            np.int32(bucket.steps),
            np.int32(self._awaited()),
        )
        self._memories = (memory,)
        report = jax.device_get(report)
        self._account(bucket, report, time.perf_counter() - begun)
        return report

    def _awaited(self) -> int:
        """Ends of rows that are worth a look of the host: as many as waiting prompts fill one prefill, but half of all.

        A prompt by itself would leave most of a prefill's tokens empty. None waits for more than a block of decoding.
        """
        room, count = self.prefill[-1].tokens, 0
        for _, request in itertools.islice(self._waiting, self.prefill[-1].rows):
            room -= len(request.prompt)
            count += room >= 0
        return max(1, min(count, self.config.max_rows // 2)) if self._waiting else 0

    def _account(self, bucket: Bucket, report: Report, seconds: float) -> None:
        if bucket in self.prefill:
            self.usage.prefill_seconds += seconds
        else:
            self.usage.decode_seconds += seconds
            self.usage.decode_tokens += int(report.count.sum())
            self.usage.decode_steps += int(report.steps)

    def _collect(self, rows: Sequence[_Running], report: Report) -> list[Event]:
        events = []
        for row, running in enumerate(rows):
            was_prefill, before = running.unread > 1, running.anchor
            running.anchor = int(report.anchor[row])
            if was_prefill:
                self.usage.prefill_tokens += running.anchor - before
            if was_prefill and running.unread < 2:  # no later token of the prompt fills a page that others could share
                self._publish(running)
            given = report.tokens[row, : report.count[row]].tolist()
            running.tokens += given
            finished = trace = None
            if not report.active[row]:
                finished = "stop" if given[-1] in running.request.stops else "length"
                trace = self._trace(running)
                self._retire(running)
            if given:
                logprobs = report.logprobs[row, : len(given)].tolist() if running.request.logprobs else None
                events.append(Event(running.id, given, logprobs, finished, trace))
        return events

    def _trace(self, running: _Running) -> list[list[str | None]] | None:
        if self._table.trace is None:
            return None
        table, names = np.asarray(self._table.trace), self.experts.names(running.experts)
        return [[names.get(i) for i in row] for row in table[running.lease.slot, : running.anchor].tolist()]

    def _publish(self, running: _Running) -> None:
        tokens = running.tokens[: running.anchor]
        if running.experts:
            tokens = self.experts.marked(running.experts, tokens, self._own(running.id))
        self.slots.publish(running.lease, tokens)

    def _retire(self, running: _Running) -> None:
        del self._running[running.id]
        self._publish(running)
        self.slots.give_back(running.lease)
        if running.experts:
            self.experts.release(running.experts)


def _dtype(params: Params) -> jnp.dtype:
    return params["embed"]["weight"].dtype
