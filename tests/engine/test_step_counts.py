"""Step counts: one flat tensor, of which each state has a view."""

import torch

from fusedadam.engine.step_counts import HOST, StepCounts


def taken(counts, active, everyone=None, states=None):
    everyone = {**active, **(everyone or {})}
    states = {owner: {} for owner in everyone} if states is None else states
    prepared = counts.prepare(active, everyone, HOST)
    counts.take(prepared, states)
    return prepared, states


def test_every_count_is_a_view_of_one_tensor():
    counts = StepCounts()
    prepared, states = taken(counts, {"a": 3.0, "b": torch.tensor(4.0)}, {"c": 5})
    assert [states[o]["step"].item() for o in "abc"] == [3.0, 4.0, 5.0]
    counts.set(prepared.places("ab"), counts.next(prepared.places("ab")))
    assert [states[o]["step"].item() for o in "abc"] == [4.0, 5.0, 5.0]
    assert states["a"]["step"].dtype == torch.float32
    assert states["a"]["step"].dim() == 0


def test_preparing_changes_nothing():
    counts = StepCounts()
    _, states = taken(counts, {"a": 3.0})
    before = states["a"]["step"]
    counts.prepare({"a": before, "b": 1.0}, {}, HOST)
    assert states["a"]["step"] is before
    assert counts.next(slice(None)).tolist() == [4.0]


def test_views_that_are_still_good_are_kept():
    counts = StepCounts()
    _, states = taken(counts, {"a": 3.0, "b": 4.0})
    view = states["a"]["step"]
    prepared, _ = taken(counts, {"a": view}, {"b": states["b"]["step"]}, states)
    assert states["a"]["step"] is view
    assert prepared.places("a").tolist() == [0]


def test_places_of_everyone_in_order_are_a_slice():
    prepared, _ = taken(StepCounts(), {"a": 1.0, "b": 2.0})
    assert prepared.places("ab") == slice(None)
    assert prepared.places("ba").tolist() == [1, 0]
