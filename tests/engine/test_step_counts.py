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
    assert counts.next(slice(None)) == 4.0


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


def test_equal_counts_are_one_number_until_someone_writes_there():
    counts = StepCounts()
    prepared, states = taken(counts, {"a": 6.0, "b": 6.0})
    places = prepared.places("ab")
    for number in (7.0, 8.0):
        assert counts.next(places) == number
        counts.set(places, counts.next(places))
    states["b"]["step"].fill_(20)
    assert counts.next(places).tolist() == [9.0, 21.0]
    counts.set(places, counts.next(places))
    states["a"]["step"].fill_(21)
    assert counts.next(places) == 22.0


def test_counts_end_where_float32_has_no_next_number():
    counts = StepCounts()
    prepared, states = taken(counts, {"a": 2.0**24 - 1})
    for _ in range(3):
        counts.set(prepared.places("a"), counts.next(prepared.places("a")))
    assert states["a"]["step"].item() == 2.0**24
    assert counts.next(prepared.places("a")) == 2.0**24 + 1
