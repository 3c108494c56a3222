"""Parameters that FSDP1 has flattened: rules that sum are refused. What runs is in tests/distributed."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from fusedadam.contract import wrappers


def flat():
    param = torch.nn.Parameter(torch.ones(3))
    param._fsdp_flattened = True
    return param


@pytest.mark.parametrize("make", [fusedadam.AdamP, lambda params: fusedadam.AdamW(params, max_grad_norm=1.0)])
def test_rules_that_sum_are_refused(make):
    with pytest.raises(ValueError, match="FullyShardedDataParallel has flattened and sharded"):
        make([flat()])


def test_a_norm_that_is_switched_on_later_is_refused_by_the_next_step():
    param = flat()
    optimizer = fusedadam.AdamW([param])
    param.grad = torch.ones(3)
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match="flattened and sharded"):
        optimizer.step()
    assert param.eq(1).all()


def test_averages_of_flat_parameters_are_refused():
    with pytest.raises(RuntimeError, match="averages would not reach the model"):
        wrappers.check_has_all_averages(fusedadam.EmaAdamW([flat()]))


def test_an_infinity_is_asked_of_nobody_where_nothing_is_sharded():
    found_inf = torch.ones(1)
    assert wrappers.found_anywhere(found_inf, []) is found_inf
