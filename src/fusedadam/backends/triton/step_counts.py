"""The Triton kernel that counts a step on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def count_step(counts, places, count, found_inf, BLOCK: tl.constexpr):
    """Counts the step of each member, unless GradScaler found an infinity."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = k < count
    place = tl.load(places + k, mask=live, other=0)
    taken = tl.where(tl.load(found_inf) == 0, 1.0, 0.0)
    tl.store(counts + place, tl.load(counts + place, mask=live, other=0) + taken, mask=live)
