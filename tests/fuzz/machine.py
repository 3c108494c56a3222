"""All events as one Hypothesis state machine for each optimizer, and how long it is run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.changed_options import ChangedOptions
from tests.fuzz.checkpoints import Checkpoints
from tests.fuzz.failures import Failures
from tests.fuzz.gradients import Gradients
from tests.fuzz.options import FAMILIES
from tests.fuzz.parameters import Parameters

# No explain phase: it traces every line, which makes shrinking many times slower
PHASES = [phase for phase in Phase if phase != Phase.explain]
EVENTS = 12  # of one program, at most


class Fuzzer(Gradients, Parameters, ChangedOptions, Checkpoints, Failures):
    """A program of random events; ``family`` says of which optimizer."""


# Events that are left out because of a known defect; remove the line once it is fixed
KNOWN_DEFECTS: dict[str, str] = {}


def machine(name: str, without: Iterable[str] = KNOWN_DEFECTS) -> type[Fuzzer]:
    """``without``: names of events that are left out."""
    family = next(family for family in FAMILIES if family.name == name)
    return type(f"{name}Program", (Fuzzer,), {"family": family, **dict.fromkeys(without)})


def fuzz(program: type[Fuzzer], examples: int, **more: Any) -> None:
    """Runs this many programs; a failing one is shrunk, and raised together with its text."""
    more = {"phases": PHASES, **more}
    run_state_machine_as_test(program, settings=settings(max_examples=examples, stateful_step_count=EVENTS, **more))
