"""What every command-line program does the same way."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from molora_jax.config import UserError


def run(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; a `UserError` ends the program with its one line and exit code 2."""

    logging.getLogger("jax").setLevel(logging.WARNING)  # absl would show jax's search for every kind of accelerator

    def guarded(argv: list[str]) -> None:
        try:
            if argv[1:]:
                raise UserError(f"arguments: got {' '.join(argv[1:])!r}, expected flags of the form --name=value")
            main()
        except UserError as e:
            print(f"error: {e}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)

    app.run(guarded, flags_parser=_parsed)


def config(value: Any, example: str) -> Any:
    """What a flag of `config_flags` holds.

    Args:
      example: a file that would do, for whoever gave none.

    Raises:
      UserError: no file, or one that gives no config.
    """
    try:
        if value is not None and value.to_dict():
            return value
    except Exception as e:  # what a file raises that is not there, or is no config
        raise UserError(f"config: got {' '.join(str(e).split())[:200]}, expected a file with get_config()") from None
    raise UserError(f"config: got none, expected --config={example} or another file with get_config()")


def integers(flag: str, items: Sequence[str], low: int = 0) -> tuple[int, ...]:
    """The numbers of a list flag.

    Raises:
      UserError: an item that is none, or one below `low`.
    """
    if not items or not all(item.isdecimal() and int(item) >= low for item in items):
        raise UserError(f"{flag}: got {','.join(items)!r}, expected numbers from {low} on with commas between them")
    return tuple(map(int, items))


def _parsed(argv: list[str]) -> list[str]:
    """The arguments that are no flags; a wrong flag, or a field that a config file has not, ends in one line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as e:  # of a config file that raises it holds the whole trace
        _end(str(e).strip().splitlines()[-1].removeprefix(f"{UserError.__module__}.UserError: "))
    except (AttributeError, KeyError, TypeError) as e:
        _end(" ".join(str(e).replace("\\n", " ").replace("\\", "").split()))


def _end(line: str) -> None:
    print(f"error: flags: {line}; --help lists the flags", file=sys.stderr)
    sys.exit(2)
