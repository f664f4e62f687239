"""When a model runs: thresholds on how many requests wait for it. Pure; the same on jnp, numpy and in the simulator.

A model runs once B of its requests wait (delayed batching; TokenRouter, arXiv 2610.12242, §4), or once the oldest has
waited too long, which that paper has not. Models are numbered from the quickest to the slowest. Times are modelled:
measured step times added up, so that a device, which has no clock, and the simulator decide alike.
"""

from molora_jax.typing import Array, Bool, Float, Int

IDLE = -1
"""What `pick` says when nobody waits."""


def ready(
    i: int, waiting: Int[Array, "M"], oldest: Float[Array, "M"], thresholds: Int[Array, "M"], max_wait: float
) -> Bool[Array, ""]:
    """Whether model i, on a device of its own, shall run now.

    Args:
      waiting: requests that wait for each model.
      oldest: how long the oldest of them has waited, in the unit of `max_wait`.
    """
    return (waiting[i] > 0) & ((waiting[i] >= thresholds[i]) | (oldest[i] >= max_wait))


def pick(
    waiting: Int[Array, "M"], oldest: Float[Array, "M"], thresholds: Int[Array, "M"], max_wait: float
) -> Int[Array, ""]:
    """Which model a device that all share shall run now.

    Of those that have waited too long the one that has longest; else the slowest of those at their threshold: what it
    holds up could otherwise join the quick one's batches. Should none be ready, the one nearest to its threshold runs,
    since nobody else will bring it more. `IDLE` only if nobody waits.
    """
    xp = waiting.__array_namespace__()
    some = waiting > 0
    late, full = some & (oldest >= max_wait), some & (waiting >= thresholds)
    nearest = xp.argmax(xp.where(some, waiting / xp.maximum(thresholds, 1), -1.0))
    choice = xp.where(xp.any(full), _last(full), nearest)
    choice = xp.where(xp.any(late), xp.argmax(xp.where(late, oldest, -1.0)), choice)
    return xp.where(xp.any(some), choice, IDLE)


def clamp(thresholds: Int[Array, "M"], active: Int[Array, ""]) -> Int[Array, "M"]:
    """Thresholds that can be reached by `active` requests wherever they wait: Σ (B_i - 1) < N (ibid., eq. 22).

    If they cannot, every B_i - 1 shrinks in proportion, rounded down.
    """
    xp = thresholds.__array_namespace__()
    beyond = xp.maximum(thresholds, 1) - 1
    total, room = xp.sum(beyond), xp.maximum(active - 1, 0)
    return 1 + xp.where(total <= room, beyond, beyond * room // xp.maximum(total, 1))


def rows(seconds: Float[Array, "K"]) -> Int[Array, ""]:
    """How many of the waiting requests, the oldest first, one run takes: as many as are served the quickest each.

    Args:
      seconds: how long a run of the first k takes, k = 1, 2, …; inf where fewer wait or none is that large. Of equal
        rates the larger is taken.
    """
    xp = seconds.__array_namespace__()
    count = xp.arange(1, seconds.shape[0] + 1)
    rate = count / seconds
    return count[_last(rate == xp.max(rate))]


def _last(marked: Bool[Array, "N"]) -> Int[Array, ""]:
    """Last index that is marked."""
    xp = marked.__array_namespace__()
    return marked.shape[0] - 1 - xp.argmax(marked[::-1])
