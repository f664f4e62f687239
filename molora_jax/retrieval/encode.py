"""Encodings of segments by the first layers of a frozen backbone: each segment reads the question, none another one.

The rows of a job are [prefix; segment], where the prefix is the question and the anchors picked so far. The prefix is
run once: its keys and values lie in pages that all its segments share. Rows of unequal length follow one another in
one flat list, so that nothing is padded but the end of the list (`nn.layout.ragged`).
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from molora_jax import files
from molora_jax.adapters.digest import base_digest
from molora_jax.config import ModelConfig, UserError
from molora_jax.models import transformer
from molora_jax.models.state import DecodeState, new_state
from molora_jax.nn.layout import ragged
from molora_jax.text.tokenizer import Tokenizer
from molora_jax.typing import Float, Int, Params

PAGE = 8
"""Tokens of a KV page; what a prefix has beyond its last full page, every segment reads again."""
TILE = 16
"""Tokens of a row that attend together; on two CPU cores 32 and 64 take 2 to 5 × as long."""
DTYPES = ("float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """How segments are encoded.

    Attributes:
      depths: K, or several, ascending: encodings are of the residual stream after so many layers.
      again: the question follows each segment once more, so that its tokens read the segment; they are pooled apart.
      tokens: keeps the states of all tokens of a segment, after the deepest layer, for a router that pools them itself.
      longest: tokens of a segment; the rest of it is cut.
      batch: tokens of the largest program.
      dtype: of what is kept.
    """

    depths: tuple[int, ...] = (8,)
    again: bool = False
    tokens: bool = False
    longest: int = 192
    batch: int = 2048
    dtype: str = "float32"

    def __post_init__(self):
        if not self.depths or min(self.depths) < 1 or list(self.depths) != sorted(set(self.depths)):
            raise UserError(f"encoder: got depths {self.depths}, expected ascending numbers of layers from 1")
        if self.longest < 1 or self.batch < 256:
            raise UserError(f"encoder: got longest={self.longest} and batch={self.batch}, expected from 1 and 256")
        if self.dtype not in DTYPES:
            raise UserError(f"encoder: got dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}")

    @property
    def pools(self) -> tuple[str, ...]:
        """What the third axis of `Encoding.pooled` holds."""
        return ("mean", "last", "again_mean", "again_last") if self.again else ("mean", "last")


@dataclasses.dataclass(frozen=True)
class Job:
    """Segments to encode behind a question and the texts of the anchors, if any; each alone without a question."""

    question: str | None
    segments: Sequence[str]
    anchors: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Encoding:
    """What a job gave; every state is divided by its root mean square, as the next layer would read it.

    Attributes:
      pooled: by depth and `EncoderConfig.pools`.
      lengths: tokens of each segment.
      tokens: their states after the deepest layer, one segment after the other, where they are kept.
      cost: encoder tokens × layers that the job took, whether now or when it was kept.
    """

    pooled: Float[np.ndarray, "G K pools D"]
    lengths: Int[np.ndarray, "G"]
    tokens: Float[np.ndarray, "N D"] | None
    cost: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """Tokens of one row: [tail of the prefix; segment; question again], or a whole prefix."""

    job: int
    segment: int  # -1 for a prefix
    ids: list[int]
    start: int  # its first position
    parts: tuple[int, int, int]  # where the segment begins, where it ends, where the row ends


class Encoder:
    """Encodes by a frozen model; it takes no bank, so that whatever adapter is active cannot enter.

    Args:
      params: of the bare base, stacked or unrolled.
      cache: folder in which encodings are kept, by the content of the job, the base and the config; None keeps none.

    Attributes:
      tokens: that were run so far, pads apart; each went through the deepest of the depths.
      hits: jobs that the cache had.
    """

    def __init__(
        self, cfg: ModelConfig, params: Params, tokenizer: Tokenizer, config: EncoderConfig, cache: Path | None = None
    ):
        if config.depths[-1] > cfg.layers:
            raise UserError(f"encoder: got a depth of {config.depths[-1]}, expected at most the model's {cfg.layers}")
        self.config, self.tokenizer, self.cache = config, tokenizer, cache
        self.width, self.tokens, self.hits = cfg.width, 0, 0
        deepest = config.depths[-1]
        self._cfg = dataclasses.replace(cfg, layers=deepest, windows=cfg.windows[:deepest])
        self._params = {"embed": params["embed"], "layers": _first(params["layers"], deepest)}
        self._states: dict[tuple[int, int], DecodeState] = {}
        self._digest = base_digest(params) if cache is not None else ""

    def encode(self, jobs: Sequence[Job]) -> list[Encoding]:
        """Encodes segments, those of several jobs in one program where they fit.

        Raises:
          UserError: a job without segments, a segment without tokens, or a prefix that leaves no room in a program.
        """
        found: dict[int, Encoding] = {}
        rows = [self._rows(i, job) for i, job in enumerate(jobs)]
        paths = [self._path(own) for own in rows]
        for i, path in enumerate(paths):
            if path is not None and path.is_file():
                found[i] = _read(path)
        self.hits += len(found)
        self.tokens += sum(self._run([rows[i] for i in range(len(jobs)) if i not in found], found))
        for i, path in enumerate(paths):
            if path is not None and not path.is_file():
                _write(path, found[i])
        return [found[i] for i in range(len(jobs))]

    def prefix(self, job: Job) -> list[int]:
        """Token ids of the question and the anchors."""
        ids = self.tokenizer.encode("" if job.question is None else f"Question: {job.question}\n")
        for text in job.anchors:
            ids += self._segment(text)
        return ids

    def _segment(self, text: str, end: str = "\n") -> list[int]:
        return self.tokenizer.encode(f"{text}{end}", special=False)[: self.config.longest]

    def _rows(self, number: int, job: Job) -> list[_Row]:
        """The prefix, and each segment behind it."""
        prefix = self.prefix(job)
        again = self.tokenizer.encode(f"Question: {job.question}", special=False) if self.config.again else []
        shared = len(prefix) // PAGE * PAGE
        tail, rows = prefix[shared:], [_Row(number, -1, prefix[:shared], 0, (0, 0, 0))]
        for i, text in enumerate(job.segments):
            own = self._segment(text, "" if job.question is None else "\n")
            if not own:
                raise UserError(f"encoder: got the segment {text!r:.40} without tokens, expected some text")
            begin, end = len(tail), len(tail) + len(own)
            rows.append(_Row(number, i, [*tail, *own, *again], shared, (begin, end, end + len(again))))
        most = self.config.batch - len(rows[0].ids)
        if len(rows) < 2 or max(len(row.ids) for row in rows) > most:
            got = f"{len(rows) - 1} segments behind {len(prefix)} tokens"
            raise UserError(f"encoder: got {got}, expected at least one, each in {self.config.batch} tokens with them")
        return rows

    def _path(self, rows: Sequence[_Row]) -> Path | None:
        if self.cache is None:
            return None
        config = self.config
        key = f"{self._digest} {self._cfg} {config.depths} {config.again} {config.tokens} {config.dtype} "
        key += " ".join(f"{row.ids} {row.parts}" for row in rows)
        return self.cache / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"

    def _run(self, jobs: Sequence[Sequence[_Row]], found: dict[int, Encoding]) -> Iterator[int]:
        """Runs all rows and puts the encodings into `found`; the tokens of each program."""
        parts: dict[int, list] = {rows[0].job: [] for rows in jobs}
        for batch in _batches(jobs, self.config.batch):
            pooled, tokens = self._program(batch)
            cost = sum(len(row.ids) for row in batch)
            yield cost
            ends = np.cumsum([len(row.ids) for row in batch])
            for row, pool, end in zip(batch, pooled, ends, strict=False):
                own = None
                if row.segment >= 0 and tokens is not None:
                    start = end - len(row.ids)
                    own = tokens[start + row.parts[0] : start + row.parts[1]]
                parts[row.job].append((row, pool, own))
        for job, given in parts.items():
            segments = [part for part in given if part[0].segment >= 0]
            kept = np.concatenate([own for _, _, own in segments]) if self.config.tokens else None
            found[job] = Encoding(
                np.stack([pool for _, pool, _ in segments]),
                np.array([row.parts[1] - row.parts[0] for row, _, _ in segments]),
                kept,
                self.config.depths[-1] * sum(len(row.ids) for row, _, _ in given),
            )

    def _program(self, batch: Sequence[_Row]):
        """Pooled states of each row, and those of all tokens where they are kept."""
        rows, tokens = _bucket(batch, self.config.batch)
        pages = tokens // PAGE + 2 * rows
        width = -(-2 * self.config.batch // PAGE)
        flat, labels, lasts = np.zeros(tokens, np.int32), np.full(tokens, 2 * rows, np.int32), np.zeros((2, rows), int)
        starts, lengths, tables = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.zeros((rows, width), np.int32)
        at = page = 0
        for b, row in enumerate(batch):
            begin, end, stop = (at + part for part in row.parts)
            flat[at : at + len(row.ids)] = row.ids
            labels[begin:end], labels[end:stop] = 2 * b, 2 * b + 1
            lasts[:, b] = end - 1, stop - 1
            starts[b], lengths[b] = row.start, len(row.ids)
            common = row.start // PAGE
            own = -(-len(row.ids) // PAGE)
            if row.segment < 0:
                prefix = np.arange(page, page + own)
            tables[b, :common], tables[b, common : common + own] = prefix[:common], np.arange(page, page + own)
            at, page = at + len(row.ids), page + own
        state = self._states.pop((rows, tokens), None)
        if state is None:
            dtype = self._params["embed"]["weight"].dtype
            kinds = len(self._cfg.kinds)
            state = new_state(self._cfg, pages=(pages,) * kinds, page_size=PAGE, dtype=dtype)
        pooled, kept, self._states[rows, tokens] = _encode(
            self._cfg, self.config, self._params, state, flat, labels, lasts, starts, lengths, tables
        )
        return np.asarray(pooled), None if kept is None else np.asarray(kept)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _encode(cfg, config: EncoderConfig, params, state, flat, labels, lasts, starts, lengths, tables):
    """(pooled [B K pools D], states of the tokens [N D] or None, state)."""
    rows, tables = lengths.shape[0], jnp.broadcast_to(tables, (len(cfg.kinds), *tables.shape))
    layout = ragged(starts, lengths, tables, tokens=flat.shape[0], tile=TILE, page_size=PAGE)
    out = transformer.apply(cfg, params, flat, layout, state, layers=cfg.layers, taps=("hidden",))
    h = out.taps["hidden"][np.array(config.depths) - 1]
    h = h.astype(jnp.promote_types(h.dtype, jnp.float32))
    h = h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + cfg.norm_eps)
    count = jax.ops.segment_sum(jnp.ones(labels.shape, h.dtype), labels, 2 * rows + 1)[:-1]
    total = jax.vmap(lambda x: jax.ops.segment_sum(x, labels, 2 * rows + 1)[:-1])(h)
    mean = (total / jnp.maximum(count, 1)[:, None]).reshape(len(h), rows, 2, -1)
    pools = []
    for part in range(1 + config.again):
        pools += [mean[:, :, part], h[:, lasts[part]]]
    pooled = jnp.stack(pools).transpose(2, 1, 0, 3).astype(config.dtype)
    return pooled, h[-1].astype(config.dtype) if config.tokens else None, out.state


def _first(layers, depth: int):
    """The first layers, stacked or unrolled."""
    return layers[:depth] if isinstance(layers, list) else jax.tree.map(lambda leaf: leaf[:depth], layers)


def _batches(jobs: Sequence[Sequence[_Row]], most: int) -> Iterator[list[_Row]]:
    """Rows of one program after the other; a job that is cut has its prefix in each of its programs."""
    batch, tokens = [], 0
    for prefix, *segments in jobs:
        begun = False
        for row in segments:
            need = len(row.ids) + (0 if begun else len(prefix.ids))
            if batch and (tokens + need > most or len(batch) + 2 > most // 8):
                yield batch
                batch, tokens, begun = [], 0, False
                need = len(row.ids) + len(prefix.ids)
            batch += [row] if begun else [prefix, row]
            tokens, begun = tokens + need, True
    if batch:
        yield batch


def _bucket(batch: Sequence[_Row], most: int) -> tuple[int, int]:
    """Rows and tokens of the smallest program that holds the batch."""
    need = sum(len(row.ids) for row in batch)
    tokens = next((size for size in (256, 512, 1024, 2048, 4096, 8192) if need <= size < most), most)
    return next(rows for rows in (tokens // 64, tokens // 8, most // 8) if rows >= len(batch)), tokens


def _read(path: Path) -> Encoding:
    try:
        found = safetensors.numpy.load_file(path)
        return Encoding(found["pooled"], found["lengths"], found.get("tokens"), int(found["cost"]))
    except (KeyError, OSError, safetensors.SafetensorError) as e:
        raise UserError(
            f"{path}: got an encoding that cannot be read ({e}), expected one that was kept; delete it"
        ) from None


def _write(path: Path, encoding: Encoding) -> None:
    kept = dict(pooled=encoding.pooled, lengths=encoding.lengths, cost=np.array(encoding.cost))
    if encoding.tokens is not None:
        kept["tokens"] = encoding.tokens
    keep(path, kept)


def keep(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a file of a cache, whole or not at all.

    Raises:
      UserError: the folder cannot be written to.
    """
    try:
        files.write(path, safetensors.numpy.save(arrays))
    except OSError as e:
        raise UserError(f"{path.parent}: cannot be written ({e}); set MOLORA_CACHE to another folder") from None
