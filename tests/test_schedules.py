"""BertAdam's schedules: factors of the learning rate, by the part of the training that is done."""

import pytest

from fusedadam.schedules import SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_they_rise_to_the_end_of_the_warmup_and_do_not_rise_after_it(name):
    factors = [float(SCHEDULES[name](k / 20, 0.5)) for k in range(21)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[11:] == sorted(factors[11:], reverse=True)
    assert factors[0] == 0
    assert max(factors) <= 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_they_begin_at_one(name):
    assert float(SCHEDULES[name](0.0, -1.0)) == pytest.approx(1.0)
