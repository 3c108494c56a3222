"""CANN's two-phase calls: the first phase checks, the second runs once; both return a status and never raise.

test_operators_errors.py has the errors of the first phase, together with those of the operators.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from fusedadam.ascend import (
    aclGetRecentErrMsg,
    aclnnApplyAdamWV2,
    aclnnApplyAdamWV2GetWorkspaceSize,
    aclnnApplyFusedEmaAdam,
    aclnnApplyFusedEmaAdamGetWorkspaceSize,
    npu_apply_fused_adamw_v2,
    npu_apply_fused_ema_adamw,
)
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.ema_adamw import ema_adam
from tests.support import BF16, F16, F32, Case, draw, pairwise
from tests.test_checks import bits

NULLPTR, INVALID = 161001, 161002
NUMBERS = {"lr": 0.1, "emaDecay": 0.9, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weightDecay": 0.1}
OURS = {"emaDecay": "ema_decay", "weightDecay": "weight_decay", "biasCorrection": "bias_correction"}
ADAMW = Case(adam, {**dict.fromkeys(adam.flags, False), "amsgrad": True}, {})
EMA = Case(ema_adam, dict.fromkeys(ema_adam.flags, False), {})


class Call:
    """The arguments of a first phase, and what it gave."""

    def __init__(self, dtype=F32, device="cpu", mode=1, bias_correction=True, step=2):
        roles = {role: tensor.to(device) for role, tensor in draw(EMA, [(3, 5)], (dtype,))[0].items()}
        names = {"grad": "grad", "param": "varRef", "exp_avg": "mRef", "exp_avg_sq": "vRef", "ema_params": "sRef"}
        self.tensors = {names[role]: roles[role] for role in names}
        self.step = torch.tensor([step], device=device)
        self.numbers = {**NUMBERS, "mode": mode, "biasCorrection": bias_correction}
        self.device = device

    def prepare(self):
        self.status, self.size, self.executor = aclnnApplyFusedEmaAdamGetWorkspaceSize(
            **self.tensors, step=self.step, **self.numbers
        )
        assert self.status == 0
        return self

    def run(self, **other):
        own = {"workspace": self.workspace(), "workspaceSize": self.size, "executor": self.executor, "stream": None}
        return aclnnApplyFusedEmaAdam(**own | other)

    def workspace(self, size=None):
        return torch.empty(self.size if size is None else size, dtype=torch.uint8, device=self.device)

    def by_the_operator(self):
        """The bits that MindSpeed's operator makes of the same, with this step's number."""
        copies = [tensor.clone() for tensor in self.tensors.values()]
        options = {OURS.get(name, name): value for name, value in self.numbers.items()}
        npu_apply_fused_ema_adamw(*copies, step=self.step, **options)
        return copies

    def held(self):
        return [bits(tensor) for tensor in (*self.tensors.values(), self.step)]


@pytest.fixture(autouse=True)
def nothing_failed_before():
    aclGetRecentErrMsg()


def assert_equal(tensors, expected):
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize(("dtype", "mode", "bias_correction"), pairwise((F32, F16, BF16), (0, 1), (True, False)))
def test_both_phases_give_the_bits_of_the_operator_and_the_first_writes_nothing(dtype, mode, bias_correction, device):
    call = Call(dtype, device, mode, bias_correction)
    before, expected = call.held(), call.by_the_operator()
    call.prepare()
    assert call.held() == before
    assert call.run() == 0
    assert_equal(call.tensors.values(), expected)
    assert aclGetRecentErrMsg() is None
    assert call.tensors["varRef"]._version > before[1][4]


def test_arguments_may_come_in_the_order_of_the_page():
    call, again = Call(), Call()
    expected = call.by_the_operator()
    lr, ema, beta1, beta2, eps, decay = NUMBERS.values()
    status, size, executor = aclnnApplyFusedEmaAdamGetWorkspaceSize(
        *again.tensors.values(), again.step, lr, ema, beta1, beta2, eps, 1, True, decay
    )
    assert status == 0
    assert aclnnApplyFusedEmaAdam(torch.empty(size, dtype=torch.uint8), size, executor, None) == 0
    assert_equal(again.tensors.values(), expected)


def test_what_the_tensors_hold_when_it_runs_is_what_counts():
    """As on a device, where the first phase has only their addresses."""
    call = Call(step=1).prepare()
    for tensor in call.tensors.values():
        tensor.mul_(0.5)
    call.step.fill_(7)
    expected = call.by_the_operator()
    assert call.run() == 0
    assert_equal(call.tensors.values(), expected)


def test_a_step_that_has_become_impossible_is_refused_by_the_second_phase():
    call = Call().prepare()
    call.step.zero_()
    before = call.held()
    assert call.run() == INVALID
    assert "step" in aclGetRecentErrMsg()
    assert call.held() == before


def test_an_executor_runs_once():
    call = Call().prepare()
    assert call.run() == 0
    before = call.held()
    for _ in range(2):
        assert call.run() == INVALID
        assert "executor has run already" in aclGetRecentErrMsg()
    assert call.held() == before


def test_executors_do_not_know_of_each_other():
    first, second = Call(step=1).prepare(), Call(step=50).prepare()
    expected = [call.by_the_operator() for call in (first, second)]
    assert second.run() == 0
    assert first.run() == 0
    for call, own in zip((first, second), expected, strict=True):
        assert_equal(call.tensors.values(), own)


def test_more_workspace_of_another_dtype_is_welcome_and_the_rest_of_it_is_left_alone():
    call = Call().prepare()
    expected, workspace = call.by_the_operator(), torch.full((call.size,), 7, dtype=torch.int64)
    assert call.run(workspace=workspace) == 0
    assert_equal(call.tensors.values(), expected)
    assert (workspace.view(torch.uint8)[call.size :].view(torch.int64) == 7).all()


BAD = {
    "no executor": (NULLPTR, "executor", lambda call: {"executor": None}),
    "another object": (INVALID, "executor", lambda call: {"executor": object()}),
    "a size": (INVALID, "executor", lambda call: {"executor": call.size}),
    "no workspace": (NULLPTR, "workspace", lambda call: {"workspace": None}),
    "a workspace that is too small": (INVALID, "workspace", lambda call: {"workspace": call.workspace(call.size - 1)}),
    "an empty workspace": (INVALID, "workspace", lambda call: {"workspace": call.workspace(0)}),
    "more said than there is": (INVALID, "workspace", lambda call: {"workspaceSize": call.size + 8}),
    "a size that is too small": (INVALID, "workspaceSize", lambda call: {"workspaceSize": call.size - 1}),
    "a negative size": (INVALID, "workspaceSize", lambda call: {"workspaceSize": -1}),
    "no size": (INVALID, "workspaceSize", lambda call: {"workspaceSize": None}),
    "a size that is no integer": (INVALID, "workspaceSize", lambda call: {"workspaceSize": float(call.size)}),
    "bytes": (INVALID, "workspace", lambda call: {"workspace": bytearray(call.size)}),
    "an address": (INVALID, "workspace", lambda call: {"workspace": call.workspace().data_ptr()}),
    "memory elsewhere": (INVALID, "workspace", lambda call: {"workspace": call.workspace().to("meta")}),
    "memory off by a byte": (INVALID, "workspace", lambda call: {"workspace": call.workspace(call.size + 8)[1:]}),
    "memory with gaps": (INVALID, "workspace", lambda call: {"workspace": call.workspace(2 * call.size)[::2]}),
    "sparse memory": (INVALID, "workspace", lambda call: {"workspace": torch.ones(call.size).to_sparse()}),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_second_phase_that_is_refused_writes_nothing_and_may_be_tried_again(kind):
    status, name, change = BAD[kind]
    call = Call().prepare()
    before, expected = call.held(), call.by_the_operator()
    for _ in range(2):
        assert call.run(**change(call)) == status
        assert aclGetRecentErrMsg().split()[0] == name
        assert call.held() == before
    assert call.run() == 0
    assert_equal(call.tensors.values(), expected)


def test_a_size_may_be_numpys_integer():
    call = Call().prepare()
    assert call.run(workspaceSize=np.int64(call.size)) == 0


def test_a_workspace_that_is_one_of_the_tensors_is_refused():
    call = Call()
    call.tensors = {name: torch.ones(100) for name in call.tensors}
    call.prepare()
    before = call.held()
    assert call.run(workspace=call.tensors["varRef"]) == INVALID
    assert "workspace" in aclGetRecentErrMsg()
    assert call.held() == before


def test_a_tensor_that_was_made_smaller_after_the_first_phase_is_refused():
    call = Call().prepare()
    block = torch.full((8, 5), 7.0)
    call.tensors["mRef"].data = block[:1]
    assert call.run() == INVALID
    assert "mRef" in aclGetRecentErrMsg()
    assert (block == 7).all()


def test_a_reason_is_given_once_and_a_success_leaves_it():
    call = Call().prepare()
    assert aclGetRecentErrMsg() is None
    assert call.run(executor=None) == NULLPTR
    assert call.run() == 0
    assert "executor" in aclGetRecentErrMsg()
    assert aclGetRecentErrMsg() is None


def test_reasons_are_each_threads_own():
    call, seen = Call().prepare(), []

    def other():
        seen.append(aclGetRecentErrMsg())
        call.run(workspaceSize=0)
        seen.append(aclGetRecentErrMsg())

    call.run(executor=None)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] is None
    assert "workspaceSize" in seen[1]
    assert "executor" in aclGetRecentErrMsg()


# ApplyAdamWV2

V2 = {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "weightDecay": 0.1, "eps": 1e-3}


def adamw_tensors(dtype=F32, device="cpu"):
    """In the order of the page: varRef, mRef, vRef, maxGradNormOptionalRef, grad."""
    drawn = draw(ADAMW, [(3, 5)], (dtype,))[0]
    return [drawn[role].to(device) for role in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "grad")]


def run_v2(tensors, step, amsgrad=True, maximize=False, device="cpu"):
    before = [bits(t) for t in (*(t for t in tensors if t is not None), step)]
    status, size, executor = aclnnApplyAdamWV2GetWorkspaceSize(*tensors, step, *V2.values(), amsgrad, maximize)
    assert status == 0
    assert [bits(t) for t in (*(t for t in tensors if t is not None), step)] == before
    return aclnnApplyAdamWV2(torch.empty(size, dtype=torch.uint8, device=device), size, executor, None)


@pytest.mark.parametrize(
    ("dtype", "amsgrad", "maximize", "step_dtype"),
    pairwise((F32, F16, BF16), (True, False), (True, False), (torch.int64, F32)),
)
def test_the_kernel_adds_one_to_the_step_and_is_otherwise_mindspeeds_operator(
    dtype, amsgrad, maximize, step_dtype, device
):
    for done in (0, 4):
        mine, expected = adamw_tensors(dtype, device), adamw_tensors(dtype, device)
        step = torch.full((1,), done, dtype=step_dtype, device=device)
        assert run_v2(mine, step, amsgrad, maximize, device) == 0
        assert step.item() == done, "the count is only read"
        var, m, v, largest, grad = expected
        attributes = {{"weightDecay": "weight_decay"}.get(name, name): value for name, value in V2.items()}
        npu_apply_fused_adamw_v2(var, grad, m, v, largest, done + 1, **attributes, amsgrad=amsgrad, maximize=maximize)
        assert_equal(mine, expected)


def test_without_amsgrad_the_maximum_may_be_missing():
    mine, expected = adamw_tensors(), adamw_tensors()
    mine[3] = None
    assert run_v2(mine, torch.tensor([1]), amsgrad=False) == 0
    assert run_v2(expected, torch.tensor([1]), amsgrad=False) == 0
    assert torch.equal(mine[0], expected[0])


def test_an_executor_of_v2_runs_once_and_reads_the_count_when_it_runs():
    mine, expected, step = adamw_tensors(), adamw_tensors(), torch.tensor([0])
    status, size, executor = aclnnApplyAdamWV2GetWorkspaceSize(*mine, step, *V2.values(), True, False)
    assert status == 0
    step.fill_(3)
    workspace = torch.empty(size, dtype=torch.uint8)
    assert aclnnApplyAdamWV2(workspace, size, executor, None) == 0
    assert run_v2(expected, torch.tensor([3])) == 0
    assert_equal(mine, expected)
    assert aclnnApplyAdamWV2(workspace, size, executor, None) == INVALID
    assert "executor has run already" in aclGetRecentErrMsg()
    assert aclnnApplyAdamWV2(workspace, size, None, None) == NULLPTR
    assert aclnnApplyAdamWV2(None, size, executor, None) == NULLPTR
