"""How fast is a step? Ours beside its peers, in one run: `python benchmarks/speed.py` (on the GPU if there is one).

Absolute times depend on the machine and on what else runs there; read the ratios. Ours and the peer take turns, and
each figure is the median of its turns. A peer that is not installed is reported as such.
"""

from __future__ import annotations

import sys

import cases
from peers import (
    adamp,
    clip_then_fused,
    on_dtensors,
    our_clip_grad_norm_,
    packaged,
    same_bytes_no_mathematics,
    scaled,
    schedule_free,
    skipping,
    torch_adadelta,
    torch_adafactor,
    torch_clip_grad_norm_,
    torch_fused,
    torch_nadam,
    torch_radam,
    torch_rmsprop,
    torch_sgd,
    transformers_adafactor,
)
from rows import Faster, OfCopy, OfTheTime, Row, main

from fusedadam import (
    SGD,
    Adadelta,
    Adafactor,
    AdamP,
    AdamW,
    Adan,
    AdEMAMix,
    BertAdam,
    EmaAdamW,
    Lamb,
    Lion,
    NAdam,
    RAdam,
    RMSprop,
    ScheduleFreeAdamW,
)
from fusedadam.cli.harness import shapes as models
from fusedadam.cli.peers import BertAdamLoop, LambLoop, TorchAdamWWithEma

FP32, BF16, FP16 = "float32", "bfloat16", "float16"
CLIP = {"max_grad_norm": 1.0}
SCHEDULE = {"warmup": 0.1, "t_total": 100_000}  # as BERT is trained
MOMENTUM = {"momentum": 0.9}
ALL_PROJECTED = {"delta": 1e6}  # above every cosine: each matrix is projected by channel, as with batch norm
CAPTURABLE = {"capturable": True}
BIG, TWO, SMALL = cases.one(32), cases.two_matrices(), models.many_small(4096)
NO_DECAY = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}  # defaults differ between packages
ADAN = {**NO_DECAY, "betas": (0.98, 0.92, 0.99), "eps": 1e-8}
MIX = {**NO_DECAY, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0}
SMALL_GPU = models.many_small(65536)
OPTIMI = {name: packaged("optimi", name) for name in ("Lion", "Adan", "RAdam")}
LOOPS = {name: packaged("pytorch_optimizer", name) for name in ("Lion", "Adan", "AdEMAMix")}

# fmt: off
ON_GPU = [
    Row("AdamW fp32, one tensor of 268M", AdamW, torch_fused, cases.one(256), FP32, [Faster(), OfCopy(95)]),
    Row("AdamW fp32, llama", AdamW, torch_fused, models.llama(), FP32, [Faster(), OfCopy(96)]),
    Row("AdamW bf16, llama", AdamW, torch_fused, models.llama(), BF16, [Faster(), OfCopy(90)]),
    Row("AdamW fp32, gpt", AdamW, torch_fused, models.gpt(), FP32, [Faster(1.13), OfCopy(92)]),
    Row("AdamW fp32, 1,000 small tensors", AdamW, torch_fused, SMALL_GPU, FP32, [Faster(5)]),
    Row("AdamW fp32 capturable, 1,000 small tensors", AdamW, torch_fused, SMALL_GPU, FP32, [Faster(2)], CAPTURABLE),
    Row("AdamW fp32 scaled, 1,000 small tensors", scaled(AdamW), scaled(torch_fused), SMALL_GPU, FP32, [Faster(2)]),
    Row("AdamW fp32 scaled, llama", scaled(AdamW), scaled(torch_fused), models.llama(), FP32, [Faster()]),
    Row("AdamW fp32 scaled, llama", scaled(AdamW), AdamW, models.llama(), FP32, [OfTheTime(1.16)]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), on_dtensors(torch_fused), SMALL_GPU, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), AdamW, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", on_dtensors(AdamP), AdamP, SMALL_GPU, FP32, [OfTheTime(1.2)]),
    Row("EmaAdamW fp32, llama", EmaAdamW, TorchAdamWWithEma, models.llama(), FP32, [Faster(), OfCopy(94)]),
    Row("AdamW fp32 clipped, gpt", AdamW, clip_then_fused, models.gpt(), FP32, [Faster(1.5)], CLIP),
    Row("AdamW fp32 clipped, llama", AdamW, clip_then_fused, models.llama(), FP32, [Faster(1.45)], CLIP),
    Row("clip_grad_norm_ fp32, gpt", our_clip_grad_norm_, torch_clip_grad_norm_, models.gpt(), FP32, [Faster()]),
    Row("BertAdam fp32, gpt", BertAdam, BertAdamLoop, models.gpt(), FP32, [Faster(35)], SCHEDULE),
    Row("BertAdam fp32, llama", BertAdam, BertAdamLoop, models.llama(), FP32, [Faster(3.8)], SCHEDULE),
    Row("AdamP fp32, gpt", AdamP, adamp, models.gpt(), FP32, [Faster(25)]),
    Row("AdamP fp32, llama", AdamP, adamp, models.llama(), FP32, [Faster(5), OfCopy(95)]),
    Row("AdamP bf16, gpt", AdamP, adamp, models.gpt(), BF16, [Faster(), OfCopy(80)]),
    Row("AdamP bf16, llama", AdamP, adamp, models.llama(), BF16, [Faster(), OfCopy(88)]),
    Row("BertAdam bf16, gpt", BertAdam, BertAdamLoop, models.gpt(), BF16, [Faster()], SCHEDULE),
    Row("SGD fp32 with momentum, llama", SGD, torch_sgd, models.llama(), FP32, [Faster(1.15), OfCopy(95)], MOMENTUM),
    Row("RMSprop fp32, llama", RMSprop, torch_rmsprop, models.llama(), FP32, [Faster(1.15), OfCopy(95)]),
    Row("Adadelta fp32, llama", Adadelta, torch_adadelta, models.llama(), FP32, [Faster(1.15), OfCopy(95)]),
    Row("Lamb fp32, gpt", Lamb, LambLoop, models.gpt(), FP32, [Faster(10), OfCopy(92)]),
    Row("Lamb fp32, llama", Lamb, LambLoop, models.llama(), FP32, [Faster(), OfCopy(92)]),
    Row("Lion fp32, gpt", Lion, OPTIMI["Lion"], models.gpt(), FP32, [Faster(1.1)], NO_DECAY),
    Row("Lion fp32, llama", Lion, LOOPS["Lion"], models.llama(), FP32, [Faster(), OfCopy(95)], NO_DECAY),
    Row("RAdam fp32, gpt", RAdam, OPTIMI["RAdam"], models.gpt(), FP32, [Faster(1.1)], NO_DECAY),
    Row("RAdam fp32, llama", RAdam, torch_radam, models.llama(), FP32, [Faster(), OfCopy(95)]),
    Row("NAdam fp32, gpt", NAdam, torch_nadam, models.gpt(), FP32, [Faster(3)]),
    Row("NAdam fp32, llama", NAdam, torch_nadam, models.llama(), FP32, [Faster(), OfCopy(95)]),
    Row("Adafactor fp32, llama", Adafactor, torch_adafactor, models.llama(), FP32, [Faster(3)]),
    Row("Adafactor fp32, llama", Adafactor, transformers_adafactor, models.llama(), FP32, [Faster(3)]),
    Row("Adan fp32, gpt", Adan, OPTIMI["Adan"], models.gpt(), FP32, [Faster(1.1)], ADAN),
    Row("Adan fp32, llama", Adan, LOOPS["Adan"], models.llama(), FP32, [Faster(), OfCopy(95)], ADAN),
    Row("AdEMAMix fp32, gpt", AdEMAMix, LOOPS["AdEMAMix"], models.gpt(), FP32, [Faster(3)], MIX),
    Row("AdEMAMix fp32, llama", AdEMAMix, LOOPS["AdEMAMix"], models.llama(), FP32, [Faster(), OfCopy(95)], MIX),
    Row("ScheduleFreeAdamW fp32, gpt", ScheduleFreeAdamW, schedule_free, models.gpt(), FP32, [Faster(1.1)]),
    Row("ScheduleFreeAdamW fp32, llama", ScheduleFreeAdamW, schedule_free, models.llama(), FP32, [OfCopy(95)]),
    Row("AdamW fp32 skip_nonfinite, llama", skipping(AdamW), AdamW, models.llama(), FP32, [OfTheTime()]),
    Row("AdamP fp32, resnet", AdamP, adamp, cases.resnet(), FP32, [Faster(40)]),
    Row("AdamP fp32, resnet, all projected", AdamP, adamp, cases.resnet(), FP32, [Faster()], ALL_PROJECTED),
    *(Row(f"AdamP fp32, {what}", AdamP, adamp, shapes, FP32, [Faster()])
      for what, shapes in cases.awkward_rows().items()),
]
ON_CPU = [
    Row("AdamW fp32, 33.5M", AdamW, torch_fused, BIG, FP32, [Faster(0.97)]),
    Row("AdamW fp32, 33.5M", AdamW, same_bytes_no_mathematics, BIG, FP32, [OfTheTime(1.1)]),
    Row("AdamW bf16, 33.5M", AdamW, torch_fused, BIG, BF16, [Faster(1.3)]),
    Row("AdamW fp16, 33.5M", AdamW, torch_fused, BIG, FP16, [Faster(1.1)]),
    Row("AdamW fp32, 1,000 small tensors", AdamW, torch_fused, SMALL, FP32, [Faster(4)]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), on_dtensors(torch_fused), SMALL, FP32, [Faster()]),
    Row("AdamW fp32, 1,000 small DTensors", on_dtensors(AdamW), AdamW, SMALL, FP32, [OfTheTime(1.2)]),
    Row("AdamP fp32, 1,000 small DTensors", on_dtensors(AdamP), AdamP, SMALL, FP32, [OfTheTime(1.2)]),
    Row("EmaAdamW fp32, 33.5M", EmaAdamW, TorchAdamWWithEma, BIG, FP32, [Faster(1.3)]),
    Row("AdamW fp32 clipped, two matrices", AdamW, clip_then_fused, TWO, FP32, [Faster(1.3)], CLIP),
    Row("BertAdam fp32, two matrices", BertAdam, BertAdamLoop, TWO, FP32, [Faster(8)], SCHEDULE),
    Row("BertAdam fp32, 1,000 small tensors", BertAdam, BertAdamLoop, SMALL, FP32, [Faster(15)], SCHEDULE),
    Row("AdamP fp32, two matrices", AdamP, adamp, TWO, FP32, [Faster(12)]),
    Row("AdamP fp32, 1,000 small tensors", AdamP, adamp, SMALL, FP32, [Faster(8)]),
    Row("AdamP fp32, 1,000 small matrices", AdamP, adamp, cases.small_matrices(4096), FP32, [Faster(8)]),
    Row("SGD fp32, 33.5M", SGD, torch_sgd, BIG, FP32, [Faster(1)]),
    Row("SGD fp32 with momentum, 33.5M", SGD, torch_sgd, BIG, FP32, [Faster(1)], MOMENTUM),
    Row("RMSprop fp32, 33.5M", RMSprop, torch_rmsprop, BIG, FP32, [Faster(1)]),
    Row("Adadelta fp32, 33.5M", Adadelta, torch_adadelta, BIG, FP32, [Faster(1)]),
    Row("Lamb fp32, 33.5M", Lamb, LambLoop, BIG, FP32, [Faster(1)]),
    Row("Lion fp32, 33.5M", Lion, LOOPS["Lion"], BIG, FP32, [Faster(1)], NO_DECAY),
    Row("RAdam fp32, 33.5M", RAdam, torch_radam, BIG, FP32, [Faster(1)]),
    Row("NAdam fp32, 33.5M", NAdam, torch_nadam, BIG, FP32, [Faster(1)]),
    Row("Adafactor fp32, two matrices", Adafactor, torch_adafactor, TWO, FP32, [Faster(1)]),
    Row("Adafactor fp32, two matrices", Adafactor, transformers_adafactor, TWO, FP32, [Faster(1)]),
    Row("Adan fp32, 33.5M", Adan, LOOPS["Adan"], BIG, FP32, [Faster(1)], ADAN),
    Row("ScheduleFreeAdamW fp32, 33.5M", ScheduleFreeAdamW, schedule_free, BIG, FP32, [Faster(1)]),
    Row("AdEMAMix fp32, 33.5M", AdEMAMix, LOOPS["AdEMAMix"], BIG, FP32, [Faster(1)], MIX),
]
# fmt: on


if __name__ == "__main__":
    sys.exit(main(__doc__, {"cpu": ON_CPU, "cuda": ON_GPU}))
