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
    on_dtensors,
    our_clip_grad_norm_,
    same_bytes_no_mathematics,
    scaled,
    skipping,
    torch_clip_grad_norm_,
    torch_fused,
)
from rows import Faster, Goal, OfCopy, OfTheTime, Row, main

from fusedadam import AdamP, AdamW
from fusedadam.catalog import CATALOG
from fusedadam.cli.harness import shapes as models
from fusedadam.cli.harness.shapes import Shape

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FP32 = DTYPES["fp32"]
CLIP = {"max_grad_norm": 1.0}
SCHEDULE = {"warmup": 0.1, "t_total": 100_000}  # as BERT is trained
MOMENTUM = {"momentum": 0.9}
ALL_PROJECTED = {"delta": 1e6}  # above every cosine: each matrix is projected by channel, as with batch norm
CAPTURABLE = {"capturable": True}
NO_DECAY = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}  # defaults differ between packages
ADAN = {**NO_DECAY, "betas": (0.98, 0.92, 0.99), "eps": 1e-8}
MIX = {**NO_DECAY, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0}
GPT, LLAMA, RESNET = models.gpt(), models.llama(), cases.resnet()
BIG, TWO, SMALL, SMALL_GPU = cases.one(32), cases.two_matrices(), models.many_small(4096), models.many_small(65536)
SIX = [(64, 64)] * 6


def row(
    optimizer: str, what: str, shapes: Sequence[Shape], goals: Sequence[Goal], options: Mapping[str, Any] | None = None,
    by: str | None = None,
) -> Row:  # fmt: skip
    """Ours beside a peer. ``what`` begins with the dtype."""
    dtype = DTYPES[what.replace(",", "").split()[0]]
    return Row(
        f"{optimizer} {what}", CATALOG[optimizer].cls, beside(optimizer, by), shapes, dtype, goals, options or {}
    )


# fmt: off
ON_GPU = [
    row("AdamW", "fp32, one tensor of 268M", cases.one(256), [Faster(), OfCopy(95)]),
    row("AdamW", "fp32, llama", LLAMA, [Faster(), OfCopy(96)]),
    row("AdamW", "bf16, llama", LLAMA, [Faster(), OfCopy(90)]),
    row("AdamW", "fp32, gpt", GPT, [Faster(1.13), OfCopy(92)]),
    row("AdamW", "fp32, 1,000 small tensors", SMALL_GPU, [Faster(5)]),
    row("AdamW", "fp32 capturable, 1,000 small tensors", SMALL_GPU, [Faster(2)], CAPTURABLE),
    Row("AdamW fp32 scaled, 1,000 small tensors", scaled(AdamW), scaled(torch_fused), SMALL_GPU, FP32, [Faster(2)]),
    Row("AdamW fp32 scaled, llama", scaled(AdamW), scaled(torch_fused), LLAMA, FP32, [Faster()]),
    Row("AdamW fp32 scaled, llama", scaled(AdamW), AdamW, LLAMA, FP32, [OfTheTime(1.16)]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), on_dtensors(torch_fused), SMALL_GPU, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), AdamW, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", on_dtensors(AdamP), AdamP, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    row("EmaAdamW", "fp32, llama", LLAMA, [Faster(), OfCopy(94)]),
    Row("AdamW fp32 clipped, gpt", AdamW, clip_then_fused, GPT, FP32, [Faster(1.5)], CLIP),
    Row("AdamW fp32 clipped, llama", AdamW, clip_then_fused, LLAMA, FP32, [Faster(1.45)], CLIP),
    Row("clip_grad_norm_ fp32, gpt", our_clip_grad_norm_, torch_clip_grad_norm_, GPT, FP32, [Faster()]),
    row("BertAdam", "fp32, gpt", GPT, [Faster(35)], SCHEDULE),
    row("BertAdam", "fp32, llama", LLAMA, [Faster(3.8)], SCHEDULE),
    row("AdamP", "fp32, gpt", GPT, [Faster(25)]),
    row("AdamP", "fp32, llama", LLAMA, [Faster(5), OfCopy(95)]),
    row("AdamP", "bf16, gpt", GPT, [Faster(), OfCopy(80)]),
    row("AdamP", "bf16, llama", LLAMA, [Faster(), OfCopy(88)]),
    row("BertAdam", "bf16, gpt", GPT, [Faster()], SCHEDULE),
    row("SGD", "fp32 with momentum, llama", LLAMA, [Faster(1.15), OfCopy(95)], MOMENTUM),
    row("RMSprop", "fp32, llama", LLAMA, [Faster(1.15), OfCopy(95)]),
    row("Adadelta", "fp32, llama", LLAMA, [Faster(1.15), OfCopy(95)]),
    row("Lamb", "fp32, gpt", GPT, [Faster(10), OfCopy(92)]),
    row("Lamb", "fp32, llama", LLAMA, [Faster(), OfCopy(92)]),
    row("Lion", "fp32, gpt", GPT, [Faster(1.1)], NO_DECAY, by="optimi"),
    row("Lion", "fp32, llama", LLAMA, [Faster(), OfCopy(95)], NO_DECAY, by="loop"),
    row("RAdam", "fp32, gpt", GPT, [Faster(1.1)], NO_DECAY, by="optimi"),
    row("RAdam", "fp32, llama", LLAMA, [Faster(), OfCopy(95)]),
    row("NAdam", "fp32, gpt", GPT, [Faster(3)]),
    row("NAdam", "fp32, llama", LLAMA, [Faster(), OfCopy(95)]),
    row("Adafactor", "fp32, llama", LLAMA, [Faster(3)]),
    row("Adafactor", "fp32, llama", LLAMA, [Faster(3)], by="transformers"),
    row("Adan", "fp32, gpt", GPT, [Faster(1.1)], ADAN, by="optimi"),
    row("Adan", "fp32, llama", LLAMA, [Faster(), OfCopy(95)], ADAN, by="loop"),
    row("AdEMAMix", "fp32, gpt", GPT, [Faster(3)], MIX),
    row("AdEMAMix", "fp32, llama", LLAMA, [Faster(), OfCopy(95)], MIX),
    row("ScheduleFreeAdamW", "fp32, gpt", GPT, [Faster(1.1)]),
    row("ScheduleFreeAdamW", "fp32, llama", LLAMA, [OfCopy(95)]),
    Row("AdamW fp32 skip_nonfinite, llama", skipping(AdamW), AdamW, LLAMA, FP32, [OfTheTime()]),
    row("AdamP", "fp32, resnet", RESNET, [Faster(40)]),
    row("AdamP", "fp32, resnet, all projected", RESNET, [Faster()], ALL_PROJECTED),
    *(row("AdamP", f"fp32, {what}", shapes, [Faster()]) for what, shapes in cases.awkward_rows().items()),
    *(Row(f"AdamW fp32{how}, 6 tensors, betas cycle", cycling(make), make, SIX, FP32, [OfTheTime()], options)
      for how, make, options in (("", AdamW, {}), (" scaled", scaled(AdamW), {}), (" capturable", AdamW, CAPTURABLE))),
]
ON_CPU = [
    row("AdamW", "fp32, 33.5M", BIG, [Faster(0.97)]),
    Row("AdamW fp32, 33.5M", AdamW, same_bytes_no_mathematics, BIG, FP32, [OfTheTime(1.1)]),
    row("AdamW", "bf16, 33.5M", BIG, [Faster(1.3)]),
    row("AdamW", "fp16, 33.5M", BIG, [Faster(1.1)]),
    row("AdamW", "fp32, 1,000 small tensors", SMALL, [Faster(4)]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), on_dtensors(torch_fused), SMALL, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), AdamW, SMALL, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", on_dtensors(AdamP), AdamP, SMALL, FP32, [OfTheTime(1.2)]),
    row("EmaAdamW", "fp32, 33.5M", BIG, [Faster(1.3)]),
    Row("AdamW fp32 clipped, two matrices", AdamW, clip_then_fused, TWO, FP32, [Faster(1.3)], CLIP),
    row("BertAdam", "fp32, two matrices", TWO, [Faster(8)], SCHEDULE),
    row("BertAdam", "fp32, 1,000 small tensors", SMALL, [Faster(15)], SCHEDULE),
    row("AdamP", "fp32, two matrices", TWO, [Faster(12)]),
    row("AdamP", "fp32, 1,000 small tensors", SMALL, [Faster(8)]),
    row("AdamP", "fp32, 1,000 small matrices", cases.small_matrices(4096), [Faster(8)]),
    row("SGD", "fp32, 33.5M", BIG, [Faster(1)]),
    row("SGD", "fp32 with momentum, 33.5M", BIG, [Faster(1)], MOMENTUM),
    row("RMSprop", "fp32, 33.5M", BIG, [Faster(1)]),
    row("Adadelta", "fp32, 33.5M", BIG, [Faster(1)]),
    row("Lamb", "fp32, 33.5M", BIG, [Faster(1)]),
    row("Lion", "fp32, 33.5M", BIG, [Faster(1)], NO_DECAY, by="loop"),
    row("RAdam", "fp32, 33.5M", BIG, [Faster(1)]),
    row("NAdam", "fp32, 33.5M", BIG, [Faster(1)]),
    row("Adafactor", "fp32, two matrices", TWO, [Faster(1)]),
    row("Adafactor", "fp32, two matrices", TWO, [Faster(1)], by="transformers"),
    row("Adan", "fp32, 33.5M", BIG, [Faster(1)], ADAN, by="loop"),
    row("ScheduleFreeAdamW", "fp32, 33.5M", BIG, [Faster(1)]),
    row("AdEMAMix", "fp32, 33.5M", BIG, [Faster(1)], MIX),
    Row("AdamW fp32, 6 tensors, betas cycle", cycling(AdamW), AdamW, SIX, FP32, [OfTheTime()]),
]
# fmt: on


if __name__ == "__main__":
    sys.exit(main(__doc__, {"cpu": ON_CPU, "cuda": ON_GPU}))
