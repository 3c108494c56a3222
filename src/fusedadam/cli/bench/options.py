"""The options of `bench`: whatever could fail after minutes of measuring fails here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from fusedadam.cli import arguments as types
from fusedadam.cli import contestants
from fusedadam.cli.bench import shapes
from fusedadam.cli.bench.shapes import Shape
from fusedadam.cli.bench.shapes_from import Unreadable, shapes_from
from fusedadam.cli.bench.timing import Pace

DTYPES = ("float32", "bfloat16", "float16", "float64")
FULL, QUICK = Pace(turns=7, seconds=0.06), Pace(turns=3, seconds=0.03)
DESCRIPTION = """\
How fast is a step, ours beside its peers, on this machine? Everyone runs in a process of their own, and they take
turns, so that whatever else the machine does slows all of them alike: read the ratios. Models are scaled down to what
a CPU can do in about two minutes; the output says how far. On a GPU, where sets are more and every process starts anew,
count half a minute for each optimizer, set and dtype."""
EXAMPLES = """\
examples:
  python -m fusedadam bench --quick
  python -m fusedadam bench --shapes llama --dtypes float32 bfloat16
  python -m fusedadam bench --from model.safetensors --optimizers AdamW AdamP
  python -m fusedadam bench --from config.json --scale 1   a Hugging Face config, in its real size
  python -m fusedadam bench --add-peer AdamW=mypackage.optim:MyAdamW
  python -m fusedadam bench --json > figures.json

exit codes: 0 measured (a peer may have failed, the table says so), 1 one of ours failed, 2 wrong options,
130 stopped by Ctrl-C (what was measured until then is written)."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fusedadam bench", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    known = list(contestants.optimizers())
    what = parser.add_argument_group("what is measured")
    what.add_argument("--optimizers", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    what.add_argument(
        "--peers",
        nargs="+",
        metavar="NAME",
        help="names that --list shows, all, or none (default: those that are installed and do not compile for minutes)",
    )
    what.add_argument("--add-peer", action="append", default=[], metavar="OPTIMIZER=MODULE:NAME",
                      help="an optimizer of your own, called as NAME(params, lr=..., ...)")  # fmt: skip
    what.add_argument("--shapes", nargs="+", choices=list(shapes.by_name("cpu")), metavar="SET",
                      help="gpt, llama, resnet, many-small (default: gpt, many-small on a CPU, else all)")  # fmt: skip
    what.add_argument("--from", nargs="+", default=[], type=Path, dest="files", metavar="FILE",
                      help="shapes from a checkpoint (.pt, .safetensors) or a Hugging Face config.json")  # fmt: skip
    what.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"], metavar="DTYPE",
                      help=f"{', '.join(DTYPES)} (default: float32)")  # fmt: skip
    what.add_argument("--no-growth", dest="growth", action="store_false", help="no curves over sizes and counts")
    how = parser.add_argument_group("how")
    how.add_argument("--quick", action="store_true", help="one set, one peer each, fewer turns: 20 seconds on a CPU")
    how.add_argument("--scale", type=types.whole(1), metavar="N", help="divide widths by N; 1 means real sizes "
                     "(default: as this machine needs it)")  # fmt: skip
    how.add_argument(
        "--turns", type=types.whole(1), metavar="N", help=f"default: {FULL.turns}, with --quick {QUICK.turns}"
    )
    how.add_argument("--limit", type=types.whole(1), default=60, metavar="SECONDS",
                     help="how long one of them may take to answer (default: 60)")  # fmt: skip
    how.add_argument("--device", type=types.device, help="default: cuda if there is one, else cpu")
    out = parser.add_argument_group("output")
    out.add_argument("--output", type=Path, default=Path("fusedadam-bench"), metavar="FOLDER",
                     help="for bench.json, bench.html and bench.png (default: fusedadam-bench)")  # fmt: skip
    out.add_argument(
        "--json", action="store_true", help="figures on standard output, everything else on standard error"
    )
    out.add_argument("--list", action="store_true", help="show optimizers, peers and sets, and measure nothing")
    options = parser.parse_args(arguments)
    options.device = str(options.device or types.default_device())
    if not options.list:
        _complete(parser, options)
    return options


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What one option alone cannot tell."""
    unknown = [n for n in options.peers or () if n not in (*contestants.peer_names(), "all", "none")]
    if unknown:
        parser.error(
            f"argument --peers: {unknown[0]!r} is unknown; use {', '.join(contestants.peer_names())}, all or none"
        )
    options.add_peer = _added(parser, options.add_peer)
    options.sets = _sets(parser, options)
    options.pace = QUICK if options.quick else FULL
    options.pace = options.pace if options.turns is None else Pace(options.turns, options.pace.seconds)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: {options.output} cannot be made: {error.strerror}")
    if not os.access(options.output, os.W_OK):
        parser.error(f"argument --output: {options.output} cannot be written to")


def _added(parser: argparse.ArgumentParser, given: Sequence[str]) -> dict[str, list[str]]:
    added: dict[str, list[str]] = {}
    for one in given:
        optimizer, _, where = one.partition("=")
        module, _, name = where.partition(":")
        if optimizer not in contestants.optimizers() or not module or not name:
            parser.error(
                f"argument --add-peer: {one!r} must be OPTIMIZER=MODULE:NAME, as AdamW=mypackage.optim:MyAdamW"
            )
        added.setdefault(optimizer, []).append(where)
    return added


def _sets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Sequence[Shape]]:
    known = shapes.by_name(options.device)
    names = options.shapes
    if names is None:
        few = ["gpt"] if options.quick else ["gpt", "many-small"]
        names = [] if options.files else few if options.quick or options.device == "cpu" else list(known)
    sets: dict[str, Sequence[Shape]] = {name: known[name]() for name in names}
    for path in options.files:
        try:
            sets[str(path) if path.name in sets else path.name] = shapes_from(path)
        except Unreadable as reason:
            parser.error(f"argument --from: {reason}")
    return sets
