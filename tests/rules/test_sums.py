"""The order in which terms are added, against a loop by hand."""

from __future__ import annotations

import pytest
import torch

from fusedadam.rules import sums


def test_the_definition_of_sums_is_what_it_says():
    terms = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    by_hand = []
    for segment in terms.split(sums.SEGMENT["element"]):
        lanes = [torch.zeros(()) for _ in range(sums.LANES)]
        for k, term in enumerate(segment):
            lanes[k % sums.LANES] = lanes[k % sums.LANES] + term
        while len(lanes) > 1:
            lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        by_hand.append(lanes[0])
    assert torch.equal(sums.segment_sums(terms[None], sums.SEGMENT["element"])[0], torch.stack(by_hand))
    a, b, c = (x.double() for x in by_hand)
    assert sums.combine(torch.stack(by_hand)) == (a + b) + c


@pytest.mark.parametrize("width", [1, 300, 20_000])
def test_the_largest_of_all_terms_and_nan_if_there_is_one(width):
    terms = torch.rand((3, width), generator=torch.Generator().manual_seed(1))
    if width > 1:
        terms[1, -1] = float("nan")
    found = sums.combine(sums.segment_sums(terms, sums.SEGMENT["element"], largest=True), largest=True)
    torch.testing.assert_close(found, terms.amax(1).double(), rtol=0, atol=0, equal_nan=True)


def test_each_row_is_summed_by_itself_and_more_segments_than_lanes_wrap_around():
    ones = torch.ones(2, sums.UPPER_LANES + 5)
    ones[1] *= 3
    assert sums.combine(ones).tolist() == [sums.UPPER_LANES + 5, 3 * (sums.UPPER_LANES + 5)]
