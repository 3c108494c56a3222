"""The order of things: look at the machine, plan, measure, tell."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fusedadam
from fusedadam.cli import contestants, display, figure, frame
from fusedadam.cli.bench import picture, planning, shapes, tables
from fusedadam.cli.bench.measuring import Case, Conditions, bytes_each, grow, measure
from fusedadam.cli.bench.options import parse
from fusedadam.cli.bench.page import page
from fusedadam.cli.bench.processes import Failed, Worker
from fusedadam.cli.bench.results import Report
from fusedadam.cli.bench.worker import Probe

LONGEST_MS, QUICK_LONGEST_MS = 8.0, 4.0  # a step of AdamW at the speed of a copy: sets are scaled down to it
POINTS, QUICK_POINTS = 6, 4


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.list:
        _list(options.device)
        return 0
    began = time.perf_counter()
    report = Report(
        machine={},
        versions={"fusedadam": fusedadam.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        command=shlex.join(["python", "-m", "fusedadam", "bench", *arguments]),
        began=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    stopped: KeyboardInterrupt | None = None
    with _saying(to_stderr=options.json):
        try:
            run(options, report)
            report.complete = True
        except KeyboardInterrupt as interrupted:
            stopped = interrupted
        except Failed as reason:
            print(f"bench: the device cannot be measured: {reason}", file=sys.stderr)
            return 1
        report.seconds = time.perf_counter() - began
        if report.results:
            tell(report, options)
    if options.json:
        frame.print_json(report.as_json())
    if stopped is not None:
        raise stopped
    return 1 if report.our_failures else 0


def run(options: argparse.Namespace, report: Report) -> None:
    """Measures, and adds to the report as it goes."""
    with Worker(Probe, options.device, options.device, options.limit) as probe:
        machine: dict[str, Any] = probe.ask("look")
    report.machine = {name: value for name, value in machine.items() if name != "free_bytes"}
    conditions = Conditions(options.device, options.pace, options.limit, machine["free_bytes"])
    longest = QUICK_LONGEST_MS if options.quick else LONGEST_MS
    widest = max(options.dtypes, key=bytes_each)
    sets = [
        planning.sized(name, found, widest, options.scale, longest, machine, conditions)
        for name, found in options.sets.items()
    ]
    report.sets = [one.described for one in sets]
    print(f"{machine['name']}, {_threads(machine)}copies {machine['copy_gb_s']:.0f} GB/s, torch {torch.__version__}")
    print("\n".join(f"  {one.described}" for one in report.sets))
    if options.scale is None and any(one.divided_by > 1 for one in report.sets):
        print("  (divided to suit this machine; --scale 1 takes the real sizes)")

    peers = _peers(options, report)
    cases = [(own, Case(name, peers[name], dtype)) for own in sets for dtype in options.dtypes for name in peers]
    growing = _growing(options, longest, machine)
    with display.counter(len(cases) + len(growing)) as counter:
        for own, case in cases:
            say = _prefixed(f"{case.optimizer} on {own.described.name}, {case.dtype}: ", counter)
            found = measure(case, own.described, own.shapes, conditions, say)
            report.results += found
            counter.done(tables.line(found))
        first = options.optimizers[0]
        failed = {r.by for r in report.results if r.failed and r.optimizer == first}
        quickly = [by for by in peers[first] if not contestants.compiles(first, by) and by not in failed]
        for over, growth in growing.items():
            say = _prefixed(f"{first} over {over}: ", counter)
            report.growth += grow(Case(first, quickly, options.dtypes[0]), over, growth, conditions, say)
            counter.done(f"how {first}'s time grows with the number of {over}")


def _peers(options: argparse.Namespace, report: Report) -> dict[str, list[str]]:
    """Who is measured beside each of ours; --quick takes the first one alone."""
    peers = {}
    for name in options.optimizers:
        added = options.add_peer.get(name, [])
        found, absent = contestants.choose(name, options.device.partition(":")[0], options.peers)
        report.absent += absent
        peers[name] = [*(found[:1] if options.quick and options.peers is None else found), *added]
    return peers


def _growing(
    options: argparse.Namespace, longest: float, machine: dict[str, Any]
) -> dict[str, dict[int, list[shapes.Shape]]]:
    if not options.growth:
        return {}
    points = QUICK_POINTS if options.quick else POINTS
    return {
        "elements": planning.growing_size(points, longest, machine),
        "tensors": planning.growing_count(points),
    }


def _prefixed(where: str, counter: display.Counter) -> Callable[[str], None]:
    return lambda doing: counter.doing(where + doing)


def tell(report: Report, options: argparse.Namespace) -> None:
    """The table, and the files."""
    tables.show(report)
    print(f"\n{tables.spread_sentence(report)}")
    for sentence in (tables.cache_sentence(report), tables.busy_sentence(report)):
        if sentence:
            print(sentence)
    files = {"bench.json": json.dumps(report.as_json(), indent=2).encode(), "bench.html": page(report).encode()}
    if figure.possible():
        files["bench.png"] = picture.png(report)
    else:
        print(figure.MISSING)
    for name, content in files.items():
        _write(options.output / name, content)
    print(f"Written to {options.output}: {', '.join(files)}. It took {report.seconds:.0f} seconds.", flush=True)


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def _threads(machine: dict[str, Any]) -> str:
    return f"{machine['threads']} threads, " if machine["device"] == "cpu" else ""


@contextlib.contextmanager
def _saying(to_stderr: bool) -> Iterator[None]:
    """With --json, standard output is for the figures alone."""
    with contextlib.redirect_stdout(sys.stderr) if to_stderr else contextlib.nullcontext():
        yield


def _list(device: str) -> None:
    print(f"sets of parameters: {', '.join(shapes.by_name(device))}")
    for name in contestants.optimizers():
        print(f"{name}, beside:")
        for peer in contestants.PEERS.get(name, ()):
            chosen, absent = contestants.choose(name, device.partition(":")[0], [peer.name])
            slow = " (compiles for minutes: only if it is named)" if peer.compiles and chosen else ""
            print(f"  {peer.name:18} {absent[0].why if absent else 'installed' if peer.package else 'there'}{slow}")
