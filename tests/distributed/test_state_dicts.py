"""State dicts, pickles and copies of optimizers with sharded parameters.

test_every_checkpoint.py has state dicts of every optimizer that are whole, or sharded in the same way or in another.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fusedadam
from tests.distributed.follow import assert_same, assert_same_parts, assert_states_lie_like
from tests.distributed.parts import S0, digest, divided_like, expected_here, here, mesh_of, parameter, whole
from tests.distributed.reference import BIT_FOR_BIT, SMALLER, STEPS, Run, load, make, one_process
from tests.distributed.test_storage import LAYOUTS, kept, start
from tests.distributed.test_storage import assert_same as assert_same_arrays
from tests.distributed.test_storage import go as go_on
from tests.distributed.world import on
from tests.support import F32

EVERY = pytest.mark.parametrize(
    "optimizer", ["Adam", "AdamP", "BertAdam by group", "EmaAdamW", "EmaAdamW clipped", *SMALLER, "Adafactor clipped"]
)
HALF = STEPS // 2


def half_way(run: Run, optimizer: str) -> tuple[Any, list[Any]]:
    """An optimizer that has taken half of the run's steps, and its parameters."""
    params: list[Any] = [parameter(v.clone(), mesh_of(2), S0) for v in run.start]
    opt = make(optimizer, params)
    go(run, opt, params, range(HALF))
    return opt, params


def go(run: Run, opt: Any, params: list[Any], steps: range) -> None:
    for step in steps:
        for p, grad in zip(params, run.grads[step], strict=True):
            p.grad = divided_like(grad, p)  # type: ignore[arg-type]
        opt.step()


def states_of(opt: Any, params: list[Any]) -> list[Any]:
    return [v for p in params for v in opt.state[p].values()]


@on("two")
def test_no_device_gets_more_than_its_part():
    """So many elements each state has that is copied to the parameters' device. A number is everywhere."""
    wholes = [torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 6), ())]
    for q in wholes:
        q.grad = torch.ones_like(q)
    saving = make("AdamW", wholes)
    saving.step()
    params = [parameter(q.detach(), mesh_of(2), S0) for q in wholes]
    loading = make("AdamW", params)
    seen, real = [], torch.Tensor.to

    def to(tensor: torch.Tensor, *others: Any, **given: Any) -> torch.Tensor:
        if given.get("copy"):
            seen.append(here(tensor).numel())
        return real(tensor, *others, **given)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    try:
        loading.load_state_dict(saving.state_dict())
    finally:
        del torch.Tensor.to  # type: ignore[misc]
    assert torch.Tensor.to is real
    assert sorted(seen) == [1, 1, 1, 1, 24, 24]
    for p, q in zip(params, wholes, strict=True):
        assert_states_lie_like(p, loading.state[p])
        assert_same_parts(p, loading.state[p], q.detach(), saving.state[q], [q.grad], str(q.shape), bits=True)


def by_copy(optimizer: str, path: str, how: str) -> None:
    """A copy goes on as the original does, and they do not disturb each other."""
    run = load(path)
    opt, params = half_way(run, optimizer)
    if how == "deepcopy":
        again = copy.deepcopy(opt)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(opt))
    else:
        file = io.BytesIO()
        torch.save(opt, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    others = [p for group in again.param_groups for p in group["params"]]
    assert all(here(p).data_ptr() != here(q).data_ptr() for p, q in zip(params, others, strict=True) if here(p).numel())
    assert all(isinstance(p, DTensor) and p.placements == q.placements for p, q in zip(others, params, strict=True))
    before = digest([*params, *states_of(opt, params)])
    go(run, again, others, range(HALF, STEPS))
    assert digest([*params, *states_of(opt, params)]) == before
    assert_same(run, again, others, bits=optimizer in BIT_FOR_BIT)
    go(run, opt, params, range(HALF, STEPS))
    assert digest([*params, *states_of(opt, params)]) == digest([*others, *states_of(again, others)])


@EVERY
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(two, library, optimizer, how):
    two.run(by_copy, optimizer, library.path(optimizer, "float32"), how)


@on("two")
def test_a_state_dict_that_does_not_fit():
    """Another model's state is refused whole, and nothing is loaded."""
    opt, params = half_way(one_process("Adam", [(6, 20), (5, 7)]), "Adam")
    before = digest(states_of(opt, params))
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'exp_avg' has shape \(2, 2\), but the parameter has \(5, 7\)"):
        opt.load_state_dict(saved)
    assert digest(states_of(opt, params)) == before
    # a part of it is not the whole of it
    saved["state"][1]["exp_avg"] = here(opt.state[params[1]]["exp_avg"])
    with pytest.raises(ValueError, match=r"but the parameter has \(5, 7\)"):
        opt.load_state_dict(saved)
    assert digest(states_of(opt, params)) == before


@on("four")
@pytest.mark.parametrize("layout", ["HSDP", "FSDP2 over tensor parallel", "rows and columns"])
def test_states_smaller_than_their_parameters_on_two_dimensions(layout):
    """Meshes of two dimensions, and strides: into the same layout, into plain parameters, and back from these."""
    for optimizer in ("AdamW", *SMALLER):
        make, runs = functools.partial(getattr(fusedadam, optimizer), backend="eager"), []
        for is_plain in (False, False, True, False):
            wholes = [value + len(runs) for value in start(F32)]
            params = [torch.nn.Parameter(v) for v in wholes] if is_plain else LAYOUTS[layout][1](wholes)
            runs.append((make(params), params))
        opt, params = runs[0]
        go_on(opt, params, range(2))
        for (source, before), (target, after) in itertools.pairwise(runs):
            target.load_state_dict(source.state_dict())
            for p, q, first in zip(after, before, params, strict=True):
                here(p).copy_(expected_here(whole(q), p))
                assert_states_lie_like(p, target.state[p])
                assert_same_arrays([kept(target, p)], [kept(opt, first)])
        for each, own in (runs[0], runs[1], runs[3]):
            go_on(each, own, range(2, 4))
            assert_same_arrays([kept(each, p) for p in own], [kept(opt, p) for p in params])
