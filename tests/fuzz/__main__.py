"""Runs random programs with new seeds for some minutes: ``python -m tests.fuzz 60``.

The first program that fails is shortened, printed, and ends the run.
"""

from __future__ import annotations

import sys
import time
import warnings

from hypothesis import HealthCheck, settings

from tests.fuzz.machine import fuzz, machine
from tests.fuzz.options import FAMILIES

EXAMPLES = 200  # of one optimizer at a time


def main(minutes: float) -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    settings.register_profile("long", deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("long")
    begin, programs = time.monotonic(), 0
    while time.monotonic() < begin + 60 * minutes:
        for family in FAMILIES:
            fuzz(machine(family.name), EXAMPLES)
            programs += EXAMPLES
            print(f"{(time.monotonic() - begin) / 60:5.1f} minutes, {programs} programs, no failure", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
