"""Boolean logic: columns of a truth table, combined row by row.

`logic: T F F, and T T F, not` is solved by ` and: T F F; not: F T T -> F T T`.
"""

from molora_jax.data.testbed.problem import Domain, Operation, Sign, listed

_WIDTHS = {1: 3, 2: 4, 3: 5}


def _column(rng, level):
    return tuple(rng.random() < 0.5 for _ in range(_WIDTHS.get(level, 6)))


class _Column(tuple):
    """A column as an operand."""

    def __str__(self):
        return _show(self)


def _other(rng, level, value):
    return _Column(rng.random() < 0.5 for _ in value)


def _show(column):
    return "".join(" T" if x else " F" for x in column)


def _rowwise(name, function):
    return Operation(name, lambda a, b: tuple(function(x, y) for x, y in zip(a, b, strict=True)), _other)


LOGIC = Domain(
    name="logic",
    start=_column,
    operations=(
        _rowwise("and", lambda x, y: x and y),
        _rowwise("or", lambda x, y: x or y),
        _rowwise("xor", lambda x, y: x != y),
        Operation("not", lambda a, _: tuple(not x for x in a)),
    ),
    signs=(
        Sign(_rowwise("@", lambda x, y: not (x and y)), _rowwise("@", lambda x, y: not (x or y))),
        Sign(_rowwise("#", lambda x, y: y or not x), _rowwise("#", lambda x, y: x or not y)),
        Sign(Operation("~", lambda a, _: (*a[1:], a[0])), Operation("~", lambda a, _: (a[-1], *a[:-1]))),
    ),
    show=_show,
    ask=listed,
    work=lambda name, operand, before, after: f" {name}:{_show(after)}",
)
