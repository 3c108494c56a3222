"""How fast is a step? Ours beside its peers, in one run: `python benchmarks/speed.py` (on the GPU if there is one).

Absolute times depend on the machine and on what else runs there; read the ratios. Ours and the peer take turns, and
each figure is the median of its turns. A peer that is not installed is reported as such.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cases
from peers import (
    beside,
    clip_then_fused,
    cycling,
    in_8_bits,
    on_dtensors,
    our_clip_grad_norm_,
    same_bytes_no_mathematics,
    scaled,
    skipping,
    torch_clip_grad_norm_,
    torch_fused,
    transformers_adafactor,
)
from rows import Faster, Goal, OfCopy, OfTheTime, Row, main

from fusedadam import Adafactor, AdamP, AdamW
from fusedadam.catalog import CATALOG
from fusedadam.cli.harness import shapes as models
from fusedadam.cli.harness.shapes import Shape

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FP32 = DTYPES["fp32"]
CLIP = {"max_grad_norm": 1.0}
ALL_PROJECTED = {"delta": 1e6}  # above every cosine: each matrix is projected by channel, as with batch norm
CAPTURABLE = {"capturable": True}
GPT, LLAMA, RESNET = models.gpt(), models.llama(), cases.resnet()
BIG, TWO, SMALL, SMALL_GPU = cases.one(32), cases.two_matrices(), models.many_small(4096), models.many_small(65536)
SIX = [(64, 64)] * 6
LOW_MEMORY = [peer.name for peer in CATALOG["AdamW"].peers if peer.low_memory and not peer.compiles]
# Every optimizer of the catalog is measured on gpt and llama on a GPU, and on 33.5M on a CPU. Goals that differ:
ON_GPT: dict[str, list[Goal]] = {
    "AdamW": [Faster(1.13), OfCopy(92)], "Adam": [Faster(1.13)], "SGD": [Faster(1.1)], "EmaAdamW": [Faster(1.1)],
    "AdamP": [Faster(25)], "BertAdam": [Faster(35)], "Lamb": [Faster(10), OfCopy(92)],
    "Muon": [Faster(5)],
}  # fmt: skip
ON_LLAMA: dict[str, list[Goal]] = {
    "AdamW": [Faster(), OfCopy(96)], "SGD": [Faster(1.15), OfCopy(95)], "EmaAdamW": [Faster(), OfCopy(94)],
    "AdamP": [Faster(5), OfCopy(95)], "BertAdam": [Faster(3.8)], "Lamb": [Faster(), OfCopy(92)],
    "RMSprop": [Faster(1.15), OfCopy(95)], "Adadelta": [Faster(1.15), OfCopy(95)], "Adafactor": [Faster(3)],
    "Muon": [Faster(1.5)],
}  # fmt: skip
# EmaAdamW moves 36 bytes a parameter, torch's step and a foreach EMA 40: at equal bandwidth it is 1.11 times as fast.
ON_33M = {"AdamW": 0.97}
ON_TWO_MATRICES = {"AdamP": 12, "BertAdam": 8, "Adafactor": 1, "Muon": 1}


def row(
    optimizer: str, what: str, shapes: Sequence[Shape], goals: Sequence[Goal], options: Mapping[str, Any] | None = None,
    by: str | None = None,
) -> Row:  # fmt: skip
    """Ours beside a peer, with the catalog's usual options or these. ``what`` begins with the dtype."""
    dtype, entry = DTYPES[what.replace(",", "").split()[0]], CATALOG[optimizer]
    options = entry.usual if options is None else options
    return Row(f"{optimizer} {what}", entry.cls, beside(optimizer, by), shapes, dtype, goals, options)


# fmt: off
ON_GPU = [
    *(row(name, "fp32, gpt", GPT, ON_GPT.get(name, [Faster(3)])) for name in CATALOG),
    *(row(name, "fp32, llama", LLAMA, ON_LLAMA.get(name, [Faster(), OfCopy(95)])) for name in CATALOG),
    *(row(name, "fp32, gpt", GPT, [Faster(1.1)], by="optimi") for name in ("Lion", "RAdam", "Adan")),
    Row("Adafactor fp32, llama", Adafactor, transformers_adafactor, LLAMA, FP32, [Faster(3)]),
    row("AdamW", "fp32, one tensor of 268M", cases.one(256), [Faster(), OfCopy(95)]),
    row("AdamW", "bf16, llama", LLAMA, [Faster(), OfCopy(90)]),
    *(Row("AdamW bf16 8bit, llama", in_8_bits(AdamW), beside("AdamW", by), LLAMA, DTYPES["bf16"], [Faster()])
      for by in LOW_MEMORY),
    row("AdamW", "fp32, 1,000 small tensors", SMALL_GPU, [Faster(5)]),
    row("AdamW", "fp32 capturable, 1,000 small tensors", SMALL_GPU, [Faster(2)], CAPTURABLE),
    Row("AdamW fp32 scaled, 1,000 small tensors", scaled(AdamW), scaled(torch_fused), SMALL_GPU, FP32, [Faster(2)]),
    Row("AdamW fp32 scaled, llama", scaled(AdamW), scaled(torch_fused), LLAMA, FP32, [Faster()]),
    Row("AdamW fp32 scaled, llama", scaled(AdamW), AdamW, LLAMA, FP32, [OfTheTime(1.16)]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), on_dtensors(torch_fused), SMALL_GPU, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), AdamW, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", on_dtensors(AdamP), AdamP, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    Row("AdamW fp32 clipped, gpt", AdamW, clip_then_fused, GPT, FP32, [Faster(1.5)], CLIP),
    Row("AdamW fp32 clipped, llama", AdamW, clip_then_fused, LLAMA, FP32, [Faster(1.45)], CLIP),
    Row("clip_grad_norm_ fp32, gpt", our_clip_grad_norm_, torch_clip_grad_norm_, GPT, FP32, [Faster()]),
    row("AdamP", "bf16, gpt", GPT, [Faster(), OfCopy(80)]),
    row("AdamP", "bf16, llama", LLAMA, [Faster(), OfCopy(88)]),
    row("BertAdam", "bf16, gpt", GPT, [Faster()]),
    Row("AdamW fp32 skip_nonfinite, llama", skipping(AdamW), AdamW, LLAMA, FP32, [OfTheTime()]),
    row("AdamP", "fp32, resnet", RESNET, [Faster(40)]),
    row("AdamP", "fp32, resnet, all projected", RESNET, [Faster()], ALL_PROJECTED),
    *(row("AdamP", f"fp32, {what}", shapes, [Faster()]) for what, shapes in cases.awkward_rows().items()),
    *(Row(f"AdamW fp32{how}, 6 tensors, betas cycle", cycling(make), make, SIX, FP32, [OfTheTime()], options)
      for how, make, options in (("", AdamW, {}), (" scaled", scaled(AdamW), {}), (" capturable", AdamW, CAPTURABLE))),
]
ON_CPU = [
    *(row(name, "fp32, 33.5M", BIG, [Faster(ON_33M.get(name, 1))]) for name in CATALOG if name not in ON_TWO_MATRICES),
    *(row(name, "fp32, two matrices", TWO, [Faster(goal)]) for name, goal in ON_TWO_MATRICES.items()),
    Row("Adafactor fp32, two matrices", Adafactor, transformers_adafactor, TWO, FP32, [Faster(1)]),
    row("SGD", "fp32 without momentum, 33.5M", BIG, [Faster(1)], {}),
    Row("AdamW fp32, 33.5M", AdamW, same_bytes_no_mathematics, BIG, FP32, [OfTheTime(1.1)]),
    row("AdamW", "bf16, 33.5M", BIG, [Faster(1.3)]),
    row("AdamW", "fp16, 33.5M", BIG, [Faster(1.1)]),
    row("AdamW", "fp32, 1,000 small tensors", SMALL, [Faster(4)]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), on_dtensors(torch_fused), SMALL, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), AdamW, SMALL, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", on_dtensors(AdamP), AdamP, SMALL, FP32, [OfTheTime(1.2)]),
    Row("AdamW fp32 clipped, two matrices", AdamW, clip_then_fused, TWO, FP32, [Faster(1.3)], CLIP),
    row("BertAdam", "fp32, 1,000 small tensors", SMALL, [Faster(15)]),
    row("AdamP", "fp32, 1,000 small tensors", SMALL, [Faster(8)]),
    row("AdamP", "fp32, 1,000 small matrices", cases.small_matrices(4096), [Faster(8)]),
    Row("AdamW fp32, 6 tensors, betas cycle", cycling(AdamW), AdamW, SIX, FP32, [OfTheTime()]),
]
# fmt: on


if __name__ == "__main__":
    sys.exit(main(__doc__, {"cpu": ON_CPU, "cuda": ON_GPU}))
