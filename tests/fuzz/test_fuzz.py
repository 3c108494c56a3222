"""Random programs against the references: the same ones each time, for about a minute in all, and two where kernels are yet to compile."""

from __future__ import annotations

import pytest

from tests.fuzz.machine import fuzz, machine
from tests.fuzz.options import FAMILIES

EXAMPLES = 70


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_random_programs(name):
    fuzz(machine(name), EXAMPLES)
