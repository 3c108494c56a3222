"""A plan: prepared, which may fail and changes nothing, then committed, which cannot fail."""

from types import SimpleNamespace

import pytest
import torch

from fusedadam import backends
from fusedadam.engine.changes.names import CHANGED, MOVED, SAME
from fusedadam.engine.launch import NO_AMP
from fusedadam.engine.participant import Participant
from fusedadam.engine.plan import prepare_plan
from fusedadam.engine.step_counts import StepCounts
from fusedadam.optimizers.adamw import adam
from tests.support import options_of

FLAGS = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": False}
OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
OPTIONS = tuple(OPTIONS[name] for name in adam.hyper_parameters)


def made(grads, states, new_state=None, steps=None, backend=None):
    """A plan for parameters of ones, of which those with a gradient take part."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in grads]
    backend = backend or backends.choose(torch.device("cpu"), "eager")
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
        states.setdefault(param, {})

    def zeros(role: str, _before: dict) -> dict:
        return {role: torch.zeros(3)}

    participants = [
        Participant(p, p.grad, k, 0, adam.specialize(FLAGS), backend, new_state or zeros)
        for k, p in enumerate(params)
        if p.grad is not None
    ]
    steps = steps or StepCounts()
    prepared = prepare_plan(adam, participants, params, states, steps, on_device=False)
    return prepared.commit(states, steps), params, steps


def joining(ran):
    """A backend that joins all kernels into one function, which notes the steps that it runs."""

    def join(runs, is_scaled):
        return lambda step, *_: ran.append(step)

    return backends.choose(torch.device("cpu"), "numba")._replace(join=join)


def options_at(revision):
    return options_of([OPTIONS])._replace(revision=revision)


def evaluate_with(plan, kernel):
    """From the plan's next step on, as if a step had been taken with the options of revision 1."""
    plan._scalars._by_kernel, plan.launches._joined = [(plan.launches[0].table, kernel)], None
    plan._scalars._last = 1


def test_it_makes_states_and_runs():
    states = {}
    plan, params, steps = made([torch.ones(3), None], states)
    assert sorted(states[params[0]]) == ["exp_avg", "exp_avg_sq", "step"]
    assert states[params[1]] == {}
    answer, tensors = plan.snapshot.compare(params, states)
    assert answer == SAME
    with torch.no_grad():
        plan.run(params, tensors, steps, options_at(1), NO_AMP)
    assert torch.allclose(params[0], torch.full((3,), 0.9))
    assert states[params[0]]["step"].item() == 1.0


def test_what_fails_while_it_is_prepared_leaves_no_trace():
    states, made_states = {}, []

    def fails_at_last(role, _before):
        made_states.append(role)
        if len(made_states) == 4:
            raise MemoryError
        return {role: torch.zeros(3)}

    with pytest.raises(MemoryError):
        made([torch.ones(3), torch.ones(3)], states, fails_at_last)
    assert list(states.values()) == [{}, {}]


def test_its_snapshot_notices_what_moves_and_what_changes():
    states = {}
    plan, params, _ = made([torch.ones(3), None], states)
    params[0].grad = torch.ones(3)
    assert plan.snapshot.compare(params, states)[0] == MOVED
    params[1].grad = torch.ones(3)
    assert plan.snapshot.compare(params, states)[0] == CHANGED


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_step_that_copies_tensors_is_not_repeated_without_its_copies(is_copied):
    """Kernels alone would read the copy that the last step has freed, and nothing would be written back."""
    plan, *_ = made([torch.ones(1).expand(3) if is_copied else torch.ones(3)], {}, backend=joining([]))
    evaluate_with(plan, SimpleNamespace(runs_for=lambda options: [], follow=lambda options: True, has_live=False))
    plan.launches[0].table.scalars_on_device = True
    plan._scalars.prepare_fast_path(options_at(1), NO_AMP)
    assert (plan._scalars.fast_path(1.0, options_at(1), NO_AMP) is None) == is_copied


@pytest.mark.parametrize(("count", "fits"), [(0.0, True), (2.0**24 - 1, True), (2.5, False), (2.0**31, False)])
def test_only_a_number_of_a_step_that_a_kernel_can_take_is_handed_to_it(count, fits):
    """It is an int32; another number would be cut off without a word."""
    states, ran, evaluated = {}, [], []

    def update(options, step):
        evaluated.append(step)
        return True

    plan, params, steps = made([torch.ones(3)], states, backend=joining(ran))
    kernel = SimpleNamespace(update=update, runs_for=lambda options: [], has_live=False, has_options=True)
    evaluate_with(plan, kernel)
    _, tensors = plan.snapshot.compare(params, states)
    for _ in range(2):
        states[params[0]]["step"].fill_(count)
        plan.run(params, tensors, steps, options_at(1), NO_AMP)
    assert evaluated == ran == [count + 1] * fits
    assert states[params[0]]["step"] == torch.tensor(count + 1)


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_step_with_another_learning_rate_is_repeated_if_the_kernels_take_it(is_followed):
    states, ran = {}, []

    kernel = SimpleNamespace(
        update=lambda options, step: True,
        runs_for=lambda options: [],
        follow=lambda options: is_followed,
        has_live=False,
        has_options=True,
    )
    plan, params, steps = made([torch.ones(3)], states, backend=joining(ran))
    evaluate_with(plan, kernel)
    _, tensors = plan.snapshot.compare(params, states)
    for revision in (1, 1, 2, 3):
        plan.run(params, tensors, steps, options_at(revision), NO_AMP)
    assert ran == ([2, 3, 4] if is_followed else [2])
    assert states[params[0]]["step"] == 4
