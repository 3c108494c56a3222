"""Every flag and dtype is tried, and steps are as the cases say."""

from __future__ import annotations

import pytest

from fusedadam.cli.verify import cases, steps
from fusedadam.cli.verify.cases import (
    BF16,
    BY_HAND,
    F16,
    F32,
    F64,
    FLAGS,
    MIXES,
    OPTIMIZERS,
    STORED,
    Case,
    chosen,
    together,
)  # fmt: skip
from fusedadam.cli.verify.steps import Place

EAGER = Place("cpu", "eager")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_value_of_every_flag_and_every_dtype_is_tried(optimizer):
    found = chosen([optimizer], everything=False)
    assert {(c.param, c.state) for c in found} == set(MIXES)
    for name, values in FLAGS[optimizer].items():
        assert {dict(c.flags)[name] for c in found} == set(values), name
    assert {c.storage for c in found} >= {None, "exact", "8bit"}
    assert len(set(found)) == len(found) == len(BY_HAND[optimizer]) + len(STORED[optimizer])


def test_everything_is_every_combination():
    found = chosen([*OPTIMIZERS], everything=True)
    assert len(set(found)) == len(found) == (6 + 3) * (8 + 8 + 4 + 8 + 8 + 12 + 16 + 16 + 4 + 12 + 8 * 4 + 4 + 4 + 4)


def test_gradients_come_scaled_where_a_scaler_is_used():
    assert {c.optimizer for c in chosen([*OPTIMIZERS], everything=False) if c.scaled} == set(cases.SCALED)


def test_no_case_is_lost_between_processes_and_what_shares_kernels_stays_together():
    every = chosen([*OPTIMIZERS], everything=False)
    tasks = together(every)
    assert sorted(c.title for task in tasks for c in task) == sorted(c.title for c in every)
    assert len({(c.optimizer, c.flags, c.storage is None) for c in every}) == len(tasks)
    assert together(every[:1]) == [every[:1]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_formats_are_tried_on_tensors_that_have_blocks_and_on_others(optimizer):
    case = next(c for c in chosen([optimizer], everything=False) if c.storage == "8bit")
    assert case.title.endswith("storage='8bit'), parameters in bfloat16")
    step, *_ = steps.take(case, EAGER, 0)
    coded = [any(name.endswith("_codes") for name in own) for own in step.after]
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
    assert len({m.group for m in step.members}) == 5, "a schedule each, and none"


@pytest.mark.parametrize("param", [F32, BF16, F16, F64], ids=str)
def test_adamp_projects_by_channel_by_layer_and_not_at_all(param, monkeypatch):
    made = spied(monkeypatch)
    steps.take(next(c for c in chosen(["AdamP"], everything=False) if c.param == param), EAGER, 0)
    assert set(made[0].projections().values()) == {"none", "layer", "channel"}


def test_clipping_clips(monkeypatch):
    made = spied(monkeypatch)
    steps.take(next(c for c in chosen(["EmaAdamW"], everything=False) if "max_grad_norm" in c.options), EAGER, 0)
    assert made[0].grad_norm > 1.2 * cases.OF_ALL


def spied(monkeypatch):
    """The optimizers that are made."""
    made, make = [], Case.make

    def spy(case, params, backend):
        made.append(make(case, params, backend))
        return made[-1]

    monkeypatch.setattr(Case, "make", spy)
    return made
