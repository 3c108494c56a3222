"""`fusedadam demo`: trains a small transformer with these optimizers and with their peers, side by side.

transformer.py   the model and its text
training.py      the optimizers, each training its own copy of the model; one of them in 8 bits, beside float32
picture.py       losses, bytes and times as a PNG
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fusedadam
from fusedadam.cli import charts, display, frame
from fusedadam.cli.demo import picture
from fusedadam.cli.demo.picture import Pairs, Twins
from fusedadam.cli.demo.training import (
    OPTIMIZERS,
    OPTIONS,
    STORED,
    TWIN,
    UNMEASURED,
    Result,
    Training,
    train,
    unmeasured,
)
from fusedadam.cli.demo.transformer import Size, TinyTransformer, even_windows, random_windows, standard_library
from fusedadam.cli.folding import room, say

STEPS, SECONDS = 150, 75
ON_CPU = Size(width=192, heads=4, layers=4, context=32, batch=4)
ON_GPU = Size(width=512, heads=8, layers=8, context=128, batch=8)
VALIDATION_WINDOWS = 128
ENOUGH_STEPS = 20  # measured ones, to compare speeds


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    with frame.text_on_stderr(options.json):
        data = run(options)
    if options.json:
        frame.print_json(data)
    return frame.FINE


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, prints results, and returns them."""
    began = time.perf_counter()
    # some virtual machines announce AMX and do not have it: torch's bfloat16 products would die with SIGILL
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    device: torch.device = options.device
    size = ON_CPU if device.type == "cpu" else ON_GPU
    torch.manual_seed(options.seed)
    model, (text, held_out_text) = TinyTransformer(size), standard_library()
    parameters = sum(p.numel() for p in model.parameters())
    name = frame.device_name(device)
    say(f"Device: {device} on {name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    say(f"Model: a transformer on bytes, {size.layers} layers, {parameters / 1e6:.1f} million parameters in float32")
    say(f"Text: {len(text) / 1e6:.1f} MB of the source of Python's standard library")
    say(f"Each optimizer trains its own copy of the model, on the same batches (seed {options.seed}).")
    if len(OPTIMIZERS) < 2 * len(OPTIONS):
        say("AdamP is left out: its peer is the adamp package (pip install adamp).")

    generator = torch.Generator().manual_seed(options.seed)
    steps, seconds = (STEPS, float(SECONDS)) if options.steps is None else (options.steps, float("inf"))
    batches = (random_windows(text, size, generator).to(device) for _ in range(steps))
    trainings = [Training(name, by, model, device, steps) for name, by in (*OPTIMIZERS, STORED)]
    print(flush=True)
    done = train(trainings, batches, steps, seconds)
    if done < steps:
        say(f"Stopped after {SECONDS} seconds. --steps {steps} takes all {steps}, without a time limit.")

    held_out = even_windows(held_out_text, size, VALIDATION_WINDOWS).to(device)
    results = [training.result(held_out) for training in trainings]
    *compared, stored = results
    pairs, twins = list(zip(compared[1::2], compared[::2], strict=True)), (results[OPTIMIZERS.index(TWIN)], stored)
    doubt = speed_doubt(results, done - unmeasured(done))
    report(pairs, done, doubt)
    report_storage(twins)
    where = f"a transformer of {parameters / 1e6:.1f}M parameters on {name}"
    draw(pairs, twins, f"Ours beside their peers, {done} steps of {where}", doubt, options.output)
    seconds = time.perf_counter() - began
    say(f"The demo took {seconds:.0f} seconds.")
    return {
        "version": 3,
        "device": str(device),
        "name": name,
        "torch": torch.__version__,
        "fusedadam": fusedadam.__version__,
        "parameters": parameters,
        "steps": done,
        "seed": options.seed,
        "results": [dataclasses.asdict(result) for result in results],
        "speed_doubt": doubt,
        "seconds": seconds,
    }


def draw(pairs: Pairs, twins: Twins, title: str, doubt: str | None, path: Path) -> None:
    if not charts.possible():
        say(charts.MISSING)
        return
    path.write_bytes(picture.png(pairs, twins, title, doubt))
    say(f"Loss curves, time and memory saved: {path}")


def report(pairs: Pairs, steps: int, doubt: str | None) -> None:
    rows = []
    for ours, theirs in pairs:
        speed, saved = f"{theirs.step_ms / ours.step_ms:.2f} x", f"{ours.saved_percent(theirs):.1f} %"
        gain = ("unclear", "unclear") if doubt else (speed, saved)
        for result, said in ((theirs, ("reference", "")), (ours, gain)):
            rows.append((result.name, f"{result.loss:.4f}", f"{result.step_ms:.3f}", *said))
    headers = ("optimizer", "validation loss", "optimizer step (ms)", "its speed", "training time saved")
    print(f"\n{display.table(headers, rows, room())}")
    pass_ms = statistics.median(result.pass_ms for pair in pairs for result in pair)
    say(f"Times are medians without the first {unmeasured(steps)} of {steps} steps, in which kernels are compiled.")
    say(f"A forward and backward pass took {pass_ms:.1f} ms.\n")
    apart = max(abs(ours.loss - theirs.loss) for ours, theirs in pairs)
    say(f"After {steps} steps, each optimizer's validation loss is within {apart + 1e-4:.4f} of its peer's.")
    if doubt:
        say(doubt)


def report_storage(twins: Twins) -> None:
    wide, stored = twins
    rows = [
        (f"{result.name}, {model}", f"{result.loss:.4f}", f"{result.step_ms:.3f}", f"{result.bytes_a_parameter:.2f}")
        for result, model in ((wide, "float32"), (stored, "bfloat16"))
    ]
    headers = ("optimizer, model", "validation loss", "optimizer step (ms)", "bytes a parameter")
    say('\nThe same AdamW with storage="8bit", beside float32:')
    print(display.table(headers, rows, room()))
    saved, apart = 100 * (1 - stored.bytes_a_parameter / wide.bytes_a_parameter), abs(stored.loss - wide.loss)
    say(
        f"Weights and states take {saved:.0f} % less memory. The losses are {apart:.4f} apart; the bfloat16 model also "
        "computes in bfloat16.\n"
    )


def speed_doubt(results: Sequence[Result], measured: int) -> str | None:
    """Why speeds cannot be compared, if they cannot."""
    if measured < ENOUGH_STEPS:
        return (
            f"Speeds cannot be compared: only {measured} of the steps could be measured. It takes {ENOUGH_STEPS} "
            f"after the first {UNMEASURED}: --steps {ENOUGH_STEPS + UNMEASURED} or more."
        )
    # on a quiet machine a step takes much the same time every time
    if any(r.step_ms > 2 * r.fastest_step_ms for r in results):
        return "Speeds cannot be compared: step times varied widely, as they do when other programs use the machine."
    return None


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.parser(
        "demo",
        "Trains a small transformer with these optimizers and with their peers, side by side.",
        {"": "about a minute", "--steps 1000 --output gain.png": "longer, for a clearer picture"},
    )
    parser.add_argument("--steps", type=frame.whole(2, " (the first step only warms up)"),
                        help=f"default: {STEPS}, or as many as fit into {SECONDS} seconds")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the model and the batches (default: 0)")
    parser.add_device()
    parser.add_argument("--output", type=_picture, default="fusedadam-demo.png", metavar="FILE",
                        help="for the picture (default: fusedadam-demo.png)")  # fmt: skip
    parser.add_json()
    options = parser.parse_args(arguments)
    options.device = options.device or frame.default_device()
    return options


def _picture(text: str) -> Path:
    """A file that can be written, checked before the training."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png")
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        why = f"cannot be written ({error.strerror}); name a file in a folder that you can write to"
        raise argparse.ArgumentTypeError(f"{text} {why}") from None
    if not existed:
        path.unlink()
    return path
