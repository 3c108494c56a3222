"""Every option, dtype and preset of a class is tried, and steps are as the cases say."""

from __future__ import annotations

import functools
import itertools
import sys
import types

import pytest
import torch

from fusedadam import DERIVED, OPTIONS, FusedOptimizer, RowValue, State, checks
from fusedadam.catalog import CATALOG
from fusedadam.cli import verify as command
from fusedadam.cli.verify import cases, steps
from fusedadam.cli.verify.cases import CLIPPED, MIXES, Case, cases_of, together
from fusedadam.cli.verify.run import Failure, Result, verify
from fusedadam.cli.verify.steps import Place
from fusedadam.contract.storage import PRESETS
from fusedadam.ops import clipped_by_norm, orthogonalized, power, sqrt, sum_last
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule
from tests.support import BF16, F16, F32, F64

EAGER = Place("cpu", "eager")


def _scalars(step, lr, momentum, weight_decay, max_grad_norm):
    return {"lr": lr, "keep": momentum, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}


@rule(scalars=_scalars)
def everything(
    param: Value, grad: Value, slow: Value, momentum_buffer: Value, *,
    lr: Scalar, keep: Scalar, weight_decay: Scalar, max_grad_norm: Scalar,
    clipped: Flag, maximize: Flag, with_momentum: Flag, nesterov: Flag, cubic: Flag, squared: Flag,
) -> Values:  # fmt: skip
    if maximize:
        grad = -grad
    if clipped:
        grad, norm = clipped_by_norm(grad, max_grad_norm)  # noqa: RUF059  no name may begin with _
    grad = grad + weight_decay * param
    if squared:
        grad = grad * grad
    elif cubic:
        grad = grad * grad * grad
    slow = slow + keep * (param - slow)
    if with_momentum:
        momentum_buffer = keep * momentum_buffer + grad
        grad = grad + keep * momentum_buffer if nesterov else momentum_buffer
    param = param - lr * grad
    return param, slow, momentum_buffer


class Everything(FusedOptimizer):
    """With every kind of option that chooses between formulas; some of them exclude each other."""

    rule = everything
    states = {"slow": State(initial="param", dtype_option="slow_dtype"), "momentum_buffer": State(decay="momentum")}
    options = OPTIONS | {
        "momentum": checks.fraction, "nesterov": checks.boolean, "slow_dtype": checks.storage_dtype,
        "shape": functools.partial(checks.one_of, allowed=("linear", "squared", "cubic")),
    }  # fmt: skip
    derived = DERIVED | {name: lambda group, name=name: group["shape"] == name for name in ("squared", "cubic")}

    def __init__(self, params, lr=1e-2, momentum=0.0, weight_decay=0.0, nesterov=False, shape="linear"):
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, shape=shape,
            max_grad_norm=None,
        )  # fmt: skip

    @classmethod
    def check(cls, group, names=None):
        super().check(group, names)
        if group.get("nesterov") and not group.get("momentum"):
            raise ValueError("nesterov=True needs momentum")


VALUES = {
    "max_grad_norm": {None, CLIPPED}, "maximize": {False, True}, "momentum": {0.0, 0.875}, "nesterov": {False, True},
    "shape": {"linear", "squared", "cubic"},
}  # fmt: skip


@rule(scalars=lambda lr: {"lr": lr})
def rooted(param: Value, grad: Value, *, lr: Scalar) -> Values:
    param = param - lr * power(grad * grad, 0.3)
    return param


class Rooted(FusedOptimizer):
    """With as little as possible: no state, no option but the learning rate."""

    rule = rooted
    states = {}
    options = {"lr": checks.number}

    def __init__(self, params, lr=0.125):
        super().__init__(params, lr=lr)


@rule(scalars=lambda lr: {"lr": lr})
def by_row(param: Value, grad: Value, row: RowValue, *, lr: Scalar) -> Values:
    update = orthogonalized(grad)
    row = row + sum_last(update * update)
    param = param - lr * update / sqrt(row)
    return param, row


class ByRow(FusedOptimizer):
    """For matrices alone: neither vectors nor convolutions have the rows of the state."""

    rule = by_row
    states = {"row": State(signed=False)}
    options = {"lr": checks.number}

    def __init__(self, params, lr=0.125):
        super().__init__(params, lr=lr)


class ForMatrices(ByRow):
    """It says so itself."""

    @staticmethod
    def _check_param(group, param):
        if param.dim() < 2:
            raise ValueError("only matrices")


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("own_optimizers")
    made.Everything, made.Rooted, made.ByRow, made.ForMatrices = Everything, Rooted, ByRow, ForMatrices
    monkeypatch.setitem(sys.modules, "own_optimizers", made)
    return "own_optimizers"


@pytest.mark.parametrize("name", ["ByRow", "ForMatrices"])
def test_shapes_that_a_class_refuses_are_left_out_and_said(module, name, capsys, recwarn):
    options = ["--backend", "eager", "--device", "cpu", "--jobs", "1"]
    assert command.main(["--optimizers", f"{module}:{name}", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{name} takes no parameters of shape (), (1,), (0,), (1023,)" in said
    assert not recwarn
    assert "(4, 3, 3, 3), (2049,), (4, 8, 3, 3), (9, 1056)" not in said
    case = cases_of(f"{module}:{name}", everything=False)[0]
    shapes = [shape for shape, _ in steps.layouts_of(case)]
    assert shapes == [(5, 7), (2, 8193), (1025, 3), (70, 30), (40, 51), (67, 96), (9, 1056)]
    assert len(steps.take(case, EAGER, 0)[0].members) == len(shapes)


def test_an_authors_rule_that_fails_everywhere_is_suspected_before_the_machine():
    place, other = EAGER, Place("cpu", "numba")

    def said(optimizer, *places):
        case = Case(optimizer, (), F32, F32)
        return " ".join(command._complaint([Result(case, {}, [Failure(p, "wrong") for p in places])], [place, other]))

    assert "Look at the rule first" in said("mine:Own", place, other)
    assert "Delete the compiled code" in said("mine:Own", other)
    assert "Delete the compiled code" in said("AdamW", place, other)


def test_a_class_that_takes_no_shape_fails_with_its_own_error(module, monkeypatch):
    case = cases_of(f"{module}:ForMatrices", everything=False)[0]
    monkeypatch.setattr(steps, "LAYOUTS", [((3,), torch.clone)])
    monkeypatch.setattr(steps, "_taken", steps._taken.__wrapped__)
    with pytest.raises(ValueError, match="no tensor of 1 is taken; of the last one: only matrices"):
        steps.take(case, EAGER, 0)


def values_tried(tried):
    defaults = {"max_grad_norm": None, "maximize": False, "momentum": 0.0, "nesterov": False, "shape": "linear"}
    return {name: {{**defaults, **dict(case.changed)}[name] for case in tried} for name in VALUES}


def test_every_value_of_every_option_every_dtype_and_preset_is_tried(module):
    found = cases_of(f"{module}:Everything", everything=False)
    assert values_tried(found) == VALUES
    plain = [case for case in found if case.storage is None]
    assert {(case.param, case.state) for case in plain} == set(MIXES)
    assert [case.storage for case in found if case.storage] == list(PRESETS)
    assert sum(case.scaled for case in found) == 1
    assert len(set(found)) == len(found) <= len(MIXES) + len(PRESETS) + 1
    assert len(together(found)) <= 4, "few combinations, since each has kernels of its own"


def test_everything_is_every_combination_that_the_class_accepts(module):
    found = cases_of(f"{module}:Everything", everything=True)
    combinations = [dict(zip(VALUES, each, strict=True)) for each in itertools.product(*VALUES.values())]
    allowed = [each for each in combinations if each["momentum"] or not each["nesterov"]]
    assert len(set(found)) == len(found) == len(allowed) * (len(MIXES) + len(PRESETS))


def test_options_that_need_others_come_when_those_are_there(module):
    found = cases_of(f"{module}:Everything", everything=False)
    assert all(dict(case.changed).get("momentum") for case in found if dict(case.changed).get("nesterov"))
    assert any("nesterov=True" in case.title for case in found)


def test_groups_differ_in_numbers_and_states_have_their_own_dtypes(module):
    case = next(c for c in cases_of(f"{module}:Everything", everything=False) if c.param != c.state)
    params = [torch.nn.Parameter(torch.ones(3, dtype=case.param)) for _ in range(2)]
    optimizer = case.make(params, "eager")
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.08, 0.02, 0.0625)
    for param in (*first["params"], *second["params"]):
        param.grad = param.detach().clone()
    optimizer.step()
    kept = optimizer.state[first["params"][0]]
    assert {kept[name].dtype for name in kept if name != "step"} == {case.state}


@pytest.mark.parametrize("name", ["Everything", "Rooted"])
def test_every_case_runs_and_is_right(module, name):
    for case in cases_of(f"{module}:{name}", everything=False):
        result = verify(case, [EAGER], 0)
        assert not result.failures, case.title
        assert bool(result.errors) == case.is_judged


def test_backends_may_differ_by_an_ulp_where_the_rule_takes_powers(module):
    assert not any(case.has_same_bits for case in cases_of(f"{module}:Rooted", everything=False))
    assert all(case.has_same_bits for case in cases_of(f"{module}:Everything", everything=False))


@pytest.mark.parametrize("optimizer", CATALOG)
def test_every_choice_dtype_and_preset_of_ours_is_tried(optimizer):
    found = cases_of(optimizer, everything=False)
    assert {(c.param, c.state) for c in found} == set(MIXES)
    assert [c.storage for c in found if c.storage] == list(PRESETS)
    defaults = cases._defaults(optimizer)
    for name, values in cases._values(optimizer).items():
        assert {dict(c.changed).get(name, defaults.get(name)) or None for c in found} == {v or None for v in values}
    assert len(set(found)) == len(found)


def test_every_way_to_clip_is_tried():
    """None switches clipping off, whatever else is chosen: it comes last."""
    found = [dict(c.changed) for c in cases_of("BertAdam", everything=False)]
    assert {own.get("clip", "parameter") for own in found if "max_grad_norm" not in own} == {
        "parameter",
        "group",
        "all",
    }
    assert {"max_grad_norm": None}.items() <= found[len(MIXES) - 1].items()


def test_what_excludes_each_other_is_tried_apart():
    found = [dict(c.changed) for c in cases_of("Lamb", everything=False)]
    assert {"use_global_grad_norm": True} in found
    assert any({"adam", "max_grad_norm", "maximize"} <= own.keys() for own in found)


def test_no_case_is_lost_between_processes_and_what_shares_kernels_stays_together():
    every = [case for name in CATALOG for case in cases_of(name, everything=False)]
    tasks = together(every)
    assert sorted(c.title for task in tasks for c in task) == sorted(c.title for c in every)
    assert len({(c.optimizer, c.changed, c.storage is None) for c in every}) == len(tasks)
    assert together(every[:1]) == [every[:1]]


@pytest.mark.parametrize("optimizer", CATALOG)
def test_formats_are_tried_on_tensors_that_have_blocks_and_on_others(optimizer):
    case = next(c for c in cases_of(optimizer, everything=False) if c.storage == "8bit")
    assert case.title.endswith("storage='8bit'), parameters in bfloat16")
    step, *_ = steps.take(case, EAGER, 0)
    coded = [any(name.endswith(("_codes", "_steps")) for name in own) for own in step.after]
    # Adafactor's states of matrices are by row and column, and too few to be coded
    assert (sum(coded), len(coded)) == (0 if optimizer == "Adafactor" else 2, len(steps.LAYOUTS))
    for own, values in zip(step.after, step.values, strict=True):
        slow = {"exp_avg_slow"}  # has 16 bits where others have 8
        assert {value.dtype for name, value in values.items() if name not in slow} == {F32}
        assert "param_low" in own


def test_rules_are_seen_with_their_flags_as_the_case_says():
    case = Case("BertAdam", (("clip", "group"), ("maximize", True)), F32, F32)
    (step, *_), flags = steps.take(case, EAGER, 0), {"clip_group": True, "clip_all": False, "maximize": True}
    assert flags.items() <= dict(step.members[0].flags).items()
    assert len({m.group for m in step.members}) == 2


@pytest.mark.parametrize("param", [F32, BF16, F16, F64], ids=str)
def test_adamp_projects_by_channel_by_layer_and_not_at_all(param, monkeypatch):
    made = spied(monkeypatch)
    steps.take(next(c for c in cases_of("AdamP", everything=False) if c.param == param), EAGER, 0)
    assert set(made[-1].projections().values()) == {"none", "layer", "channel"}


def test_clipping_clips(monkeypatch):
    made = spied(monkeypatch)
    steps.take(next(c for c in cases_of("EmaAdamW", everything=False) if "max_grad_norm" in c.options), EAGER, 0)
    assert made[-1].grad_norm > 1.2 * CLIPPED


def spied(monkeypatch):
    """The optimizers that are made."""
    made, make = [], Case.make

    def spy(case, params, backend):
        made.append(make(case, params, backend))
        return made[-1]

    monkeypatch.setattr(Case, "make", spy)
    return made
