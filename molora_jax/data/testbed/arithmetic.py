"""Arithmetic chains: integers from 00 to 99, worked from left to right modulo 100.

`calc:47 +08 *3` is solved by `47+08=55;55*3=65 ->65`. Values have two digits, so that tens stand below tens.
"""

from molora_jax.data.testbed.problem import Domain, Operation, Sign


def _start(rng, level):
    return rng.randrange(100)


def _term(rng, level, value):
    return rng.randrange(1, 10 if level < 3 else 100)


def _factor(rng, level, value):
    return rng.randrange(2, 4 if level < 3 else 6)


def _any(rng, level, value):
    return rng.randrange(100)


_TENS_THEN_UNITS = Operation("@", lambda a, b: a // 10 * 10 + b % 10, _any)
_UNITS_THEN_TENS = Operation("@", lambda a, b: b // 10 * 10 + a % 10, _any)
_LARGER = Operation("#", max, _any)
_SMALLER = Operation("#", min, _any)
_SWAP_DIGITS = Operation("~", lambda a, _: a % 10 * 10 + a // 10)
_FROM_99 = Operation("~", lambda a, _: 99 - a)


def _show(value):
    return f"{value:02d}"


def _written(name, operand):
    """The factor of a product has one digit."""
    return name if operand is None else f"{name}{operand}" if name == "*" else f"{name}{_show(operand)}"


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
    show=_show,
    ask=lambda name, operand: f" {_written(name, operand)}",
    work=lambda name, operand, before, after: f"{_show(before)}{_written(name, operand)}={_show(after)}",
)
