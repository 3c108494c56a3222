"""Tests the fuzzer itself: with a fixed seed and few programs it must find each defect that is planted here.

Each function below plants one defect. If the code that it patches moves, only that function has to be adapted.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import Phase

from fusedadam import Lamb
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.group_options import GroupOptions
from fusedadam.engine import plan
from fusedadam.engine.changes import snapshot
from fusedadam.engine.plan import Plan
from fusedadam.engine.scalars import HostScalars
from tests.fuzz import own_rule
from tests.fuzz.judge import compare
from tests.fuzz.machine import fuzz, machine
from tests.fuzz.reference import STATES, Member

EXAMPLES = 300  # at most: the first failure ends the search
WRONG_STEP = r"of parameter \d+ in step \d+: element"


def blind_to_the_negative_bit(monkeypatch):
    """Compares tensors between steps in Python, ignoring the bit, and switches the compiled loop off."""
    sees = inspect.getsource(snapshot._plain_look)
    blind = sees.replace("keys = internals.dispatch_keys(here)", "keys = 0")
    assert blind != sees, "_plain_look no longer reads the dispatch keys: adapt this replacement"
    space = dict(vars(snapshot))
    exec(f"from __future__ import annotations\n{blind}", space)
    monkeypatch.setattr(snapshot, "_plain_look", space["_plain_look"])
    for module in (snapshot, plan):
        monkeypatch.setattr(module, "prepare_loop", lambda: None)


def changed_options_are_not_checked(monkeypatch):
    monkeypatch.setattr(GroupOptions, "_check_changed", lambda *_: None)


def bias_correction_is_one_step_ahead(monkeypatch):
    scalars = HostScalars.of
    monkeypatch.setattr(HostScalars, "of", lambda self, step, options: scalars(self, step + 1, options))


def around_each_step(monkeypatch, before, after):
    """Calls ``before(optimizer)`` ahead of every step, and ``after(optimizer, its result)`` behind it."""
    step = FusedOptimizer._step

    def _step(self):
        seen = before(self)
        step(self)
        after(self, seen)

    monkeypatch.setattr(FusedOptimizer, "_step", _step)


def the_last_element_is_skipped(monkeypatch):
    """Of parameters with a tail: more than one vector of elements, and not a whole number of them."""

    def last(optimizer):
        return [(p, p.detach()[-1].clone()) for p in optimizer._params() if p.dim() == 1 and len(p) > 16 and len(p) % 8]

    def restore(_, elements):
        for param, value in elements:
            param.data[-1] = value

    around_each_step(monkeypatch, last, restore)


def gradients_are_written(monkeypatch):
    def scale(optimizer, _):
        for param in optimizer._params():
            if param.grad is not None:
                param.grad = param.grad * 0.5

    around_each_step(monkeypatch, lambda _: None, scale)


def versions_are_not_counted(monkeypatch):
    monkeypatch.setattr(Plan, "_increment_versions", lambda plan, written: None)


def parameters_without_gradient_are_counted(monkeypatch):
    def count(optimizer, _):
        for param in optimizer._params():
            if param.grad is None and param in optimizer.state:
                optimizer.state[param]["step"] += 1

    around_each_step(monkeypatch, lambda _: None, count)


def loading_forgets_the_counts(monkeypatch):
    load = FusedOptimizer.load_state_dict

    def load_state_dict(self, state_dict):
        load(self, state_dict)
        for state in self.state.values():
            state["step"] = torch.zeros(())

    monkeypatch.setattr(FusedOptimizer, "load_state_dict", load_state_dict)


DEFECTS = [
    (blind_to_the_negative_bit, WRONG_STEP),
    (changed_options_are_not_checked, "DID NOT RAISE|the error does not name|division by zero"),
    (bias_correction_is_one_step_ahead, WRONG_STEP),
    (the_last_element_is_skipped, WRONG_STEP),
    (gradients_are_written, "gradient of parameter"),
    (versions_are_not_counted, "version of parameter"),
    (parameters_without_gradient_are_counted, "step of parameter"),
    (loading_forgets_the_counts, "step of parameter"),
]


@pytest.mark.parametrize(("break_it", "message"), DEFECTS, ids=[one.__name__ for one, _ in DEFECTS])
def test_the_fuzzer_finds(break_it, message, monkeypatch):
    break_it(monkeypatch)
    assert_found("AdamW", message)


def test_without_a_reference_the_rule_itself_shows_it(monkeypatch):
    assert "Lamb" not in STATES
    blind_to_the_negative_bit(monkeypatch)
    assert_found("Lamb", WRONG_STEP)


def assert_found(name, message):
    with pytest.raises(BaseException, match=message):  # pytest's own Failed is no Exception
        fuzz(machine(name), EXAMPLES, phases=[Phase.generate], report_multiple_bugs=False, database=None)


def test_a_rule_that_sums_goes_on_with_moments_as_they_are_stored():
    """Squares of 0.02 are coarse in float16: the second moment of a first step is off by a tenth."""
    grad, param = torch.linspace(0.01, 0.03, 5), torch.nn.Parameter(torch.full((5,), 2.0))
    optimizer = Lamb([param], lr=0.1, state_dtype=torch.float16)
    param.grad = grad
    optimizer.step()
    stored = {name: optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq")}
    zeros = {name: torch.zeros(5, dtype=torch.float64) for name in stored}
    member = Member(torch.full((5,), 2.0).double(), grad.double(), zeros, 0, optimizer.defaults, torch.float32, None)
    (expected,) = own_rule.expected_step("Lamb", [member], [stored])
    compare(param.detach(), expected["param"], "param")
    torch.testing.assert_close(param.detach().double(), expected["param"].value, rtol=1e-5, atol=0)
