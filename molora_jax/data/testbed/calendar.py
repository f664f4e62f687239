"""Calendar arithmetic: a weekday and a time of day, moved by days, hours and minutes.

`date: Tue 21:40, add 05 h, back 50 m` is solved by ` add 05 h: Wed 02:40; back 50 m: Wed 01:50 -> Wed 01:50`.
Values are minutes since Monday 00:00, modulo a week.
"""

from molora_jax.data.testbed.problem import Domain, Operation, Sign, listed

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HOUR, _DAY, _WEEK = 60, 24 * 60, 7 * 24 * 60
_MINUTES_OF = {"m": 1, "h": _HOUR, "d": _DAY}


def _grain(level):
    """Minutes are multiples of it."""
    return 30 if level < 3 else 10


def _time(rng, level):
    grain = _grain(level)
    return rng.randrange(_WEEK // grain) * grain


def _show(time):
    day, minute = divmod(time, _DAY)
    return f" {DAYS[day]} {minute // _HOUR:02d}:{minute % _HOUR:02d}"


def _amount(rng, level, value):
    """A duration; minutes come in the grain of the level, and hours get longer with it."""
    unit, grain = rng.choice("mhd"), _grain(level)
    amounts = {
        "m": range(grain, 60, grain),
        "h": range(1, 6 if level < 3 else 12),
        "d": range(1, 4 if level < 3 else 7),
    }
    return f" {rng.choice(amounts[unit]):02d} {unit}"


def _minutes(amount):
    number, unit = amount.split()
    return int(number) * _MINUTES_OF[unit]


def _at(hour):
    return Operation("@", lambda t, _: t // _DAY * _DAY + hour * _HOUR)


def _mirrored(time, _):
    """The same minute of the hour that is as far from midnight on the other side: 23 - hour."""
    hour = time % _DAY // _HOUR
    return time + (23 - 2 * hour) * _HOUR


CALENDAR = Domain(
    name="date",
    start=_time,
    operations=(
        Operation("add", lambda t, by: (t + _minutes(by)) % _WEEK, _amount),
        Operation("back", lambda t, by: (t - _minutes(by)) % _WEEK, _amount),
    ),
    signs=(
        Sign(_at(9), _at(17)),
        Sign(
            Operation("#", lambda t, _: t // _HOUR * _HOUR),
            Operation("#", lambda t, _: (t // _HOUR + 1) * _HOUR % _WEEK),
        ),
        Sign(
            Operation("~", _mirrored),
            Operation("~", lambda t, _: (t + 3 * _DAY) % _WEEK),
        ),
    ),
    show=_show,
    ask=listed,
    work=lambda name, operand, before, after: f" {name}{operand or ''}:{_show(after)}",
)
