"""`fusedadam bench`: every optimizer and its peers, timed on this machine.

options.py       the options, and the sets of parameters that they name
shapes_from.py   shapes of a checkpoint or a Hugging Face config
planning.py      how large the sets are on this machine
report.py        what was measured: the JSON file, and the tables in the terminal
pictures.py      charts, as a PNG and for the page
page.py          the HTML page

The measuring itself is in cli/harness, the peers are in cli/contestants.py.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fusedadam
from fusedadam.cli import charts, contestants, display, frame
from fusedadam.cli.bench import pictures, planning, report
from fusedadam.cli.bench.options import parse
from fusedadam.cli.bench.page import page
from fusedadam.cli.bench.report import Report
from fusedadam.cli.harness import shapes
from fusedadam.cli.harness.contestant import Probe
from fusedadam.cli.harness.measure import Conditions, Make, Measured, bytes_each, measure
from fusedadam.cli.harness.processes import Failed, Worker
from fusedadam.cli.harness.shapes import Shape

LONGEST_MS, QUICK_LONGEST_MS = 8.0, 4.0  # of a step of AdamW at the speed of a copy: sets are scaled down to it
POINTS, QUICK_POINTS = 6, 4


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.list:
        _list(options.device)
        return frame.FINE
    began = time.perf_counter()
    found = Report(
        machine={},
        versions={"fusedadam": fusedadam.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        command=shlex.join(["python", "-m", "fusedadam", "bench", *arguments]),
        began=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    stopped: KeyboardInterrupt | None = None
    with frame.text_on_stderr(options.json):
        try:
            run(options, found)
            found.complete = True
        except KeyboardInterrupt as interrupted:
            stopped = interrupted
        except Failed as reason:
            print(f"bench: the device cannot be measured: {reason}", file=sys.stderr)
            return frame.WRONG
        found.seconds = time.perf_counter() - began
        if found.results:
            report.show(found)
            write(found, options.output)
    if options.json:
        frame.print_json(found.as_json())
    if stopped is not None:
        raise stopped
    return frame.WRONG if found.our_failures else frame.FINE


def run(options: argparse.Namespace, found: Report) -> None:
    """Measures, and adds results to the report as they come."""
    with Worker(Probe, options.device, options.device, options.limit) as probe:
        machine: dict[str, Any] = probe.ask("look")
    conditions = Conditions(options.device, options.pace, machine.pop("free_bytes"), True, options.limit)
    found.machine = machine
    longest = QUICK_LONGEST_MS if options.quick else LONGEST_MS
    widest = max(options.dtypes, key=bytes_each)
    sets = [
        planning.sized(name, given, widest, options.scale, longest, machine, conditions)
        for name, given in options.sets.items()
    ]
    found.sets = [described for described, _ in sets]
    threads = f"{machine['threads']} threads, " if machine["device"] == "cpu" else ""
    print(f"{machine['name']}, {threads}copies {machine['copy_gb_s']:.0f} GB/s, torch {torch.__version__}")
    print("\n".join(f"  {described.described}" for described in found.sets))
    if options.scale is None and any(described.divided_by > 1 for described in found.sets):
        print("  (divided to suit this machine; --scale 1 takes the real sizes)")

    makes = _makes(options, found)
    cases = [(*sized, dtype, name) for sized in sets for dtype in options.dtypes for name in makes]
    points = QUICK_POINTS if options.quick else POINTS
    growing = {
        "elements": planning.growing_size(points, longest, machine),
        "tensors": planning.growing_count(points),
    }
    with display.progress(len(cases) + len(growing), lines=len(cases) + len(growing)) as progress:

        def timed(
            where: str, makes: Mapping[str, Make], sets: Sequence[Sequence[Shape]], dtype: str
        ) -> list[dict[str, Measured]]:
            return measure(makes, sets, dtype, conditions, lambda doing: progress.doing(f"{where}: {doing}"))

        for described, own_shapes, dtype, name in cases:
            (measured,) = timed(f"{name} on {described.name}, {dtype}", makes[name], [own_shapes], dtype)
            found.results += (results := report.results(name, described.name, dtype, measured))
            progress.done(report.line(results))
        name, dtype = options.optimizers[0], options.dtypes[0]
        left_out = {r.by for r in found.results if r.failed and r.optimizer == name and not r.is_ours}
        left_out |= {peer.name for peer in contestants.PEERS.get(name, ()) if peer.compiles}
        quick = {by: make for by, make in makes[name].items() if by not in left_out}
        for over, given in growing.items():
            curves = timed(f"{name} over {over}", quick, list(given.values()), dtype)
            found.growth += report.curves(over, name, dtype, dict(zip(given, curves, strict=True)))
            progress.done(f"how {name}'s time grows with the number of {over}")


def _makes(options: argparse.Namespace, found: Report) -> dict[str, dict[str, Make]]:
    """For each optimizer ours and its peers; --quick takes only the first peer."""
    makes: dict[str, dict[str, Make]] = {}
    for name in options.optimizers:
        peers, absent = contestants.choose(name, options.device.partition(":")[0], options.peers)
        found.absent += absent
        peers = peers[:1] if options.quick and options.peers is None else peers
        implementations = (contestants.OURS, *peers, *options.add_peer.get(name, ()))
        makes[name] = {by: functools.partial(contestants.make, name, by) for by in implementations}
    return makes


def write(found: Report, folder: Path) -> None:
    files: dict[str, Callable[[], bytes]] = {
        "bench.json": lambda: json.dumps(found.as_json(), indent=2).encode(),
        "bench.html": lambda: page(found).encode(),
    }
    if charts.possible():
        files["bench.png"] = lambda: pictures.png(found)
    else:
        print(charts.MISSING)
    for name, content in files.items():
        partial = folder / f".{name}.partial"  # renamed, so that a file is complete or not there
        partial.write_bytes(content())
        partial.replace(folder / name)
    print(f"Written to {folder}: {', '.join(files)}. It took {found.seconds:.0f} seconds.", flush=True)


def _list(device: str) -> None:
    print(f"sets of parameters: {', '.join(shapes.by_name(device))}")
    for name in contestants.optimizers():
        print(f"{name}, beside:")
        for peer in contestants.PEERS.get(name, ()):
            chosen, absent = contestants.choose(name, device.partition(":")[0], [peer.name])
            slow = " (compiles for minutes: only on request)" if peer.compiles and chosen else ""
            print(f"  {peer.name:18} {absent[0].why if absent else 'installed' if peer.package else 'available'}{slow}")
