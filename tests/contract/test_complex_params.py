"""Complex parameters: which optimizers take them, and what else an optimizer does with them."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam.contract.base import FusedOptimizer
from fusedadam.in_backward import step_in_backward
from fusedadam.ops import orthogonalized, sqrt, sum_last
from fusedadam.rules.rule import Scalar, Value, rule
from tests.meaning.test_complex import C64, C128, TAKING, numbers, train

REFUSING = sorted(
    name
    for name, made in vars(fusedadam).items()
    if inspect.isclass(made) and issubclass(made, FusedOptimizer) and made is not FusedOptimizer and name not in TAKING
)
OPTIONS = {"BertAdam": {"lr": 0.1}}


def leaf(shape=(3, 2), dtype=C64, seed=0):
    param = torch.nn.Parameter(numbers(shape, dtype, seed))
    param.grad = numbers(shape, dtype, seed + 1)
    return param


def test_every_optimizer_is_listed():
    assert {"AdamP", "Lion", "Lamb"} <= {*REFUSING}
    assert all(getattr(fusedadam, name).takes_complex for name in TAKING)
    assert not any(getattr(fusedadam, name).takes_complex for name in REFUSING)


def test_the_page_lists_them():
    page = Path(__file__).parents[2] / "docs/optimizers/index.md"
    sentence = re.search(r"^([\w, ]+) take complex parameters", page.read_text("utf-8"), re.MULTILINE)
    assert sorted(re.split(", | and ", sentence.group(1))) == sorted(TAKING)


@pytest.mark.parametrize("name", REFUSING)
def test_optimizers_of_real_numbers_refuse_them_when_a_group_is_added(name):
    make, real = getattr(fusedadam, name), torch.nn.Parameter(torch.ones(2, 2))
    refusal = rf"dtype complex64.*{name} is defined for real parameters.*view_as_real"
    with pytest.raises(RuntimeError, match=refusal):
        make([real, leaf()], **OPTIONS.get(name, {}))
    optimizer = make([real], **OPTIONS.get(name, {}))
    with pytest.raises(RuntimeError, match=refusal):
        optimizer.add_param_group({"params": [leaf()]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", ["cautious", "update_clipping"])
def test_options_of_real_numbers_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=True.*complex64.*{option}=False"):
        fusedadam.AdamW([leaf()], **{option: True})
    param = leaf()
    optimizer = fusedadam.AdamW([param])
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0][option] = True
    with pytest.raises(ValueError, match=f"{option}=True"):
        optimizer.step()
    assert torch.equal(param, before)
    real = {"params": [torch.nn.Parameter(torch.ones(2))], option: True}
    fusedadam.AdamW([{"params": [leaf()]}, real]).step()


def test_a_conjugated_parameter_is_refused_and_a_real_gradient_too():
    with pytest.raises(RuntimeError, match=r"param is lazily conjugated.*resolve_conj"):
        fusedadam.AdamW([torch.nn.Parameter(numbers((3,), C64, 0).conj())])
    optimizer = fusedadam.AdamW([leaf((3,))])
    optimizer.step()
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param]["exp_avg"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"'exp_avg' has dtype float32; it must be one of complex64"):
        optimizer.step()


def test_the_conjugated_gradients_of_a_backward_pass():
    """torch.optim cannot step with these; the gradient stays as it is."""
    param, factor = torch.nn.Parameter(numbers((3, 2), C128, 0)), numbers((3, 2), C128, 1)
    expected = torch.nn.Parameter(param.detach().clone())
    ours, theirs = fusedadam.AdamW([param], lr=0.1), torch.optim.AdamW([expected], lr=0.1)
    for _ in range(3):
        for leaf_, optimizer in ((param, ours), (expected, theirs)):
            optimizer.zero_grad()
            (leaf_.conj() * (factor + leaf_.detach())).real.sum().backward()
        assert param.grad.is_conj()
        ours.step()
        assert param.grad.is_conj()
        expected.grad = expected.grad.resolve_conj()
        theirs.step()
    torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-12)


def test_states_are_wide_whatever_storage_is_asked_for():
    param = leaf((64, 128))
    wide = fusedadam.AdamW([copy.deepcopy(param)], lr=0.1)
    for options in ({"storage": "8bit"}, {"state_dtype": torch.bfloat16}, {"storage": {"exp_avg": "bf16"}}):
        mixed = [copy.deepcopy(param), torch.nn.Parameter(torch.ones(64, 128))]
        optimizer = fusedadam.AdamW(mixed, lr=0.1, **options)
        train(optimizer, 2)
        assert all(optimizer.state[mixed[0]][name].dtype == C64 for name in ("exp_avg", "exp_avg_sq"))
    train(wide, 2)
    assert torch.equal(wide.param_groups[0]["params"][0], mixed[0])


def test_memory_summary_counts_them_and_says_why_they_are_wide():
    optimizer = fusedadam.AdamW([leaf((64, 128))], storage="8bit")
    optimizer.step()
    text = optimizer.memory_summary()
    assert "Storage: 24.00 bytes a parameter" in text
    assert "1 parameter of 8,192 elements is kept exactly: complex" in text
    assert "complex64" in text


def test_a_state_dict_of_real_numbers_is_refused():
    optimizer = fusedadam.AdamW([leaf()])
    optimizer.step()
    other = fusedadam.AdamW([torch.nn.Parameter(torch.ones(3, 2))])
    with pytest.raises(RuntimeError, match=r"'exp_avg' has dtype complex64; it must be one of float32"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("part", [complex(float("inf"), 0), complex(0, float("nan"))])
@pytest.mark.parametrize("conjugated", [False, True])
def test_skip_nonfinite_sees_both_parts(part, conjugated):
    param = leaf()
    optimizer = fusedadam.AdamW([param], skip_nonfinite=True)
    before = param.detach().clone()
    param.grad[1, 1] = part
    if conjugated:
        param.grad = param.grad.conj()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(param, before)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert not torch.equal(param, before)


def test_stepping_in_backward_gives_the_same():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(numbers((3, 2), C64, 0))

        def forward(self):
            return (self.weight.conj() * numbers((3, 2), C64, 1)).imag.square().sum()

    ahead, plain = Model(), Model()
    steps = [step_in_backward(ahead, fusedadam.AdamW), fusedadam.AdamW(plain.parameters())]
    for _ in range(3):
        for model, optimizer in zip((ahead, plain), steps, strict=True):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    assert ahead.weight.grad is None
    assert torch.equal(ahead.weight, plain.weight)


@pytest.mark.parametrize("backend", ["numba", "eager"])
@pytest.mark.parametrize("conjugated", [False, True])
def test_a_scale_divides_them_and_leaves_gradients_so(conjugated, backend):
    """As torch.amp.GradScaler asks for it, which itself has no kernel for complex gradients."""
    scaled, plain = leaf(), leaf()
    scaled.grad = (8 * scaled.grad).conj().resolve_conj().conj() if conjugated else 8 * scaled.grad
    optimizer, expected = fusedadam.AdamW([scaled], backend=backend), fusedadam.AdamW([plain])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    expected.step()
    assert torch.equal(scaled, plain)
    assert torch.equal(scaled.grad, plain.grad)
    assert scaled.grad.is_conj() == conjugated
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(scaled, plain)


def test_one_launch_for_complex_and_real_parameters():
    real, pair = torch.nn.Parameter(torch.ones(3)), leaf()
    real.grad = torch.ones(3)
    optimizer = fusedadam.AdamW([real, pair])
    optimizer.step()
    assert len(optimizer._stepper.last_plan.launches) == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_widened_state_dicts_keep_imaginary_parts():
    param = torch.nn.Parameter(numbers((3,), torch.complex32, 0))
    optimizer = fusedadam.AdamW([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    wide = fusedadam.AdamW.widen_state_dict(optimizer.state_dict())
    assert wide["state"][0]["exp_avg"].dtype == torch.complex32


def by_matrix_scalars(lr):
    return {"lr": lr}


@rule(scalars=by_matrix_scalars)
def by_matrix(param: Value, grad: Value, *, lr: Scalar) -> Value:
    param = param - lr * orthogonalized(grad)
    return param


@rule(scalars=by_matrix_scalars)
def by_rows(param: Value, grad: Value, *, lr: Scalar) -> Value:
    param = param - lr * grad / sqrt(sum_last(grad * grad))
    return param


@pytest.mark.parametrize("own", [by_matrix, by_rows], ids=lambda own: own.name)
def test_rows_and_matrices_of_real_numbers_are_refused(own):
    """Kernels counted rows of pairs as rows of real numbers, and wrote beyond their memory."""

    class Own(FusedOptimizer):
        rule, states, options, takes_complex = own, {}, fusedadam.OPTIONS, True

        def __init__(self, params, lr=1.0, **common):
            super().__init__(params, lr=lr, **common)

    with pytest.raises(ValueError, match="has rows, columns or matrices of real numbers; set takes_complex = False"):
        Own([torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.complex64))])
