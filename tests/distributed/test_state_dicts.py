"""State dicts, pickles and copies of optimizers with sharded parameters.

A state dict may be whole, as one process saves it, or sharded, in the same way as the parameters or in another.
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
from tests.distributed.follow import assert_same, assert_states_lie_like
from tests.distributed.parts import S0, S1, R, digest, divided_like, expected_here, here, mesh_of, parameter
from tests.distributed.reference import BIT_FOR_BIT, SMALLER, STEPS, Run, load, make
from tests.distributed.test_storage import LAYOUTS as SHARDINGS
from tests.distributed.test_storage import assert_same as assert_same_arrays
from tests.distributed.test_storage import go as go_on
from tests.distributed.test_storage import kept, start
from tests.distributed.world import on
from tests.support import BF16, F32

LAYOUTS = {"rows": S0, "columns": S1, "everywhere": R}
EVERY = pytest.mark.parametrize(
    "optimizer",
    ["Adam", "AdamP", "BertAdam by group", "EmaAdamW", "EmaAdamW clipped", *SMALLER, "Adafactor clipped"],
)
HALF = STEPS // 2


def begin(run: Run, optimizer: str, layout: str | None) -> tuple[Any, list[Any]]:
    """An optimizer and its parameters as they begin; None: not divided."""
    values = [v.clone() for v in run.start]
    if layout is None:
        params: list[Any] = [torch.nn.Parameter(v) for v in values]
    else:
        params = [parameter(v, mesh_of(2), LAYOUTS[layout]) for v in values]
    return make(optimizer, params), params


def go(run: Run, opt: Any, params: list[Any], steps: range) -> None:
    for step in steps:
        for p, grad in zip(params, run.grads[step], strict=True):
            p.grad = divided_like(grad, p)  # type: ignore[arg-type]
        opt.step()


def take_params(params: list[Any], others: list[Any]) -> None:
    for p, q in zip(params, others, strict=True):
        whole = q.full_tensor() if isinstance(q, DTensor) else q
        here(p).copy_(expected_here(whole.detach(), p))


def states_of(opt: Any, params: list[Any]) -> list[Any]:
    return [v for p in params for v in opt.state[p].values()]


def resumed(optimizer: str, path: str, before: str | None, after: str) -> None:
    """Half of the steps, a state dict, and the other half: as in one process all along."""
    run = load(path)
    opt, params = begin(run, optimizer, before)
    go(run, opt, params, range(HALF))
    saved = opt.state_dict()
    bits = digest(t for own in saved["state"].values() for t in own.values())
    again, others = begin(run, optimizer, after)
    take_params(others, params)
    again.load_state_dict(saved)
    for p, q in zip(others, params, strict=True):
        assert_states_lie_like(p, again.state[p])
        for name, value in opt.state[q].items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            loaded = again.state[p][name]
            assert loaded.dtype == value.dtype, name
            assert torch.equal(here(loaded), whole if name == "step" else expected_here(whole, loaded)), name
    go(run, again, others, range(HALF, STEPS))
    assert_same(run, again, others, bits=optimizer in BIT_FOR_BIT)
    assert digest(t for own in saved["state"].values() for t in own.values()) == bits, "the state dict was written to"


@EVERY
@pytest.mark.parametrize("after", LAYOUTS)
def test_a_whole_state_dict_into_divided_parameters(two, library, optimizer, after):
    two.run(resumed, optimizer, library.path(optimizer, "float32"), None, after)


@on("two")
def test_no_device_gets_more_than_its_part():
    """So many elements each state has that is copied to the parameters' device."""
    whole, param = torch.nn.Parameter(torch.ones(8, 6)), parameter(torch.ones(8, 6), mesh_of(2), S0)
    whole.grad = torch.ones(8, 6)
    saving, loading = make("AdamW", [whole]), make("AdamW", [param])
    saving.step()
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
    assert sorted(seen) == [1, 24, 24]


@EVERY
@pytest.mark.parametrize(
    ("before", "after"),
    [("rows", "rows"), ("columns", "columns"), ("rows", "columns"), ("columns", "rows"), ("everywhere", "rows")],
)
def test_a_divided_state_dict(two, library, optimizer, before, after):
    two.run(resumed, optimizer, library.path(optimizer, "float32"), before, after)


def resumed_whole(optimizer: str, path: str) -> None:
    """And the other way: a divided state dict into plain parameters, which every process then has."""
    run = load(path)
    opt, params = begin(run, optimizer, "rows")
    go(run, opt, params, range(HALF))
    again, others = begin(run, optimizer, None)
    take_params(others, params)
    again.load_state_dict(opt.state_dict())
    assert not any(isinstance(v, DTensor) for v in states_of(again, others))
    go(run, again, others, range(HALF, STEPS))
    assert_same(run, again, others, bits=optimizer in BIT_FOR_BIT)


@EVERY
def test_a_divided_state_dict_into_plain_parameters(two, library, optimizer):
    two.run(resumed_whole, optimizer, library.path(optimizer, "float32"))


@EVERY
def test_dtypes_of_states_are_kept(two, library, optimizer):
    two.run(resumed, optimizer, library.path(optimizer, "bfloat16"), None, "rows")


def by_copy(optimizer: str, path: str, how: str) -> None:
    """A copy goes on as the original does, and they do not disturb each other."""
    run = load(path)
    opt, params = begin(run, optimizer, "rows")
    go(run, opt, params, range(HALF))
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


def refused(path: str) -> None:
    """Another model's state is refused whole, and nothing is loaded."""
    run = load(path)
    opt, params = begin(run, "Adam", "rows")
    go(run, opt, params, range(HALF))
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


def test_a_state_dict_that_does_not_fit(two, library):
    two.run(refused, library.path("Adam", "float32"))


def averages(path: str) -> None:
    """Low-precision parameters: the averages stay in float32, divided as the parameters are."""
    run = load(path)
    opt, params = begin(run, "EmaAdamW", "columns")
    go(run, opt, params, range(HALF))
    assert all(p.dtype == BF16 and opt.state[p]["ema_params"].dtype == F32 for p in params)
    for p in params:
        assert_states_lie_like(p, opt.state[p])


def test_averages_are_divided(two, library):
    two.run(averages, library.path("EmaAdamW", "bfloat16"))


def plain(wholes: list[torch.Tensor]) -> list[Any]:
    return [torch.nn.Parameter(value) for value in wholes]


@on("four")
@pytest.mark.parametrize("layout", ["HSDP", "FSDP2 over tensor parallel", "rows and columns"])
def test_states_smaller_than_their_parameters_on_two_dimensions(layout):
    """Meshes of two dimensions, and strides: into the same layout, into plain parameters, and back from these."""
    for optimizer in ("AdamW", *SMALLER):
        make, runs = functools.partial(getattr(fusedadam, optimizer), backend="eager"), []
        for shard in (SHARDINGS[layout][1], SHARDINGS[layout][1], plain, SHARDINGS[layout][1]):
            params = shard([value + len(runs) for value in start(F32)])
            runs.append((make(params), params))
        opt, params = runs[0]
        go_on(opt, params, range(2))
        for (source, before), (target, after) in itertools.pairwise(runs):
            take_params(after, before)
            target.load_state_dict(source.state_dict())
            for p, q in zip(after, params, strict=True):
                assert_states_lie_like(p, target.state[p])
                assert_same_arrays([kept(target, p)], [kept(opt, q)])
        for each, own in (runs[0], runs[1], runs[3]):
            go_on(each, own, range(2, 4))
            assert_same_arrays([kept(each, p) for p in own], [kept(opt, p) for p in params])
