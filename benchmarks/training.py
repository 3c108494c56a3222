"""What do storage formats cost in training? `python benchmarks/training.py --results FILE` trains a language model
with each of them, and `python benchmarks/training.py report --results FILE` prints the tables.

A byte-level transformer of 25 million parameters, with bfloat16 weights and gradients, learns the sources of Python's
standard library (and of torch, up to 32 MB): 1,500 steps of 8,192 tokens, lr 1e-3 with warm-up and a cosine down to
1e-4, weight decay 0.1. Then it is fine-tuned for 300 steps at a constant lr of 1e-5, on files that it has not seen. The
same optimizer continues there, with the moments and low bits that it has. The loss is that of 1 million tokens of
files used for neither, in nats per byte, with the bfloat16 weights that the model computes with.

A seed decides initial weights and batches, so runs of one seed differ by their format alone, and are compared in pairs.
Training is chaotic: any difference grows until two runs are different draws. "exact, nudged" shows how much that is:
it is the exact run, with one initial weight moved by one bit. Differences no larger than its own mean nothing.

`--only exact,muon,muon8,torchs_muon` compares Muon with torch's and with AdamW, at the same learning rate. On a CPU the
model has 0.87 million parameters (`--size`).

Each finished run is one line of FILE; those in it are skipped, so pieces of the work can be done in any order.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from training_model import (
    SIZES,
    TUNING_LR,
    Size,
    Training,
    bytes_per_parameter,
    float32_weights,
    warmup_and_cosine,
)

import fusedadam

SEEDS, BETA2 = (0, 1, 2), (0.999, 0.95)
WEIGHT_DECAY = 0.1
TUNING_SHARE = 5  # one step of fine-tuning for so many of training
WARM_STEPS = 17  # Triton compiles flashoptim's kernel again for a step count divisible by 16

Make = Callable[..., Any]  # of a model, a seed and options


def ours(**options: Any) -> Make:
    return lambda model, seed, **others: fusedadam.AdamW(model.parameters(), **options, **others, seed=seed)


def muon(storage: str) -> Make:
    """At AdamW's learning rate."""

    def make(model: Any, seed: int, **options: Any) -> torch.optim.Optimizer:
        groups = [{**group, **options} for group in fusedadam.param_groups(model, optimizer="muon")]
        return fusedadam.Muon(groups, adjust_lr_fn="match_rms_adamw", storage=storage, seed=seed)

    return make


class TorchsMuon:
    """torch.optim.Muon, and AdamW for the rest, on float32 copies of the weights."""

    def __init__(self, model: Any, seed: int, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        common = {"lr": lr, "weight_decay": weight_decay}
        hidden, rest = dict[Any, torch.Tensor](), dict[Any, torch.Tensor]()
        for group in fusedadam.param_groups(model, optimizer="muon"):
            kept = hidden if group["use_muon"] else rest
            kept |= {param: param.detach().float() for _, param in group["params"]}
        self.copies = hidden | rest
        self.optimizers = (
            torch.optim.Muon([*hidden.values()], adjust_lr_fn="match_rms_adamw", **common),
            torch.optim.AdamW([*rest.values()], betas=betas, **common),
        )
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        states = {copy: state for optimizer in self.optimizers for copy, state in optimizer.state.items()}
        return {copy: {**state, "copy": copy} for copy, state in states.items()}

    @torch.no_grad()
    def step(self) -> None:
        for param, copy in self.copies.items():
            copy.grad = param.grad.float()
        for optimizer in self.optimizers:
            optimizer.step()
        for param, copy in self.copies.items():
            param.copy_(copy)

    def float32_state_dict(self, model: Any) -> dict[str, torch.Tensor]:
        return {name: self.copies[param].clone() for name, param in model.named_parameters()}


def plain(model: Any, seed: int, **options: Any) -> torch.optim.Optimizer:
    """Rounds nothing stochastically, so the seed has no effect."""
    return fusedadam.AdamW(model.parameters(), state_dtype=torch.float32, **options)


def to_nearest(model: Any, seed: int, **options: Any) -> torch.optim.Optimizer:
    from fusedadam.formats import FORMATS, nearest, register

    for format_ in list(FORMATS.values()):
        if format_.title in ("bf16+8", "slice8"):
            register(nearest(format_))
    storage = {"param": "bf16+8_nearest", "exp_avg": "slice8_nearest", "exp_avg_sq": "slice8_nearest"}
    return fusedadam.AdamW(model.parameters(), storage=storage, seed=seed, **options)


def flashoptim(model: Any, seed: int, **options: Any) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW

    return FlashAdamW(model.parameters(), quantize=True, master_weight_bits=24, **options)


class Contestant(NamedTuple):
    title: str
    make: Make
    nudged: bool = False


CONTESTANTS = {
    "exact": Contestant("exact", ours(storage="exact")),
    "16bit": Contestant("16bit", ours(storage="16bit")),
    "8bit": Contestant("8bit", ours(storage="8bit")),
    "nearest": Contestant("8bit, to nearest", to_nearest),
    "plain": Contestant("plain bfloat16 weights", plain),
    "flashoptim": Contestant("flashoptim", flashoptim),
    "muon": Contestant("Muon, exact", muon("exact")),
    "muon8": Contestant("Muon, 8bit", muon("8bit")),
    "torchs_muon": Contestant("torch's Muon, float32 copies", TorchsMuon),
    "nudged": Contestant("exact, nudged", ours(storage="exact"), nudged=True),
}


class Run(NamedTuple):
    contestant: str
    seed: int
    beta2: float
    steps: int
    size: str

    @property
    def tuning_steps(self) -> int:
        return math.ceil(self.steps / TUNING_SHARE)


def perform(run: Run, training: Training) -> dict[str, Any]:
    began = time.perf_counter()
    contestant, model, size = CONTESTANTS[run.contestant], training.model, training.size
    model.initialize(run.seed)
    if contestant.nudged:
        model.head.weight.data[0, 0] *= 1 + 2**-7
    betas = (0.9, run.beta2)
    optimizer = contestant.make(model, run.seed, lr=0.0, betas=betas, weight_decay=WEIGHT_DECAY)
    batches = training.batches("training", run.steps, run.seed)
    ms = training.train(optimizer, batches, lambda step: warmup_and_cosine(step, run.steps, size.warmup))
    loss, before = training.validate(), float32_weights(model, optimizer)
    training.train(optimizer, training.batches("tuning", run.tuning_steps, run.seed), lambda _: TUNING_LR)
    after = float32_weights(model, optimizer)
    squares = sum(float((after[name] - before[name]).double().square().sum()) for name in before)
    return {
        **run._asdict(),
        "tuning_steps": run.tuning_steps,
        "loss": loss,
        "tuned_loss": training.validate(),
        "moved": math.sqrt(squares / sum(weight.numel() for weight in before.values())),
        "bytes": bytes_per_parameter(model, optimizer),
        "ms": ms,
        "seconds": time.perf_counter() - began,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if training.device == "cuda" else platform.machine(),
    }


def unavailable(contestant: str, device: str) -> str:
    """Why it cannot run here, or nothing."""
    if contestant == "flashoptim" and importlib.util.find_spec("flashoptim") is None:
        return "flashoptim is not installed"
    if contestant == "torchs_muon" and not hasattr(torch.optim, "Muon"):
        return "this torch has no Muon"
    return "flashoptim needs a GPU" if contestant == "flashoptim" and device == "cpu" else ""


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def perform_all(runs: Sequence[Run], size: Size, device: str, results: Path, minutes: float) -> None:
    """Those that are not in ``results``, as long as another one fits into ``minutes``."""
    began = time.perf_counter()
    done = {tuple(found[field] for field in Run._fields): found["seconds"] for found in read(results)}
    left = [run for run in runs if run not in done]
    print(f"{len(runs) - len(left)} of {len(runs)} runs are done", flush=True)
    if not left:
        return
    training = Training(size, device)
    millions = {kind: round((end - begin) / 1e6, 1) for kind, (begin, end) in training.ranges.items()}
    print(f"start-up took {time.perf_counter() - began:.0f} s; millions of bytes: {millions}", flush=True)
    longest, warm = max((done[run] for run in runs if run in done), default=0.0), set()
    while left and time.perf_counter() - began + longest < 60 * minutes:
        run = left.pop(0)
        if run.contestant not in warm and device == "cuda":
            perform(run._replace(steps=WARM_STEPS), training)  # compiles, so that no run is timed with it
            warm.add(run.contestant)
        found = perform(run, training)
        gc.collect()
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        longest = max(longest, found["seconds"])
        print("{contestant}, seed {seed}, beta2 {beta2}: {loss:.4f}, {tuned_loss:.4f}".format(**found), end="")
        print(" ({ms:.2f} ms per step, {seconds:.1f} s)".format(**found), flush=True)
    if left:
        print(f"{len(left)} runs are left: the same command goes on with them")


def spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.4f}{deviation}"


def row(contestant: str, rows: dict[tuple[str, int], dict[str, Any]], seeds: Sequence[int]) -> list[str]:
    """Of the table for one beta2. Differences are those to the exact run of the same seed."""
    own = {seed: rows[contestant, seed] for seed in seeds if (contestant, seed) in rows}
    pairs = [(found, rows["exact", seed]) for seed, found in own.items() if ("exact", seed) in rows]
    cells = [CONTESTANTS[contestant].title]
    for field in ("loss", "tuned_loss"):
        cells.append(f"{statistics.mean(found[field] for found in own.values()):.4f}")
        differences = [found[field] - exact[field] for found, exact in pairs]
        compared = differences and contestant != "exact"
        cells += [spread(differences), ", ".join(f"{x:+.4f}" for x in differences)] if compared else ["", ""]
    cells.append(f"{statistics.mean(found['moved'] / exact['moved'] for found, exact in pairs):.3f}" if pairs else "")
    for field in ("bytes", "ms"):
        cells.append(f"{statistics.mean(found[field] for found in own.values()):.2f}")
    return cells


def report(found: Sequence[dict[str, Any]]) -> str:
    """One table in Markdown for each beta2 (and size, and number of steps, if there are several)."""
    headers = ["", "loss", "minus exact", "each seed", "fine-tuned", "minus exact", "each seed", "movement kept"]
    headers += ["bytes per parameter", "ms per step"]
    tables = []
    for size, steps, beta2 in sorted({(one["size"], one["steps"], one["beta2"]) for one in found}, reverse=True):
        same = [one for one in found if (one["size"], one["steps"], one["beta2"]) == (size, steps, beta2)]
        rows = {(one["contestant"], one["seed"]): one for one in same}
        seeds = sorted({seed for _, seed in rows})
        shown = [name for name in CONTESTANTS if any(name == contestant for contestant, _ in rows)]
        cells = [headers, ["---"] + (len(headers) - 1) * ["---:"], *(row(name, rows, seeds) for name in shown)]
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        where = " and ".join(sorted({f"{one['device']}, torch {one['torch']}" for one in same}))
        tuning = f"then {same[0]['tuning_steps']} of fine-tuning"
        title = (
            f"beta2 = {beta2}: the {size} model, {steps} steps, {tuning}, seeds {', '.join(map(str, seeds))} ({where})"
        )
        tables.append(f"{title}\n\n" + "\n".join(lines))
    notes = (
        "Losses are means over the seeds, in nats per byte. Differences are to the exact run of the same seed: their "
        "mean ± standard deviation, then each. Movement kept: how far fine-tuning moved the float32 values of the "
        "weights (root mean square), relative to the exact run. A step is forward, backward and optimizer."
    )
    return "\n\n".join([*tables, notes])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("action", nargs="?", choices=("run", "report"), default="run")
    parser.add_argument("--results", type=Path, required=True, help="a file of one line for each finished run")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="of %(default)s")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--beta2", default=",".join(map(str, BETA2)))
    parser.add_argument("--steps", type=int, help="of training; fine-tuning takes a fifth of them in addition")
    parser.add_argument("--minutes", type=float, default=math.inf, help="starts no run that would take longer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument(
        "--size", choices=SIZES, help="25.7, 0.87 or 0.13 million parameters (default: full on a GPU, else middle)"
    )
    chosen = parser.parse_args(arguments)
    if chosen.action == "report":
        print(report(read(chosen.results)))
        return 0

    named = chosen.size or ("full" if chosen.device == "cuda" else "middle")
    names, size = [], SIZES[named]
    for name in chosen.only.split(","):
        if name not in CONTESTANTS:
            parser.error(f"--only: {name!r} is none of {', '.join(CONTESTANTS)}")
        if why := unavailable(name, chosen.device):
            print(f"Without {name}: {why}.")
        else:
            names.append(name)
    seeds, betas = map(int, chosen.seeds.split(",")), [float(beta2) for beta2 in chosen.beta2.split(",")]
    steps = chosen.steps or size.steps
    runs = [Run(name, seed, beta2, steps, named) for seed in seeds for beta2 in betas for name in names]
    runs.sort(key=lambda run: run.contestant == "nudged")  # last, in case time runs short
    # cuBLAS reads it when it is first used; without it torch finds its products not deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.filterwarnings("ignore", "TF32 acceleration")  # of no concern where oneDNN is switched off
    # some virtual machines announce matrix instructions (AMX) for bfloat16, but do not have them
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    perform_all(runs, size, chosen.device, chosen.results, chosen.minutes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
