"""Random programs against the references, the same programs in every run.

They take about a minute; two minutes or more if the kernels are not in the cache yet.
"""

from __future__ import annotations

import pytest

from tests.fuzz.machine import fuzz, machine
from tests.fuzz.options import FAMILIES

EXAMPLES = 20

# the kernels of the others are compiled for these programs alone
QUICK = [family.name for family in FAMILIES if family.entry.core or family.entry.quick]
NAMES = [pytest.param(f.name, marks=[pytest.mark.exhaustive] * (f.name not in QUICK)) for f in FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_random_programs(name):
    fuzz(machine(name), EXAMPLES)
