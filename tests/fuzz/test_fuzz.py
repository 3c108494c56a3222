"""Random programs against the references: the same ones each time, for about a minute and a half in all."""

from __future__ import annotations

import pytest

from tests.fuzz.machine import fuzz, machine
from tests.fuzz.options import FAMILIES

EXAMPLES = 100


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_random_programs(name):
    fuzz(machine(name), EXAMPLES)
