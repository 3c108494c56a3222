"""`fusedadam demo`: trains a small transformer with these optimizers and with their peers, side by side.

plan.py          how large a model, how many optimizers and how many steps fit into the time
transformer.py   the model and its text
training.py      the optimizers, each training its own copy of the model; one of them in 8 bits, beside float32
speed.py         how long their steps take, measured alone
picture.py       losses, bytes and times as a PNG
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fusedadam
from fusedadam import AdamP
from fusedadam.catalog import CATALOG
from fusedadam.cli import charts, display, frame
from fusedadam.cli.contestants import first_peer
from fusedadam.cli.demo import picture
from fusedadam.cli.demo.picture import Pairs, Twins
from fusedadam.cli.demo.plan import SECONDS, STEPS, fitting
from fusedadam.cli.demo.speed import Speed, compare, pass_ms
from fusedadam.cli.demo.training import DEFAULT, STORED, Training, optimizers_on, train
from fusedadam.cli.demo.transformer import TinyTransformer, even_windows, random_windows, standard_library
from fusedadam.cli.display import room, say

VALIDATION_WINDOWS = 128
NOT_COMPARED = "disturbed"
ENOUGH = 20  # steps after which losses can be compared
COMMAND = f"{Path(sys.executable).name} -m fusedadam demo"


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
    name, threads = frame.device_name(device), torch.get_num_threads()
    say(f"Device: {device} on {name}, torch {torch.__version__}, {threads} threads")
    say("Compiling kernels, which is done once, and timing first steps ...")
    pairs_of_names = optimizers_on(device, options.optimizers)
    size, optimizers, steps, limit = fitting(pairs_of_names, device, options.steps)
    if torch.get_num_threads() < threads:
        say(f"Other programs are using the cores, so everything runs on 1 thread instead of {threads}.")
    compiled = time.perf_counter() - began

    torch.manual_seed(options.seed)
    model, (text, held_out_text) = TinyTransformer(size), standard_library()
    parameters = sum(p.numel() for p in model.parameters())
    say(f"Model: a transformer on bytes, {size.layers} layers, {parameters / 1e6:.1f} million parameters in float32")
    say(f"Text: {len(text) / 1e6:.1f} MB of Python's standard library, its lines shuffled")
    say(f"Each optimizer trains its own copy of the model, on the same batches (seed {options.seed}).")
    every = dict(pairs_of_names)
    if options.optimizers is None and "AdamP" not in every:
        say("AdamP is left out: its peer is the adamp package (pip install adamp).")

    generator = torch.Generator().manual_seed(options.seed)
    batches = (random_windows(text, size, generator).to(device) for _ in range(steps))
    trainings = [Training(name, by, model, device, steps) for name, by in (*optimizers, STORED)]
    print(flush=True)
    done = train(trainings, batches, steps, limit)
    trained = {training.name.split()[-1] for training in trainings}
    left_out = [optimizer for optimizer in every if optimizer not in trained]
    if left_out or (done < STEPS and options.steps is None):
        without = f" without {', '.join(left_out)}" if left_out else ""
        say(f"{done} steps{without} fitted into {SECONDS} seconds. For {STEPS} of all: {COMMAND} --steps {STEPS}")

    held_out = even_windows(held_out_text, size, VALIDATION_WINDOWS).to(device)
    results = [training.result(held_out) for training in trainings]
    adamp = next((t.optimizer for t in trainings if isinstance(t.optimizer, AdamP)), None)
    projected = {} if adamp is None else dict(Counter(adamp.projections().values()))  # of the last training step
    *compared, stored = results
    pairs, twins = list(zip(compared[1::2], compared[::2], strict=True)), (compared[1], stored)
    say("\nTiming their steps alone ...")
    peers, ours = trainings[:-1:2], trainings[1:-1:2]
    speeds = [compare(own, peer, device) for own, peer in zip(ours, peers, strict=True)]
    twin = compare(trainings[-1], ours[0], device)
    passed = pass_ms(trainings[0], random_windows(text, size, generator).to(device), device)
    report(pairs, speeds, passed, done, projected)
    report_storage(twins, twin)
    where = f"{done} steps of a transformer of {parameters / 1e6:.1f}M parameters on {name}"
    draw(pairs, [*speeds, twin], twins, passed, f"Each optimizer and its baseline: {where}", options.output)
    seconds = time.perf_counter() - began
    say(f"The demo took {seconds:.0f} seconds, {compiled:.0f} of them to compile and to time first steps.")
    return {
        "version": 5,
        "device": str(device),
        "name": name,
        "torch": torch.__version__,
        "fusedadam": fusedadam.__version__,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "steps": done,
        "left_out": left_out,
        "seed": options.seed,
        "results": [dataclasses.asdict(result) for result in results],
        "speeds": {ours.name: dataclasses.asdict(speed) for (ours, _), speed in zip(pairs, speeds, strict=True)},
        "pass_ms": passed,
        "projections": projected,
        "seconds": seconds,
    }


def draw(pairs: Pairs, speeds: Sequence[Speed], twins: Twins, passed: float | None, title: str, path: Path) -> None:
    if not charts.possible():
        say(charts.MISSING)
        return
    path.write_bytes(picture.png(pairs, speeds, twins, passed, title))
    say(f"Loss curves, time and memory saved: {path}")


def report(
    pairs: Pairs, speeds: Sequence[Speed], passed: float | None, steps: int, projected: Mapping[str, int]
) -> None:
    """``passed``: milliseconds of a forward and backward pass; ``projected``: how AdamP's last step treated tensors."""
    rows = []
    for (ours, theirs), speed in zip(pairs, speeds, strict=True):
        saved = speed.saved_percent(passed)
        gain = (
            NOT_COMPARED if speed.ratio is None else f"{speed.ratio:.2f} x",
            NOT_COMPARED if saved is None else f"{saved:.1f} %",
        )
        for result, ms, said in ((theirs, speed.peer_ms, ("reference", "")), (ours, speed.ours_ms, gain)):
            rows.append((result.name, f"{result.loss:.4f}", f"{ms:.3f}", *said))
    headers = ("optimizer", "validation loss", "optimizer step (ms)", "its speed", "training time saved")
    print(f"\n{display.table(headers, rows, room())}")
    say("Steps were timed alone, after the training, in turns with their peer's.")
    if passed is not None:
        say(f"A forward and backward pass takes {passed:.1f} ms.")
    if passed is None or any(speed.ratio is None for speed in speeds):
        say(
            f"{NOT_COMPARED}: in most turns other programs kept a step waiting for a core or for the device. The times "
            "are those of the fastest turns. For a ratio, stop these programs and run the demo again."
        )
    apart = max(abs(ours.loss - theirs.loss) for ours, theirs in pairs)
    if steps < ENOUGH:
        say(f"\n{steps} steps are too few to compare losses. Try {COMMAND} --steps 50")
    else:
        say(f"\nAfter {steps} steps, each optimizer's validation loss is within {apart + 1e-4:.4f} of its peer's.")
    if projected:
        counted = sum(count for how, count in projected.items() if how != "none")
        say(f"AdamP projected {counted} of {sum(projected.values())} tensors in its last step.")


def report_storage(twins: Twins, speed: Speed) -> None:
    wide, stored = twins
    rows = [
        (f"{result.name}, {model}", f"{result.loss:.4f}", f"{ms:.3f}", f"{result.bytes_a_parameter:.2f}")
        for result, model, ms in ((wide, "float32", speed.peer_ms), (stored, "bfloat16", speed.ours_ms))
    ]
    headers = ("optimizer, model", "validation loss", "optimizer step (ms)", "bytes a parameter")
    say('\nThe same AdamW with storage="8bit", beside float32:')
    print(display.table(headers, rows, room()))
    saved, apart = 100 * (1 - stored.bytes_a_parameter / wide.bytes_a_parameter), abs(stored.loss - wide.loss)
    slower = "" if speed.ratio is None else f" The step takes {1 / speed.ratio:.1f} times as long on this device."
    say(
        f"Weights and states take {saved:.0f} % less memory.{slower} The losses are less than {apart + 1e-4:.4f} "
        "apart; the bfloat16 model also computes in bfloat16.\n"
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.parser(
        "demo",
        "Trains a small transformer with these optimizers and with their peers, side by side.",
        {
            "": "about a minute, more if kernels are compiled first",
            "--steps 1000 --output gain.png": "longer, for a clearer picture",
            "--optimizers Muon Lion": "beside AdamW",
        },
    )
    parser.add_argument("--optimizers", nargs="+", choices=CATALOG, metavar="NAME",
                        help=f"beside AdamW: {', '.join(CATALOG)} (default: {', '.join(DEFAULT[1:])})")  # fmt: skip
    parser.add_argument("--steps", type=frame.whole(2, " (the first step only warms up)"),
                        help=f"of all optimizers (default: {STEPS}, or what fits into {SECONDS} seconds)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the model and the batches (default: 0)")
    parser.add_device()
    parser.add_argument("--output", type=_picture, default="fusedadam-demo.png", metavar="FILE",
                        help="for the picture (default: fusedadam-demo.png)")  # fmt: skip
    parser.add_json()
    options = parser.parse_args(arguments)
    options.device = options.device or frame.default_device()
    for name in options.optimizers or ():
        if first_peer(name) is None:
            peers = " or ".join(peer.package or peer.name for peer in CATALOG[name].peers)
            parser.error(
                f"argument --optimizers: {name} is shown beside a peer, and none is installed; install {peers}"
            )
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
