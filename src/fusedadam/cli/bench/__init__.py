"""`fusedadam bench`: every optimizer and its peers, timed on this machine.

options.py       the options, and the sets of parameters that they name
shapes_from.py   shapes of a checkpoint or a Hugging Face config
report.py        what was measured: the JSON file, and the tables in the terminal
page.py          the chart, as a PNG, and the HTML page that contains it

The measuring itself is in cli/harness, the peers are in cli/contestants.py.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fusedadam
from fusedadam.cli import charts, contestants, display, frame
from fusedadam.cli.bench import report
from fusedadam.cli.bench.options import QUICK_SECONDS, parse
from fusedadam.cli.bench.page import page, png
from fusedadam.cli.bench.report import Report, Set
from fusedadam.cli.display import say
from fusedadam.cli.harness.contestant import Make
from fusedadam.cli.harness.measure import LONGEST, Conditions, measure, room
from fusedadam.cli.harness.shapes import Shape, parameters, shrunk
from fusedadam.cli.harness.timing import Timer, large_copy

LONGEST_MS, QUICK_LONGEST_MS = 8.0, 4.0  # of a step of AdamW at the speed of a copy: sets are scaled down to it
BYTES_EACH = 28  # that AdamW moves in float32, to guess times
TURNS, QUICK_TURNS = LONGEST, 2.0  # seconds after which no further turn of an optimizer and its peers begins
LAST_BEGIN = 0.75  # of the time of --quick: an optimizer that begins later would end too late
DIVISORS = (1, 2, 4, 8, 16, 32)
FEWEST_AT_ONCE = 2


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    began = time.perf_counter()
    try:
        machine = look(options.device)
    except RuntimeError as error:
        print(f"bench: the device cannot be measured: {error}", file=sys.stderr)
        return frame.WRONG
    found = Report(
        machine=machine,
        versions={"fusedadam": fusedadam.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        command=shlex.join(["python", "-m", "fusedadam", "bench", *arguments]),
        began=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    try:
        with frame.text_on_stderr(options.json):
            run(options, found)
        found.complete = True
    finally:  # after Ctrl-C, with what there is
        found.seconds = time.perf_counter() - began
        with frame.text_on_stderr(options.json):
            if found.results:
                report.show(found)
                write(found, options.output)
        if options.json:
            frame.print_json(found.as_json())
    return frame.WRONG if found.our_failures else frame.FINE


def run(options: argparse.Namespace, found: Report) -> None:
    """Measures, and adds results to the report as they come."""
    machine, began = found.machine, time.perf_counter()
    turns = QUICK_TURNS if options.quick else TURNS
    conditions = Conditions(options.device, options.pace, free_bytes(options.device), True, options.limit, turns)
    longest = QUICK_LONGEST_MS if options.quick else LONGEST_MS
    widest = max(options.dtypes, key=lambda dtype: getattr(torch, dtype).itemsize)
    speed = machine["copy_gb_s"]
    sets = [sized(n, shapes, widest, options.scale, longest, speed, conditions) for n, shapes in options.sets.items()]
    found.sets = [described for described, _ in sets]
    threads = f"{machine['threads']} threads, " if machine["device"] == "cpu" else ""
    say(f"{machine['name']}, {threads}copies {machine['copy_gb_s']:.0f} GB/s, torch {torch.__version__}")
    say("\n".join(f"  {described.described}" for described in found.sets), "  ")
    if options.scale is None and any(described.divided_by > 1 for described in found.sets):
        say("  (divided to suit this machine; --scale 1 takes the real sizes)", "  ")

    makes = _makes(options, found)
    cases = [(*sized, dtype, name) for sized in sets for dtype in options.dtypes for name in options.optimizers]
    with display.progress(len(cases), lines=len(cases)) as progress:
        for k, (described, shapes, dtype, name) in enumerate(cases):
            if options.quick and k and time.perf_counter() - began > LAST_BEGIN * QUICK_SECONDS:
                found.left_out = [f"{left} on {own.name} in {kind}" for own, _, kind, left in cases[k:]]
                break
            progress.begin(f"starting, compiling and measuring {name} on {described.name}, {dtype}")
            contesting = makes[name, dtype]
            beside = contestants.beside(name, contesting)
            measured = measure(contesting, shapes, dtype, conditions, beside)
            results = report.results(name, described, dtype, measured)
            found.results += results
            progress.done(report.line(results))


def look(device: str) -> dict[str, Any]:
    copy, copied = large_copy(device)
    timer = Timer(copy, device, 0.1)
    return {
        "device": device,
        "name": frame.device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
        "copy_gb_s": copied / min(timer.turn().ms for _ in range(3)) / 1e6,
    }


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # which look() has filled
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text()) if sys.platform == "linux" else None
    return 4 * 2**30 if found is None else 1024 * int(found[1])


def sized(
    name: str, shapes: Sequence[Shape], dtype: str, wanted: int | None, longest_ms: float, copy_gb_s: float,
    conditions: Conditions,
) -> tuple[Set, list[Shape]]:  # fmt: skip
    """Scales a set down by ``wanted``, or until it fits into memory and, at a copy's speed, into ``longest_ms``."""
    for divisor in DIVISORS if wanted is None else (wanted,):
        smaller = shrunk(shapes, divisor) if divisor > 1 else list(shapes)
        count = parameters(smaller)
        ideal_ms = BYTES_EACH * count / copy_gb_s / 1e6
        if room(count, dtype, conditions) >= FEWEST_AT_ONCE and ideal_ms <= longest_ms:
            break
    return Set(name, len(smaller), count, divisor), smaller


def _makes(options: argparse.Namespace, found: Report) -> dict[tuple[str, str], dict[str, Make]]:
    """For each optimizer and dtype ours, with presets of ``storage=``, and its peers; --quick takes one of each."""
    makes: dict[tuple[str, str], dict[str, Make]] = {}
    for name in options.optimizers:
        device = options.device.partition(":")[0]
        peers, absent = contestants.choose(name, device, options.peers)
        found.absent += absent
        peers = peers[:1] if options.quick and options.peers is None else peers
        peers += [by for optimizer, by in options.add_peer if optimizer == name]
        low_memory = {peer.name for peer in contestants.peers_of(name) if peer.low_memory}
        for dtype in options.dtypes:
            presets = contestants.presets(name, dtype, options.asked or not low_memory.isdisjoint(peers), device)
            presets = [by for by in presets if by == contestants.BYTE] if options.quick else presets
            implementations = (contestants.OURS, *presets, *peers)
            makes[name, dtype] = {by: functools.partial(contestants.make, name, by) for by in implementations}
    return makes


def write(found: Report, folder: Path) -> None:
    picture = png(found) if charts.possible() else None
    files = {"bench.json": json.dumps(found.as_json(), indent=2).encode(), "bench.html": page(found, picture).encode()}
    if picture is None:
        say(charts.MISSING)
    else:
        files["bench.png"] = picture
    for name, content in files.items():
        partial = folder / f".{name}.partial"  # renamed, so that a file is complete or not there
        partial.write_bytes(content)
        partial.replace(folder / name)
    say(f"Written to {folder}: {', '.join(files)}. It took {found.seconds:.0f} seconds.")
