"""Every optimizer, in every storage format, through checkpoints: saved, resharded, and gone on with.

One run of a world goes through all of them, in one checkpoint: starting processes and checkpoints is what takes long.
The eager backend compiles nothing. Gradients are such that norms are exact in any order of summation, so most rules
have the bits of one process; Lamb and Adafactor sum what is not exact, and are as close as rounding.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard

from tests.contract.common import EVERY_FIRST
from tests.distributed import reference
from tests.distributed.follow import assert_states_lie_like
from tests.distributed.parts import R, expected_here, fully_shard, here, mesh_of, parameter, whole
from tests.distributed.test_checkpoints import FLAT, FULL, alike, digest
from tests.distributed.test_storage import go, kept, values
from tests.distributed.world import NEEDS_FSDP2_ON_CPU
from tests.support import BF16, F16, F32, F64, sums

pytestmark = NEEDS_FSDP2_ON_CPU
SHAPES = [(33, 128), (3, 4096), (2, 3), (4, 16, 64), (5,), (1,)]  # of some, processes have nothing
EXACT = {"delta": 0.0}  # AdamP never projects
MAKERS: dict[str, Callable[..., Any]] = {
    name: functools.partial(make, **(EXACT if name == "AdamP" else {}))
    for name, make in EVERY_FIRST.items()
    if name in reference.EVERY
}
# sums that are not exact, across another number of processes: norms of these gradients are
ROUNDED = [name for name, make in MAKERS.items() if sums(make) and name not in ("AdamP", "BertAdam")]
STORAGES = ("exact", "16bit", "8bit", "plain")
DTYPES = (F32, BF16, F64, F16)  # of plain parameters and their states: another one for each optimizer
CASES = [(optimizer, storage) for optimizer in MAKERS for storage in STORAGES]
SMALLER = [case for case in CASES if case[0] in reference.SMALLER]
QUICK = [case for k, case in enumerate(CASES) if k % 4 == k // 4 % 4 or case in SMALLER]  # one storage each, or all
PARTS = {
    "quick": QUICK,
    "rest": [case for case in CASES if case not in QUICK],
    "one half": [(optimizer, STORAGES[(k + 1) % 4]) for k, optimizer in enumerate(MAKERS) if k % 2],
    "other half": [(optimizer, STORAGES[(k + 1) % 4]) for k, optimizer in enumerate(MAKERS) if k % 2 == 0],
    "smaller": SMALLER,
}
STEPS = 4
Case = tuple[str, str]
Ends = dict[Case, tuple[list[str], list[Tensor]]]  # bits, and where those may differ, numbers


def by_columns(param: Tensor) -> Shard | None:
    return Shard(param.dim() - 1) if param.shape[-1] % 2 == 0 else None  # FSDP2 wants it even there


class Run:
    """A model and its optimizer. ``layout``: how it is sharded, None for one process alone. ``more``: fresh models
    begin with other weights, so that what is not loaded shows."""

    def __init__(self, case: Case, layout: str | None, more: float = 0.0) -> None:
        self.case, (name, storage) = case, case
        k = [*MAKERS].index(name)
        dtype = DTYPES[(k + k // 4) % 4] if storage == "plain" else BF16
        wide = {"state_dtype": F32, "ema_dtype": F32}
        wholes = [(values(99, shape) * 3).to(dtype) for shape in SHAPES]
        self.model = torch.nn.ParameterList(torch.nn.Parameter(v + more) for v in wholes)
        if layout == "everywhere":
            mesh = mesh_of(dist.get_world_size())
            self.model = torch.nn.ParameterList(parameter(p.detach(), mesh, R) for p in self.model)
        elif layout is not None:
            size = dist.get_world_size()
            mesh = mesh_of(2, size // 2) if layout.startswith("replicas") else mesh_of(size)
            fully_shard(self.model, mesh=mesh, shard_placement_fn=by_columns if layout.endswith("columns") else None)
        self.params = list(self.model.parameters())
        options = {"plain": {}, "wide": wide}.get(storage, {"storage": storage})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bfloat16 and float16, as they are
            self.optimizer = MAKERS[name](self.params, backend="eager", **options)

    def train(self, steps: Iterable[int]) -> Run:
        go(self.optimizer, self.params, steps)  # type: ignore[arg-type]
        return self

    def state(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def set_state(self, state: dict[str, Any], options: StateDictOptions | None = None) -> Run:
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **given, options=options)
        return self

    def bits(self) -> list[str]:
        return [
            f"{k} {name} {digest(value.view(torch.int16) if value.dtype == BF16 else value)}"
            for k, p in enumerate(self.params)
            for name, value in sorted(kept(self.optimizer, p).items())
        ]

    def numbers(self) -> list[Tensor]:
        """Weights and states, whole, as float32."""
        states = self.optimizer.widen_state_dict(self.optimizer.state_dict())["state"]
        found = [*self.optimizer.float32_state_dict(self.model).values()]
        found += [value for key in sorted(states) for _, value in sorted(states[key].items())]
        return [whole(value).float() for value in found]


@functools.cache
def uninterrupted(case: Case) -> Run:
    return Run(case, None).train(range(STEPS))


def assert_went_on(cases: Iterable[Case], found: Ends) -> None:
    """As the uninterrupted run of one process."""
    for case in cases:
        bits, numbers = found[case]
        if case[0] not in ROUNDED:
            assert bits == uninterrupted(case).bits(), case
            continue
        expected = uninterrupted(case).numbers()
        for mine, theirs in zip(numbers, expected, strict=True):
            # a weight that is rounded otherwise is the next number of its format
            near = {"rtol": 2**-6, "atol": float(theirs.abs().max()) * 2**-6}
            torch.testing.assert_close(mine, theirs, **near, msg=lambda m, at=case: f"{at}: {m}")


def ends(runs: Iterable[Run]) -> Ends:
    return {run.case: (run.bits(), run.numbers() if run.case[0] in ROUNDED else []) for run in runs}


def agreed(answers: list[Ends]) -> Ends:
    """What all processes have answered: the same bits."""
    alike([bits_of(answer) for answer in answers])
    return answers[0]


def bits_of(found: Ends) -> dict[Case, list[str]]:
    return {case: bits for case, (bits, _) in found.items()}


# What the processes of a world run together.


def save(cases: list[Case], layout: str, folder: str, steps: range) -> Ends:
    runs = [Run(case, layout).train(steps) for case in cases]
    dcp.save({str(run.case): run.state() for run in runs}, checkpoint_id=folder)
    return ends(run for run in runs if run.case[0] in ROUNDED)


def load(
    cases: list[Case], layout: str, folder: str, steps: range, again: str | None = None, flat: bool = False
) -> tuple[Ends, Ends]:
    """What was loaded, and what came of it; ``again``: where it is saved once more, flattened. ``flat``: it was."""
    runs, options = [Run(case, layout, more=1.0) for case in cases], FLAT if flat else None
    states = {str(run.case): run.state(options) for run in runs}
    dcp.load(states, checkpoint_id=folder)
    for run in runs:
        run.set_state(states[str(run.case)], options)
    before = ends(run for run in runs if run.case[0] in ROUNDED)
    for run in runs:
        run.train(steps)
    if again is not None:
        dcp.save({str(run.case): run.state(FLAT) for run in runs}, checkpoint_id=again)
    return before, ends(run for run in runs if again is None or run.case[0] in ROUNDED)


@pytest.mark.parametrize("part", ["quick", pytest.param("rest", marks=pytest.mark.exhaustive)])
def test_from_four_processes_to_three_to_one(four, three, one, part, tmp_path):
    cases, first, second = PARTS[part], str(tmp_path / "of four"), str(tmp_path / "of three")
    saved = agreed(four.run(save, cases, "rows", first, range(2)))
    answers = three.run(load, cases, "rows", first, range(2, 3), second)
    assert bits_of(agreed([before for before, _ in answers])) == bits_of(saved)
    ((before, after),) = one.run(load, cases, "rows", second, range(3, STEPS), None, True)
    assert bits_of(before) == bits_of(agreed([after for _, after in answers]))
    assert_went_on(cases, after)


@pytest.mark.parametrize(
    ("cut", "part"),
    [
        ("rows", "one half"),
        ("columns", "smaller"),
        pytest.param("rows", "other half", marks=pytest.mark.exhaustive),
        pytest.param("columns", "rest", marks=pytest.mark.exhaustive),
    ],
)
def test_from_replicas_to_replicas_and_to_two_processes(four, two, cut, part, tmp_path):
    """HSDP: of several replicas of a shard, one is saved."""
    cases, other = PARTS[part], {"rows": "columns", "columns": "rows"}[cut]
    saved = agreed(four.run(save, cases, f"replicas of {cut}", str(tmp_path), range(2)))
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    weights = [value for name, value in metadata.items() if name.endswith("model.0")]
    assert {len(value.chunks) for value in weights} == {2}, "as many as one replica has"
    for world, layout in ((four, f"replicas of {cut}"), (two, other)):
        answers = world.run(load, cases, layout, str(tmp_path), range(2, STEPS))
        assert bits_of(agreed([before for before, _ in answers])) == bits_of(saved)
        assert_went_on(cases, agreed([after for _, after in answers]))


# How a state dict comes to another run, and how the two are sharded; None: one process alone
WAYS: dict[str, tuple[str | None, str | None]] = {
    **dict.fromkeys(("its own", "broadcast", "flat", "offloaded", "not strict"), ("rows", "rows")),
    **{
        f"{source or 'one process'} to {target or 'one process'}": (source, target)
        for source, target in [
            ("rows", "rows"), ("rows", "columns"), ("columns", "columns"), ("columns", "rows"), ("everywhere", "rows"),
            ("rows", None), (None, "rows"), (None, "columns"), (None, "everywhere"),
        ]
    },
}  # fmt: skip


def through(run: Run, way: str) -> Run:
    """Another run that goes on where this one is."""
    if way == "its own":
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        return run
    options = {
        "flat": FLAT, "offloaded": StateDictOptions(cpu_offload=True), "not strict": StateDictOptions(strict=False),
    }.get(way)  # fmt: skip
    other = Run(run.case, WAYS[way][1], more=1.0)
    if way == "broadcast":
        full, options = run.state(FULL), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        assert bool(full["optimizer"]) == (dist.get_rank() == 0), "the others have nothing"
        set_model_state_dict(other.model, full["model"], options=options)
        set_optimizer_state_dict(other.model, other.optimizer, full["optimizer"], options=options)
    elif options is not None:  # on a CPU some of it is the run's own memory
        other.set_state(copy.deepcopy(run.state(options)), options)
    else:
        for mine, theirs in zip(other.params, run.params, strict=True):
            here(mine).copy_(expected_here(whole(theirs), mine))
        other.optimizer.load_state_dict(run.optimizer.state_dict())
    return other


def through_all(way: str, cases: list[Case]) -> Ends:
    runs = []
    for case in cases:
        run = Run(case, WAYS[way][0]).train(range(2))
        before, other = run.bits(), through(run, way)
        assert other.bits() == before, case
        for param in other.params:
            assert_states_lie_like(param, other.optimizer.state[param])
        runs.append(other.train(range(2, STEPS)))
        assert other is run or run.bits() == before, f"{case}: the state dict was written to"
    return ends(runs)


@pytest.mark.parametrize("half", ["one half", pytest.param("the other", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("way", WAYS)
def test_state_dicts_that_came_in_other_ways(two, way, half):
    """Of every optimizer, in every second way; those whose states are smaller than their parameters, in all."""
    first = [*WAYS].index(way)  # other optimizers and storages for each way
    small = {optimizer for optimizer, _ in SMALLER}
    cases = [
        (optimizer, STORAGES[(first + k) % 4])
        for k, optimizer in enumerate(MAKERS)
        if ((first + k) % 2 == 0 or optimizer in small) is (half == "one half")
    ]
    assert_went_on(cases, agreed(two.run(through_all, way, cases)))


# Checkpoints of runs that go on in another storage, with float32 in the file.

WIDE, NARROW = ("EmaAdamW", "wide"), ("EmaAdamW", "8bit")


def wide_state(run: Run) -> dict[str, Any]:
    """A float32 checkpoint has no codes: a template without them takes it."""
    state = run.state()
    if run.case == NARROW:
        state["optimizer"] = run.optimizer.widen_state_dict(state["optimizer"])
    return state


def save_wide(case: Case, folder: str) -> None:
    dcp.save(wide_state(Run(case, "rows").train(range(2))), checkpoint_id=folder)


def load_wide(case: Case, folder: str) -> list[str]:
    run = Run(case, "rows", more=1.0)
    state = wide_state(run)
    dcp.load(state, checkpoint_id=folder)
    return run.set_state(state).train(range(2, STEPS)).bits()


@pytest.mark.parametrize(("before", "after"), [(WIDE, NARROW), (NARROW, WIDE)], ids=["in 8 bits", "in float32"])
def test_a_run_goes_on_in_another_storage(four, three, one, before, after, tmp_path):
    source, alone = Run(before, None).train(range(2)), Run(after, None, more=1.0)
    saved = source.optimizer.state_dict()
    alone.model.load_state_dict(source.model.state_dict())
    alone.optimizer.load_state_dict(saved if before == WIDE else alone.optimizer.widen_state_dict(saved))
    expected = alone.train(range(2, STEPS)).bits()
    four.run(save_wide, before, str(tmp_path))
    for world in (three, one):
        assert alike(world.run(load_wide, after, str(tmp_path))) == expected
