"""Cuts operands into blocks of batch rows and channels, time first and in chunks, and joins the results again."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.selective_scan.layout import even_split, pad


def loop(step: Callable, carry, xs, *, reverse: bool = False):
    """`jax.lax.scan`, but a single step is no loop: decoding takes one token at a time."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return jax.lax.scan(step, carry, xs, reverse=reverse)
    carry, out = step(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A grid of `rows` by `columns` blocks: b batch rows and c channels each, q tokens in each of `chunks` chunks.

    Sizes that do not divide are filled up with zeros.
    """

    B: int
    T: int
    C: int
    rows: int
    b: int
    columns: int
    c: int
    chunks: int
    q: int

    @classmethod
    def of(cls, sizes: tuple[int, int, int, int], *, chunk: int, state: int | None) -> "Blocks":
        """Blocks of at most `state` elements of state, or of one channel; None is a single block."""
        B, T, C, N = sizes
        columns, c = even_split(C, state // N if state else C)
        rows, b = even_split(B, state // (N * c) if state else B)
        chunks, q = even_split(T, chunk)
        return cls(B, T, C, rows, b, columns, c, chunks, q)

    def cut_tokens(self, x: jax.Array) -> jax.Array:
        """[B T *W] -> [rows chunks q b *W]."""
        x = pad(pad(x, 0, self.rows * self.b), 1, self.chunks * self.q)
        x = x.reshape(self.rows, self.b, self.chunks, self.q, *x.shape[2:])
        return jnp.moveaxis(x, 1, 3)

    def join_tokens(self, x: jax.Array) -> jax.Array:
        """[rows chunks q b *W] -> [B T *W]."""
        x = jnp.moveaxis(x, 3, 1)
        return x.reshape(self.rows * self.b, self.chunks * self.q, *x.shape[4:])[: self.B, : self.T]

    def cut_channels(self, x: jax.Array) -> jax.Array:
        """[*L C] -> [columns *L c]."""
        x = pad(x, x.ndim - 1, self.columns * self.c)
        return jnp.moveaxis(x.reshape(*x.shape[:-1], self.columns, self.c), -2, 0)

    def join_channels(self, x: jax.Array) -> jax.Array:
        """[columns *L c] -> [*L C]."""
        x = jnp.moveaxis(x, 0, -2)
        return x.reshape(*x.shape[:-2], self.columns * self.c)[..., : self.C]

    def cut_moving(self, x: jax.Array) -> jax.Array:
        """[B T C] -> [rows columns chunks q b c]."""
        return jnp.moveaxis(self.cut_channels(self.cut_tokens(x)), 0, 1)

    def join_moving(self, x: jax.Array) -> jax.Array:
        """[rows columns chunks q b c] -> [B T C]."""
        return self.join_tokens(self.join_channels(jnp.moveaxis(x, 1, 0)))

    def cut_states(self, x: jax.Array) -> jax.Array:
        """[B N C] -> [rows columns b N c]."""
        x = pad(x, 0, self.rows * self.b)
        x = self.cut_channels(x.reshape(self.rows, self.b, *x.shape[1:]))
        return jnp.moveaxis(x, 0, 1)

    def join_states(self, x: jax.Array) -> jax.Array:
        """[rows columns b N c] -> [B N C]."""
        x = self.join_channels(jnp.moveaxis(x, 1, 0))
        return x.reshape(self.rows * self.b, *x.shape[2:])[: self.B]


def each(fn: Callable, per_block, per_row, per_column):
    """fn(block, row, column) for every block, one after the other: results lead with [rows columns].

    Args:
      fn: takes the three trees without their leading axes.
      per_block: arrays [rows columns ...].
      per_row: arrays [rows ...], which the blocks of a row share.
      per_column: arrays [columns ...].
    """

    def row(parts):
        mine, shared = parts
        return one_by_one(lambda part: fn(part[0], shared, part[1]), (mine, per_column))

    return one_by_one(row, (per_block, per_row))


def one_by_one(fn: Callable, xs):
    return loop(lambda _, x: (None, fn(x)), None, xs)[1]
