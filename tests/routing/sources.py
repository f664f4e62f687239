"""Factories that processes of their own call for the tiny decoders and the programs between them."""

from molora_jax.engine.blueprint import Model
from molora_jax.engine.processes import Source
from molora_jax.routing.program import Program
from tests.routing import catalogue, routed


def model(seed: str) -> Model:
    return routed.model(int(seed))


def program(name: str):
    return found(name), catalogue.params(found(name))


def found(name: str) -> Program:
    return next(program for program in catalogue.PROGRAMS if catalogue.name(program) == name)


def of(program: Program) -> tuple[list[Source], Source]:
    """Sources of the models of a program, and of itself."""
    here = lambda factory, argument: Source(f"{__name__}:{factory}", (argument,))
    return [here("model", str(i)) for i in range(program.models)], here("program", catalogue.name(program))
