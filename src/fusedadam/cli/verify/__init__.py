"""`fusedadam verify`: checks on this machine that every optimizer computes what it should.

cases.py    which options, dtypes and storage formats: all from the class, for ours and for package.module:Class alike
steps.py    steps as in a training, on tensors of awkward sizes and layouts
judge.py    the rule in float64, and how large the error of a step may be, which follows from the rule
bounded.py  the numbers that it computes with
run.py      every case in every place (device and backend), compared bit for bit and repeated

Storage formats round stochastically: there the eager backend on the CPU is the reference, and all bits must be its.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import fusedadam
from fusedadam import backends
from fusedadam.catalog import CATALOG
from fusedadam.cli import display, frame, optimizer_names
from fusedadam.cli.display import room, say
from fusedadam.cli.verify.cases import Case, cases_of
from fusedadam.cli.verify.run import Result, verify_all
from fusedadam.cli.verify.steps import LAYOUTS, STEPS, Place, layouts_of
from fusedadam.contract.storage import PRESETS
from fusedadam.machine import cores

MOST_JOBS = 4  # more gain little, and each takes memory on a GPU
CASES_SHOWN, EACH_SHOWN = 4, 2  # of failures; --json has all
LEGEND = """bf16/f32: parameters in bfloat16, states in float32; f32/bf16: the other way round; else both in one dtype.
exact: storage="exact" with parameters in bfloat16, in ulps of float32.
An ulp is the distance to the next number; 0.5 is perfect rounding. float64 is judged by float64: 0 is the same bits."""


def main(arguments: Sequence[str]) -> int:
    began = time.perf_counter()
    options = _options(arguments)
    places = list(_places(options))
    names = optimizer_names.chosen(options.optimizers or [optimizer_names.ALL])
    cases = [case for name in names for case in cases_of(name, options.all)]
    if not options.json:
        say(f"Verifying {', '.join(names)} on {', '.join(map(str, places))}:")
        say(f"{len(cases)} cases, each of {STEPS} steps with {len(LAYOUTS)} tensors, against the rule in float64.")
        for name, shapes in _left_out(cases).items():
            say(f"{name} takes no parameters of shape {', '.join(map(str, shapes))}: they are left out.")
        say("")
    results: list[Result] = []
    with display.progress(len(cases), "cases", lines=0 if options.json else 10, measuring=False) as progress:
        progress.begin("compiling the kernels of the first cases")
        for some in verify_all(cases, places, options.seed, options.jobs):
            results += some
            progress.done(more=len(some))
    seconds = time.perf_counter() - began
    if options.json:
        frame.print_json(_as_json(results, places, options.seed, seconds))
    else:
        _report(results, places, seconds)
    return frame.WRONG if any(result.failures for result in results) else frame.FINE


def _left_out(cases: Sequence[Case]) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that some case of an optimizer refuses."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for case in cases:
        taken = layouts_of(case)
        found.setdefault(case.optimizer, []).extend(shape for shape, own in LAYOUTS if (shape, own) not in taken)
    return {name: list(dict.fromkeys(shapes)) for name, shapes in found.items() if shapes}


def _report(results: Sequence[Result], places: Sequence[Place], seconds: float) -> None:
    # in our order, and then those of others
    names = (*CATALOG, *sorted({result.case.optimizer for result in results}))
    rows: dict[tuple[str, Place], dict[str, float]] = {(name, place): {} for name in names for place in places}
    for result in results:
        for place, (param, _) in result.errors.items():
            row = rows[result.case.optimizer, place]
            row[result.case.mix] = max(param, row.get(result.case.mix, 0.0))
    found = {mix for row in rows.values() for mix in row}
    mixes = [mix for mix in ("f32", "bf16", "f16", "f64", "bf16/f32", "f32/bf16", "exact") if mix in found]
    if mixes:
        say("\nThe largest error of a parameter in a step, in ulps (units in the last place) of its dtype:")
        cells = [
            (f"{name}, {place}", *(f"{row[mix]:.2f}" if mix in row else "-" for mix in mixes))
            for (name, place), row in rows.items()
            if row
        ]
        print(display.table(("optimizer, device, backend", *mixes), cells, room()))
        say(LEGEND)
    wrong = [result for result in results if result.failures]
    for paragraph in _complaint(wrong, places) if wrong else _praise(results, places):
        say(paragraph, "  " if wrong else "")
    say(f"It took {seconds:.0f} seconds.")


def _praise(results: Sequence[Result], places: Sequence[Place]) -> Iterator[str]:
    yield f"\nAll {len(results)} cases are right: errors are within what rounding may add up to in the rule."
    compared = [result for result in results if result.case.has_same_bits]
    if others := dict.fromkeys(result.case.optimizer for result in results if not result.case.has_same_bits):
        yield f"{', '.join(others)}: power() or orthogonalized() may differ between backends: bits are not compared."
    if len(places) > 1 and compared:
        yield f"{', '.join(map(str, places))} gave the same bits in every step."
    stored = {result.case.storage for result in compared}
    if presets := [repr(preset) for preset in PRESETS if preset in stored]:
        yield f"With storage= {', '.join(presets)}, all bits are those of the eager backend on the CPU."
    yield "A second run, on one thread, gave the same bits."


def _complaint(failed: Sequence[Result], places: Sequence[Place]) -> Iterator[str]:
    where: dict[str, list[str]] = {}
    for result in failed:
        for failure in result.failures:
            where.setdefault(f"{result.case.title}; on {failure.place}", []).append(failure.what)
    count = sum(map(len, where.values()))
    wrong = dict.fromkeys(failure.place for result in failed for failure in result.failures)
    yield f"\nFAILED on {', '.join(map(str, wrong))}: {count} complaint{'s' * (count > 1)}."
    for title, own in [*where.items()][:CASES_SHOWN]:
        more = [f"... and {len(own) - EACH_SHOWN} more"] if len(own) > EACH_SHOWN else []
        yield "\n  ".join((f"\n{title}:", *own[:EACH_SHOWN], *more))
    if len(where) > CASES_SHOWN:
        yield f"\n... and {len(where) - CASES_SHOWN} more cases."
    yield "--json prints all complaints."
    right = [place for place in places if place not in wrong]
    yield "\nWhat to do:"
    if not right and all(":" in result.case.optimizer for result in failed):
        yield "  - Look at the rule first: every backend that was tried gives this. It may amplify rounding errors."
        return
    yield f"  - Delete the compiled code (`{frame.program()} doctor` shows where) and verify again: it may be damaged."
    if right:
        yield f"  - Until it passes, use what did: {', '.join(f'backend={p.backend!r} on {p.device}' for p in right)}."
    else:
        yield "  - Do not train with these optimizers on this machine until it passes."
    yield "  - If it fails again, report it, with what `doctor --json` and `verify --json` print."


def _as_json(results: Sequence[Result], places: Sequence[Place], seed: int, seconds: float) -> dict[str, Any]:
    def finite(x: float) -> float | str:
        return x if x < float("inf") else "infinite"

    return {
        "ok": not any(result.failures for result in results),
        "fusedadam": fusedadam.__version__,
        "torch": torch.__version__,
        "places": [place._asdict() for place in places],
        "seed": seed,
        "seconds": round(seconds, 1),
        "processor_seconds": round(sum(os.times()[:4]), 1),  # with its children's; other programs add nothing
        "cases": [
            {
                "case": r.case.title,
                "optimizer": r.case.optimizer,
                "dtypes": r.case.mix,
                "tensors": len(layouts_of(r.case)),
                "ok": not r.failures,
                "errors": [
                    {**place._asdict(), "param_ulps": finite(param), "state_ulps": finite(states)}
                    for place, (param, states) in r.errors.items()
                ],
            }
            for r in results
        ],
        "failures": [{"case": r.case.title, **f.place._asdict(), "what": f.what} for r in results for f in r.failures],
    }


def _places(options: argparse.Namespace) -> Iterator[Place]:
    given = [torch.empty(0, device=device).device for device in options.device or ()]  # "cuda" becomes "cuda:0"
    for device in given or frame.devices():
        for name in [options.backend] if options.backend else backends.NAMES:
            reason = backends.why_not(name, device)
            if reason is not None and options.backend:
                options.error(f"argument --backend: {name} is unavailable on {device}: {reason}")
            # Triton's interpreter takes minutes, so it must be requested by name
            if reason is None and (options.backend or (name, device.type) != ("triton", "cpu")):
                yield Place(str(device), name)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.parser(
        "verify",
        "Checks on this machine that every optimizer computes what it should: each of its flags, in each dtype and "
        "with each storage=, with every backend, on every device, against the update rule in float64. Backends must "
        "agree bit for bit, and so must a second run. Compiled kernels stay in the cache for your trainings.",
        {
            "": "everything, in a few minutes",
            "--optimizers AdamP --device cuda:0": "only what you will use",
            "--optimizers mypackage.optim:MyAdam": "a FusedOptimizer of your own",
        },
    )
    known = ", ".join(CATALOG)
    parser.add_argument("--optimizers", "--optimizer", nargs="+", action="extend", type=optimizer_names.parse,
        metavar="NAME", help=f"only these of {known}, all. {optimizer_names.HINT}")  # fmt: skip
    parser.add_device(action="append", help="only on this one; may be given again")
    parser.add_argument("--backend", choices=backends.NAMES, help="only this one")
    parser.add_argument("--all", action="store_true", help="every combination of flags and dtypes (takes minutes)")
    parser.add_argument("--seed", type=frame.whole(0), default=0, help="of the parameters and gradients (default: 0)")
    jobs = min(MOST_JOBS, cores())
    parser.add_argument("--jobs", type=frame.whole(1), default=jobs, help=f"processes at a time (default: {jobs})")
    parser.add_json()
    options = parser.parse_args(arguments)
    options.error = parser.error
    return options
