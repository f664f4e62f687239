"""The static shapes that programs are compiled for."""

import dataclasses

SHORT = 128
"""Tokens up to which a program's time hardly depends on them."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shape of one program.

    Attributes:
      rows: B, requests it advances at once.
      tokens: N, the flat list that the linear layers run on.
      tile: Q, tokens of one row that attend together.
      steps: most tokens it gives each row; more than 1 only when `tokens` is `rows`.
    """

    rows: int
    tokens: int
    tile: int
    steps: int


def powers(limit: int) -> tuple[int, ...]:
    """1, 2, 4, … and `limit` itself: padding wastes less than half of a bucket."""
    return (*(2**i for i in range((limit - 1).bit_length())), limit)


def decode_buckets(max_rows: int, steps: int) -> tuple[Bucket, ...]:
    """One token a row and step, for every power of two of rows up to `max_rows`."""
    return tuple(Bucket(rows, rows, 1, steps) for rows in powers(max_rows))


def prefill_buckets(max_rows: int, max_tokens: int) -> tuple[Bucket, ...]:
    """Prompt chunks of at most `max_tokens` of up to 8 rows together.

    Each is twice as long as the one before; four times where it is short, for then weights are what a program reads.
    """
    sizes = [max_tokens]
    while sizes[0] > 32:
        sizes.insert(0, max(sizes[0] // (2 if sizes[0] > SHORT else 4), 32))
    rows = min(max_rows, 8)
    return tuple(Bucket(rows, size, max(size // 8, min(size, 16)), 1) for size in sizes)


def pick(buckets: tuple[Bucket, ...], rows: int, tokens: int) -> Bucket:
    """The smallest of ascending `buckets` that covers `rows` and `tokens`, or else the largest."""
    for bucket in buckets:
        if bucket.rows >= rows and bucket.tokens >= tokens:
            return bucket
    return buckets[-1]
