"""torch_npu's own formulas, which torch.optim does not have, and its base class."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import required

import fusedadam
from fusedadam import ascend
from fusedadam.ascend import NpuFusedOptimizerBase
from tests.ascend.training import assert_same, leaves, train
from tests.meaning.by_hand import LambByHand, RMSpropTFByHand, norm_by_hand
from tests.support import F64

MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
HANDS = [
    (ascend.NpuFusedRMSpropTF, RMSpropTFByHand, {**MOMENTUM, "centered": True}),
    (ascend.NpuFusedRMSpropTF, RMSpropTFByHand, {**MOMENTUM, "decoupled_decay": True, "lr_in_momentum": False}),
    (ascend.NpuFusedLamb, LambByHand, {"weight_decay": 0.1, "use_global_grad_norm": True}),
    (ascend.NpuFusedLamb, LambByHand, {"weight_decay": 0.1, "adam": True}),
]


@pytest.mark.parametrize(("cls", "by_hand", "options"), HANDS)
def test_it_is_the_formula_in_float64(cls, by_hand, options):
    npus = {"bias_correction": False, "max_weight_norm": 10.0} if by_hand is LambByHand else {}
    params = leaves((F64,))
    with torch.no_grad():
        params[0].mul_(100)  # a norm above Lamb's limit
    hands = {p: by_hand(p.detach().clone(), **options, **npus) for p in params}
    optimizer = cls(params, **options)
    for step in range(4):
        train(optimizer, 1, start=step)
        norm = {"norm": norm_by_hand([p.grad for p in params])} if by_hand is LambByHand else {}
        for p, hand in hands.items():
            hand.step(p.grad, **norm)
            torch.testing.assert_close(p.detach(), hand.p, rtol=1e-11, atol=1e-13)


# the base class


def test_every_one_of_torch_npus_is_an_instance_of_the_base():
    names = [name for name in ascend.__all__ if name.startswith("NpuFused")]
    assert len(names) == 10
    for name in names:
        assert issubclass(getattr(ascend, name), NpuFusedOptimizerBase)
        assert issubclass(getattr(ascend, name), torch.optim.Optimizer)
    assert not issubclass(fusedadam.AdamW, NpuFusedOptimizerBase)


class Signs(NpuFusedOptimizerBase):
    """As in torch_npu's page: defaults as a dict, and `required`."""

    def __init__(self, params, lr=required):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()


def test_a_class_of_ones_own_steps_clips_and_sets_gradients_to_zero():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = Signs([param], lr=0.5)
    param.grad = torch.full((4,), 3.0)
    assert optimizer.clip_grad_norm_fused_(1.0).item() == 6.0
    torch.testing.assert_close(param.grad, torch.full((4,), 0.5))
    optimizer.step()
    assert torch.equal(param, torch.full((4,), 0.5))
    optimizer.zero_grad()
    assert torch.equal(param.grad, torch.zeros(4))
    again = Signs([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 0.5
    assert optimizer.is_fused_optimizer
    with pytest.raises(ValueError, match="lr"):
        Signs([param])


def test_a_class_that_counts_on_combined_tensors_says_what_to_do_when_it_steps():
    class Combined(NpuFusedOptimizerBase):
        def _group_step(self, group_index):
            raise AssertionError

    optimizer = Combined([torch.nn.Parameter(torch.ones(2))], {"lr": 0.1})
    with pytest.raises(NotImplementedError, match=r"Combined has no step\(\).*override step\(\)"):
        optimizer.step()


def test_ours_keep_their_own_step_under_a_subclass():
    class Mine(ascend.NpuFusedAdam):
        pass

    assert_same(train(Mine(leaves())), train(ascend.NpuFusedAdam(leaves())))
