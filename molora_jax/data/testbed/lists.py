"""List operations on digits; what is added is added to each digit, modulo 10.

`list: 3 7 2 9, sort, add 4` is solved by ` sort: 2 3 7 9; add 4: 6 7 1 3 -> 6 7 1 3`.
"""

from molora_jax.data.testbed.problem import Domain, Operation, Sign, listed

_SHORTEST = 3


def _digits(rng, level):
    return tuple(rng.randrange(10) for _ in range(min(4 + level // 2, 6)))


def _show(digits):
    return "".join(f" {digit}" for digit in digits)


def _without(digits, digit):
    """Leaves out the first occurrence."""
    at = digits.index(digit)
    return digits[:at] + digits[at + 1 :]


def _amount(rng, level, value):
    return f" {rng.randrange(1, 4 if level == 1 else 10)}"


def _shrinks(digits):
    return len(digits) > _SHORTEST


LISTS = Domain(
    name="list",
    start=_digits,
    operations=(
        Operation("sort", lambda x, _: tuple(sorted(x))),
        Operation("rev", lambda x, _: x[::-1]),
        Operation("add", lambda x, k: tuple((d + int(k)) % 10 for d in x), _amount),
        Operation("sum", lambda x, _: tuple(sum(x[: i + 1]) % 10 for i in range(len(x))), level=3),
    ),
    signs=(
        Sign(
            Operation("@", lambda x, _: _without(x, max(x)), fits=_shrinks),
            Operation("@", lambda x, _: _without(x, min(x)), fits=_shrinks),
        ),
        Sign(
            Operation("#", lambda x, _: tuple(9 - d for d in x)),
            Operation("#", lambda x, _: tuple(d * 2 % 10 for d in x)),
        ),
        Sign(
            Operation("~", lambda x, _: (x[-1], *x[1:-1], x[0])),
            Operation("~", lambda x, _: (*x[1:], x[0])),
        ),
    ),
    show=_show,
    ask=listed,
    work=lambda name, operand, before, after: f" {name}{operand or ''}:{_show(after)}",
)
