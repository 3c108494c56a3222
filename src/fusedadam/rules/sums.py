"""The order in which sums are added: the same on every backend, for any number of threads, so the bits are the same.

A sum is divided into segments, and a segment into lanes. Within a segment every ``LANES``-th term belongs to the same
lane, and the terms of a lane are added one after the other. The lanes are then added in pairs of neighbours, again and
again until one is left. The segments' sums are added in the same way, in float64, with ``UPPER_LANES`` lanes. Lanes
without terms are zero and change nothing, so a backend may leave them out.

The terms of a column are added one after the other, in segments of ``COLUMN_SEGMENT`` rows, and the segments as above.

Terms by element are added in the dtype that the rule computes in, everything above them in float64. This module is the
definition, for torch tensors; the compiled backends give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES, UPPER_LANES = 256, 1024
SEGMENT = {"element": 8192, "row": 1024}  # terms in a segment, by the space of the terms
COLUMN_SEGMENT = 64


def segment_sums(terms: Tensor, segment: int, largest: bool = False) -> Tensor:
    """The sums of all segments of each row of ``terms``, which has two dimensions."""
    rows, width = terms.shape
    pieces = -(-width // segment)
    padded = pieces * (segment if pieces > 1 else -(-width // LANES) * LANES)
    terms = torch.nn.functional.pad(terms, (0, padded - width)).view(rows, pieces, -1, LANES)
    lanes = torch.zeros_like(terms[:, :, 0])
    for k in range(terms.shape[2]):
        lanes = torch.maximum(lanes, terms[:, :, k]) if largest else lanes + terms[:, :, k]
    return _pairs(lanes, largest)


def column_segment_sums(terms: Tensor, largest: bool = False) -> Tensor:
    """The sums of all segments of each column: of (matrices, rows, columns), (matrices, segments, columns)."""
    matrices, rows, columns = terms.shape
    segments = -(-rows // COLUMN_SEGMENT)
    terms = torch.nn.functional.pad(terms, (0, 0, 0, segments * COLUMN_SEGMENT - rows))
    terms = terms.view(matrices, segments, COLUMN_SEGMENT, columns)
    sums = torch.zeros_like(terms[:, :, 0])
    for k in range(min(rows, COLUMN_SEGMENT)):
        sums = torch.maximum(sums, terms[:, :, k]) if largest else sums + terms[:, :, k]
    return sums


def combine(sums: Tensor, largest: bool = False) -> Tensor:
    """The sum, in float64, of the segments' sums in the last dimension."""
    sums = sums.double()
    lanes = sums.new_zeros((*sums.shape[:-1], UPPER_LANES))
    for start in range(0, sums.shape[-1], UPPER_LANES):
        part = sums[..., start : start + UPPER_LANES]
        used = lanes[..., : part.shape[-1]]
        used.copy_(torch.maximum(used, part) if largest else used + part)
    return _pairs(lanes, largest)


def _pairs(lanes: Tensor, largest: bool) -> Tensor:
    while lanes.shape[-1] > 1:
        a, b = lanes[..., 0::2], lanes[..., 1::2]
        lanes = torch.maximum(a, b) if largest else a + b
    return lanes[..., 0]
