"""Norms are measured in visits that the rule makes anyway."""

from __future__ import annotations

import pytest

from fusedadam.optimizers.adamp import adamp
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.ema_adamw import ema_adam
from fusedadam.optimizers.lamb import lamb
from fusedadam.optimizers.sgd import sgd
from fusedadam.rules.norms import REPORTS


@pytest.mark.parametrize("rule", [adam, adamp, ema_adam, lamb, sgd], ids=lambda rule: rule.name)
@pytest.mark.parametrize("choice", [False, True])
def test_no_visit_is_added_and_the_same_roles_are_read_and_written(rule, choice):
    flags = dict.fromkeys(rule.flags, choice)
    plain, measuring = rule.specialize(flags), rule.specialize(flags, measures_norms=True)

    def visits(specialized):
        return [(s.position, s.reads, s.writes) for s in specialized.stages if s.space == "element"]

    assert visits(measuring) == visits(plain)
    assert {*measuring.reports} == {*plain.reports, *REPORTS.values()}
    assert measuring.shared == plain.shared


def test_a_rule_that_is_asked_again_is_not_lowered_again():
    flags = dict.fromkeys(adam.flags, False)
    assert adam.specialize(flags, measures_norms=True) is adam.specialize(flags, measures_norms=True)
    assert adam.specialize(flags, measures_norms=True) is not adam.specialize(flags)
