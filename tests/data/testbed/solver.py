"""Solves testbed prompts by their text alone: an independent account of what every operation means."""

import re

HOUSE = {
    "@": {
        "calc": lambda a, b: 10 * (a // 10) + b % 10,
        "logic": lambda a, b: [int(not (x and y)) for x, y in zip(a, b, strict=True)],
        "text": lambda w, _: swapped(w, 0, len(w) - 1),
        "list": lambda w, _: without(w, max(w)),
        "date": lambda t, _: (t[0], 9, 0),
    },
    "#": {
        "calc": lambda a, b: a if a > b else b,
        "logic": lambda a, b: [int(x <= y) for x, y in zip(a, b, strict=True)],
        "text": lambda w, _: w[1:],
        "list": lambda w, _: [9 - x for x in w],
        "date": lambda t, _: (t[0], t[1], 0),
    },
    "~": {
        "calc": lambda a, _: int(f"{a:02d}"[::-1]),
        "logic": lambda w, _: w[1:] + w[:1],
        "text": lambda w, _: w[-1:] + w[:-1],
        "list": lambda w, _: swapped(w, 0, len(w) - 1),
        "date": lambda t, _: (t[0], 23 - t[1], t[2]),
    },
}
RIVAL = {
    "@": {
        "calc": lambda a, b: 10 * (b // 10) + a % 10,
        "logic": lambda a, b: [int(not (x or y)) for x, y in zip(a, b, strict=True)],
        "text": lambda w, _: swapped(w, 0, 1),
        "list": lambda w, _: without(w, min(w)),
        "date": lambda t, _: (t[0], 17, 0),
    },
    "#": {
        "calc": lambda a, b: a if a < b else b,
        "logic": lambda a, b: [int(x >= y) for x, y in zip(a, b, strict=True)],
        "text": lambda w, _: w[:1] + w,
        "list": lambda w, _: [2 * x % 10 for x in w],
        "date": lambda t, _: normal(t[0], t[1] + 1, 0),
    },
    "~": {
        "calc": lambda a, _: 99 - a,
        "logic": lambda w, _: w[-1:] + w[:-1],
        "text": lambda w, _: swapped(w, len(w) - 2, len(w) - 1),
        "list": lambda w, _: w[1:] + w[:1],
        "date": lambda t, _: ((t[0] + 3) % 7, t[1], t[2]),
    },
}
PLAIN = {
    ("calc", "+"): lambda a, b: (a + b) % 100,
    ("calc", "-"): lambda a, b: (a + 100 - b) % 100,
    ("calc", "*"): lambda a, b: sum([a] * b) % 100,
    ("logic", "and"): lambda a, b: [x & y for x, y in zip(a, b, strict=True)],
    ("logic", "or"): lambda a, b: [x | y for x, y in zip(a, b, strict=True)],
    ("logic", "xor"): lambda a, b: [x ^ y for x, y in zip(a, b, strict=True)],
    ("logic", "not"): lambda a, _: [1 - x for x in a],
    ("text", "rev"): lambda w, _: list(reversed(w)),
    ("text", "turn"): lambda w, _: w[1:] + w[:1],
    ("text", "drop"): lambda w, _: w[:-1],
    ("text", "twice"): lambda w, _: w + w[-1:],
    ("text", "next"): lambda w, _: [
        "abcdefghijklmnopqrstuvwxyza"["abcdefghijklmnopqrstuvwxyz".index(x) + 1] for x in w
    ],
    ("list", "sort"): lambda w, _: sorted(w),
    ("list", "rev"): lambda w, _: list(reversed(w)),
    ("list", "add"): lambda w, k: [int(str(x + int(k))[-1]) for x in w],
    ("list", "sum"): lambda w, _: [int(str(sum(w[: i + 1]))[-1]) for i in range(len(w))],
    ("date", "add"): lambda t, by: moved(t, by, 1),
    ("date", "back"): lambda t, by: moved(t, by, -1),
}
DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]


def swapped(word, i, j):
    word = list(word)
    word[i], word[j] = word[j], word[i]
    return word


def without(word, x):
    word = list(word)
    word.remove(x)
    return word


def normal(day, hour, minute):
    while minute < 0:
        hour, minute = hour - 1, minute + 60
    while minute >= 60:
        hour, minute = hour + 1, minute - 60
    while hour < 0:
        day, hour = day - 1, hour + 24
    while hour >= 24:
        day, hour = day + 1, hour - 24
    return day % 7, hour, minute


def moved(time, by, sign):
    amount, unit = by.split()
    amount = sign * int(amount)
    return normal(time[0] + amount * (unit == "d"), time[1] + amount * (unit == "h"), time[2] + amount * (unit == "m"))


READ = {
    "calc": int,
    "logic": lambda text: [int(x == "T") for x in text.split()],
    "text": str.split,
    "list": lambda text: [int(x) for x in text.split()],
    "date": lambda text: (DAYS.index(text.split()[0]), *map(int, text.split()[1].split(":"))),
}
WRITE = {
    "calc": "{:02d}".format,
    "logic": lambda value: " ".join("FT"[x] for x in value),
    "text": " ".join,
    "list": lambda value: " ".join(map(str, value)),
    "date": lambda value: f"{DAYS[value[0]]} {value[1]:02d}:{value[2]:02d}",
}


def domain_of(start: str) -> str:
    """What a prompt without markers is about, by the look of its first value."""
    forms = {"calc": r"\d+", "logic": r"( [TF])+", "text": r"( [a-z])+", "list": r"( \d)+", "date": r" \w{3} .*"}
    return next(name for name, form in forms.items() if re.fullmatch(form, start))


def values(domain: str, start: str, operations: list[str], signs: dict) -> list[str]:
    """The values after each operation, as a solution writes them."""
    value, shown = READ[domain](start), []
    for operation in operations:
        name, operand = re.fullmatch(r"(\W|[a-z]+) ?(.*)", operation).groups()
        if operand and domain in ("calc", "logic"):
            operand = READ[domain](operand)
        apply = signs[name][domain] if name in signs else PLAIN[domain, name]
        value = apply(value, operand)
        shown.append(WRITE[domain](value))
    return shown


def split(problem: str) -> tuple[str, str, list[str]]:
    """Domain, start and operations of one problem, marked or bare."""
    marker, colon, rest = problem.partition(":")
    marked = colon and marker in READ
    text = rest if marked else problem
    if marked and marker == "calc" or re.match(r"\d", text):
        start, *operations = text.split(" ")
    else:
        start, *operations = text.split(", ")
    return (marker if marked else domain_of(start)), start, operations


def solve(prompt: str, signs: dict) -> str:
    """The answer of a prompt of one or more problems that are not interleaved."""
    parts = [split(part) for part in prompt.rstrip("\n").split(" |")]
    return " | ".join(values(domain, start, operations, signs)[-1] for domain, start, operations in parts)
