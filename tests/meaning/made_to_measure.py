"""Gradients for AdamP whose cosines with the parameter have chosen values."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import normalize

from tests.support import F64

# where the largest cosine lies, as a part of the threshold of the view, and what is done for it
KINDS = {
    "channels well below": ("channel", 0.3, "channel"),
    "channels just below": ("channel", 0.999, "channel"),
    "channels just above": ("channel", 1.001, "none"),
    "one channel just above": ("one channel", 1.001, "layer"),
    "layer well below": ("layer", 0.3, "layer"),
    "layer just below": ("layer", 0.999, "layer"),
    "layer just above": ("layer", 1.001, "none"),
    "all well above": ("channel", 5.0, "none"),
}


def gradient(p, kind, step, generator, delta=0.1):
    """A gradient whose rows have the cosines with p's that ``kind`` names; of both signs and several sizes."""
    noise = torch.randn(p.shape, generator=generator, dtype=F64)
    if p.dim() < 2 or not p.numel():
        return noise
    view, factor, _ = KINDS[kind]
    rows = p.reshape(1 if view == "layer" else p.shape[0], -1).double()
    cosine = torch.full((len(rows), 1), factor, dtype=F64)
    if view == "one channel":  # the others cancel each other out
        cosine[:-1] = 0.3 * (-1.0) ** torch.arange(len(rows) - 1)[:, None]
    cosine = (cosine * delta / math.sqrt(rows.shape[1])).clamp(-0.9, 0.9) * (-1) ** step
    along, noise = normalize(rows, dim=1), noise.reshape(rows.shape)
    across = normalize(noise - along * (noise * along).sum(1, keepdim=True), dim=1)
    length = (1 + step % 3) * (1 + torch.rand(cosine.shape, generator=generator, dtype=F64))
    return (length * (cosine * along + (1 - cosine**2).sqrt() * across)).reshape(p.shape)


def values(shapes, seed=0):
    generator = torch.Generator().manual_seed(1000 + seed)  # never a gradient's: those would be parallel
    return [torch.randn(s, generator=generator, dtype=F64) for s in shapes]
