"""The five domains of the testbed, by name."""

from molora_jax.config import UserError
from molora_jax.data.testbed.arithmetic import ARITHMETIC
from molora_jax.data.testbed.calendar import CALENDAR
from molora_jax.data.testbed.lists import LISTS
from molora_jax.data.testbed.logic import LOGIC
from molora_jax.data.testbed.problem import Domain
from molora_jax.data.testbed.strings import STRINGS

DOMAINS = {domain.name: domain for domain in (ARITHMETIC, LOGIC, STRINGS, LISTS, CALENDAR)}


def domain(name: str) -> Domain:
    """The domain of that name.

    Raises:
      UserError: there is none.
    """
    if name not in DOMAINS:
        raise UserError(f"testbed: got the domain {name!r}, expected one of {', '.join(DOMAINS)}")
    return DOMAINS[name]
