"""Arithmetic chains: integers from 0 to 99, worked from left to right modulo 100.

`calc:47 +38 *3` is solved by `47+38=85;85*3=55 ->55`.
"""

from molora_jax.data.testbed.problem import Domain, Operation, Sign


def _start(rng, level):
    return rng.randrange(10 if level == 1 else 100)


def _term(rng, level, value):
    return rng.randrange(1, 10 if level == 1 else 100)


def _factor(rng, level, value):
    return rng.randrange(2, 6 if level < 3 else 10)


def _any(rng, level, value):
    return rng.randrange(100)


_TENS_THEN_UNITS = Operation("@", lambda a, b: a // 10 * 10 + b % 10, _any)
_UNITS_THEN_TENS = Operation("@", lambda a, b: b // 10 * 10 + a % 10, _any)
_LARGER = Operation("#", max, _any)
_SMALLER = Operation("#", min, _any)
_SWAP_DIGITS = Operation("~", lambda a, _: a % 10 * 10 + a // 10)
_FROM_99 = Operation("~", lambda a, _: 99 - a)


def _written(name, operand):
    return name if operand is None else f"{name}{operand}"


ARITHMETIC = Domain(
    name="calc",
    start=_start,
    operations=(
        Operation("+", lambda a, b: (a + b) % 100, _term),
        Operation("-", lambda a, b: (a - b) % 100, _term),
        Operation("*", lambda a, b: a * b % 100, _factor, level=2),
    ),
    signs=(
        Sign(_TENS_THEN_UNITS, _UNITS_THEN_TENS),
        Sign(_LARGER, _SMALLER),
        Sign(_SWAP_DIGITS, _FROM_99),
    ),
    show=str,
    ask=lambda name, operand: f" {_written(name, operand)}",
    work=lambda name, operand, before, after: f"{before}{_written(name, operand)}={after}",
)
