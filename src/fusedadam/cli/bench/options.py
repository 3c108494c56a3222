"""The options of `bench`. Everything that could fail after minutes of measuring is checked here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fusedadam.catalog import CATALOG
from fusedadam.cli import contestants, frame, optimizer_names
from fusedadam.cli.bench.shapes_from import Unreadable, shapes_from
from fusedadam.cli.harness import shapes
from fusedadam.cli.harness.shapes import Shape
from fusedadam.cli.harness.timing import Pace

DTYPES = ("float32", "bfloat16", "float16", "float64")
MEASURED_BY_DEFAULT = [name for name, entry in CATALOG.items() if entry.core]  # all would take three times as long
FULL, QUICK = Pace(turns=7, seconds=0.06), Pace(turns=3, seconds=0.03)
QUICK_SECONDS = 20
DESCRIPTION = (
    "Measures how fast a step is on this machine, ours and its peers'. Each runs in its own process, and they take "
    "turns. Turns that other programs disturb do not count, and where most are, there is no ratio: stop other programs "
    "first. Models are scaled down to what a CPU can do in about two minutes. On a GPU expect half a minute for each "
    "optimizer, set and dtype."
)
EXAMPLES = {
    "--quick": f"as many optimizers as fit into about {QUICK_SECONDS} seconds",
    "--shapes llama --dtypes float32 bfloat16": "the shapes of a 7B Llama",
    "--optimizers AdamW AdamP --dtypes bfloat16": "with storage=: bytes against time",
    "--from model.safetensors --optimizers AdamW AdamP": "the shapes of your model",
    "--from config.json --scale 1": "a Hugging Face config, in its real size",
    "--optimizers mypackage.optim:MyAdam AdamW": "your own FusedOptimizer, and one of ours",
    "--add-peer AdamW=mypackage.optim:MyAdamW": "beside an optimizer of your own",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.parser("bench", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--optimizers", nargs="+", action="extend", type=optimizer_names.parse, metavar="NAME",
        help=f"{', '.join(CATALOG)}, all (default: {', '.join(MEASURED_BY_DEFAULT)}; storage= with AdamW, and "
        f"with those named here). {optimizer_names.HINT}")  # fmt: skip
    add("--peers", nargs="+", choices=[*contestants.PEER_NAMES, "all", "none"], metavar="NAME",
        help=f"{', '.join(contestants.PEER_NAMES)}, all, none (default: all that are quickly ready)")  # fmt: skip
    add("--add-peer", action="append", default=[], type=_added, metavar="OPTIMIZER=MODULE:NAME",
        help="an optimizer of your own, called as NAME(params, lr=..., ...)")  # fmt: skip
    add("--shapes", nargs="+", choices=list(shapes.by_name("cpu")), metavar="SET",
        help="gpt, llama, many-small (default: gpt and many-small on a CPU, else all)")  # fmt: skip
    add("--from", nargs="+", default=[], type=_file, dest="files", metavar="FILE",
        help="shapes of a checkpoint (.pt, .safetensors) or of a Hugging Face config.json")  # fmt: skip
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32"], metavar="DTYPE",
        help=f"{', '.join(DTYPES)} (default: float32)")  # fmt: skip
    add("--quick", action="store_true",
        help=f"one set, one peer each, fewer turns, and only what fits into {QUICK_SECONDS} seconds, or one optimizer: "
        "the first run also compiles")  # fmt: skip
    add("--scale", type=frame.whole(1), metavar="N",
        help="divide widths by N; 1 means real sizes (default: what suits this machine)")  # fmt: skip
    add("--turns", type=frame.whole(1), metavar="N", help=f"default: {FULL.turns}, with --quick {QUICK.turns}")
    add("--limit", type=frame.whole(1), default=60, metavar="SECONDS",
        help="how long a process may take to answer (default: 60)")  # fmt: skip
    parser.add_device()
    add("--output", type=_folder, default="fusedadam-bench", metavar="FOLDER",
        help="for bench.json, bench.html and bench.png (default: fusedadam-bench)")  # fmt: skip
    parser.add_json()
    options = parser.parse_args(arguments)
    asked = options.optimizers or MEASURED_BY_DEFAULT
    options.asked = options.optimizers is not None and "all" not in asked
    options.optimizers = optimizer_names.chosen(asked)
    options.device = str(options.device or frame.default_device())
    pace = QUICK if options.quick else FULL
    options.pace = Pace(options.turns or pace.turns, pace.seconds)
    sets = shapes.by_name(options.device)
    if options.shapes is None:
        few = ["gpt"] if options.quick else ["gpt", "many-small"]
        options.shapes = [] if options.files else few if options.quick or options.device == "cpu" else list(sets)
    options.sets = {name: sets[name]() for name in options.shapes}
    for path, own in options.files:
        options.sets[str(path) if path.name in options.sets else path.name] = own
    return options


def _added(text: str) -> tuple[str, str]:
    optimizer, _, where = text.partition("=")
    module, _, name = where.partition(":")
    if (optimizer not in CATALOG and ":" not in optimizer) or not module or not name:
        must = "must be OPTIMIZER=MODULE:NAME, as AdamW=mypackage.optim:MyAdamW"
        raise argparse.ArgumentTypeError(f"{text!r} {must}")
    return optimizer_names.parse(optimizer), where


def _file(text: str) -> tuple[Path, Sequence[Shape]]:
    try:
        return Path(text), shapes_from(Path(text))
    except Unreadable as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None


def _folder(text: str) -> Path:
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be made: {error.strerror}") from None
    if not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return Path(text)
