"""How fast is a step? Ours beside its peers, in one run: `python benchmarks/speed.py` (on the GPU if there is one).

Absolute times depend on the machine and on who shares it; the ratios are what to read. Ours and the peer take turns,
and each figure is the median of its turns. `--only TEXT` measures the rows with TEXT in their name, `--quick` takes
fewer turns. A peer that is not installed is reported as such.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import startup
import torch
from measure import FULL, QUICK, Faster, OfCopy, OfTheTime, Row, measure
from peers import (
    BertAdamLoop,
    TorchAdamWWithEma,
    adamp,
    clip_then_fused,
    fused_on_dtensors,
    our_adamp,
    our_adamp_on_dtensors,
    our_adamw,
    our_adamw_on_dtensors,
    our_adamw_scaled,
    our_adamw_unscaled,
    our_clip_grad_norm_,
    same_bytes_no_mathematics,
    torch_clip_grad_norm_,
    torch_fused,
    torch_fused_scaled,
)
from report import Report

from fusedadam import AdamP, AdamW, BertAdam, EmaAdamW
from fusedadam.cli.bench import shapes as models

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CLIP = {"max_grad_norm": 1.0}
SCHEDULE = {"warmup": 0.1, "t_total": 100_000}  # as BERT is trained
ALL_PROJECTED = {"delta": 1e6}  # no cosine is above it: every matrix by its channels, as batch norm would have it
CAPTURABLE = {"capturable": True}
BIG, TWO, SMALL = models.one(32), models.two_matrices(), models.many_small(4096)
SMALL_GPU = models.many_small(65536)

# fmt: off
ON_GPU = [
    Row("AdamW fp32, one tensor of 268M", AdamW, torch_fused, models.one(256), FP32, [Faster(), OfCopy(95)]),
    Row("AdamW fp32, llama", AdamW, torch_fused, models.llama(), FP32, [Faster(), OfCopy(96)]),
    Row("AdamW bf16, llama", AdamW, torch_fused, models.llama(), BF16, [Faster(), OfCopy(90)]),
    Row("AdamW fp32, gpt", AdamW, torch_fused, models.gpt(), FP32, [Faster(1.13), OfCopy(92)]),
    Row("AdamW fp32, 1,000 small tensors", AdamW, torch_fused, SMALL_GPU, FP32, [Faster(5)]),
    Row("AdamW fp32 capturable, 1,000 small tensors", AdamW, torch_fused, SMALL_GPU, FP32, [Faster(2)], CAPTURABLE),
    Row("AdamW fp32 scaled, 1,000 small tensors", our_adamw_scaled, torch_fused_scaled, SMALL_GPU, FP32, [Faster(2)]),
    Row("AdamW fp32 scaled, llama", our_adamw_scaled, torch_fused_scaled, models.llama(), FP32, [Faster()]),
    Row("AdamW fp32 scaled, llama", our_adamw_scaled, our_adamw_unscaled, models.llama(), FP32, [OfTheTime(1.03)]),
    Row("AdamW fp32, 1,000 small DTensors", our_adamw_on_dtensors, fused_on_dtensors, SMALL_GPU, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", our_adamw_on_dtensors, our_adamw, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", our_adamp_on_dtensors, our_adamp, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    Row("EmaAdamW fp32, llama", EmaAdamW, TorchAdamWWithEma, models.llama(), FP32, [Faster(), OfCopy(94)]),
    Row("AdamW fp32 clipped, gpt", AdamW, clip_then_fused, models.gpt(), FP32, [Faster(1.5)], CLIP),
    Row("AdamW fp32 clipped, llama", AdamW, clip_then_fused, models.llama(), FP32, [Faster(1.45)], CLIP),
    Row("clip_grad_norm_ fp32, gpt", our_clip_grad_norm_, torch_clip_grad_norm_, models.gpt(), FP32, [Faster()]),
    Row("BertAdam fp32, gpt", BertAdam, BertAdamLoop, models.gpt(), FP32, [Faster(35)], SCHEDULE),
    Row("BertAdam fp32, llama", BertAdam, BertAdamLoop, models.llama(), FP32, [Faster(3.8)], SCHEDULE),
    Row("AdamP fp32, gpt", AdamP, adamp, models.gpt(), FP32, [Faster(25)]),
    Row("AdamP fp32, llama", AdamP, adamp, models.llama(), FP32, [Faster(5), OfCopy(95)]),
    Row("AdamP fp32, resnet", AdamP, adamp, models.resnet(), FP32, [Faster(40)]),
    Row("AdamP fp32, resnet, all projected", AdamP, adamp, models.resnet(), FP32, [Faster()], ALL_PROJECTED),
    *(Row(f"AdamP fp32, {what}", AdamP, adamp, shapes, FP32, [Faster()])
      for what, shapes in models.awkward_rows().items()),
]
ON_CPU = [
    Row("AdamW fp32, 33.5M", AdamW, torch_fused, BIG, FP32, [Faster(0.97)]),
    Row("AdamW fp32, 33.5M", AdamW, same_bytes_no_mathematics, BIG, FP32, [OfTheTime(1.1)]),
    Row("AdamW bf16, 33.5M", AdamW, torch_fused, BIG, BF16, [Faster(1.3)]),
    Row("AdamW fp16, 33.5M", AdamW, torch_fused, BIG, FP16, [Faster(1.1)]),
    Row("AdamW fp32, 1,000 small tensors", AdamW, torch_fused, SMALL, FP32, [Faster(4)]),
    Row("AdamW fp32, 1,000 small DTensors", our_adamw_on_dtensors, fused_on_dtensors, SMALL, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", our_adamw_on_dtensors, our_adamw, SMALL, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", our_adamp_on_dtensors, our_adamp, SMALL, FP32, [OfTheTime(1.2)]),
    Row("EmaAdamW fp32, 33.5M", EmaAdamW, TorchAdamWWithEma, BIG, FP32, [Faster(1.3)]),
    Row("AdamW fp32 clipped, two matrices", AdamW, clip_then_fused, TWO, FP32, [Faster(1.3)], CLIP),
    Row("BertAdam fp32, two matrices", BertAdam, BertAdamLoop, TWO, FP32, [Faster(8)], SCHEDULE),
    Row("BertAdam fp32, 1,000 small tensors", BertAdam, BertAdamLoop, SMALL, FP32, [Faster(15)], SCHEDULE),
    Row("AdamP fp32, two matrices", AdamP, adamp, TWO, FP32, [Faster(12)]),
    Row("AdamP fp32, 1,000 small tensors", AdamP, adamp, SMALL, FP32, [Faster(8)]),
    Row("AdamP fp32, 1,000 small matrices", AdamP, adamp, models.small_matrices(4096), FP32, [Faster(8)]),
]
# fmt: on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="fewer turns: to try something, not to publish")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    device, pace = arguments.device, QUICK if arguments.quick else FULL
    rows = [row for row in (ON_GPU if device == "cuda" else ON_CPU) if named(row.what, arguments.only)]
    starts = [what for what in startup.GOALS if device == "cpu" and named(what, arguments.only)]
    if not rows and not starts:
        parser.error(f"--only {arguments.only!r} is in the name of no row on {device}")
    print(f"{describe(device)}; torch {torch.__version__}, Python {platform.python_version()}")
    report = Report()
    seconds = startup.seconds(pace.turns // 2) if starts else {}
    for what in starts:
        report.add(what, seconds[what], "", None, seconds[what], startup.GOALS[what])
    for row in rows:
        report.times(row, *measure(row, device, pace))
    print(f"\nmilliseconds (seconds for imports and first steps), medians, {describe(device)}\n{report.table()}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report.rows, indent=2))
    return 0


def named(what: str, text: str) -> bool:
    return text.lower() in what.lower()


def describe(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())
