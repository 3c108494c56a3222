"""`fusedadam doctor`: which backend each device uses, and whether anything is wrong.

facts.py      what is on this machine
bus.py        how fast a device exchanges memory with the host
problems.py   known problems that follow from these facts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from fusedadam.cli import frame
from fusedadam.cli.display import fold
from fusedadam.cli.doctor.facts import NEVER_TESTED, SLOWER, Cache, Device, Facts, Threads, gather
from fusedadam.cli.doctor.problems import Problem, find
from fusedadam.contract.memory import readable


def main(arguments: Sequence[str]) -> int:
    parser = frame.parser(
        "doctor",
        "Shows which backend each device uses, and why not the others, and finds known problems. It takes no step and "
        "compiles nothing.",
        {"": "check this machine", "--json > doctor.json": "to attach to a report"},
    )
    parser.add_json()
    options = parser.parse_args(arguments)
    facts = gather()
    problems = find(facts)
    serious = any(problem.serious for problem in problems)
    if options.json:
        found = asdict(facts) | {"never_tested": NEVER_TESTED, "problems": [asdict(p) for p in problems]}
        frame.print_json({"ok": not serious, **found})
    else:
        print("\n".join(fold(line, "  ") for line in report(facts, problems)))
    return frame.WRONG if serious else frame.FINE


def report(facts: Facts, problems: Sequence[Problem]) -> Iterator[str]:
    yield f"fusedadam {facts.fusedadam} in {facts.location}"
    packages = (f"{name} {version or 'is not installed'}" for name, version in facts.versions.items())
    yield f"Python {facts.python} on {facts.system}; {', '.join(packages)}"
    for device in facts.devices:
        yield from ("", *_device(device))
    yield from ("", _threads(facts.threads))
    if facts.lockable is not None and any(device.bus is not None for device in facts.devices):
        yield f"Host memory: {readable(facts.lockable)} are left, to be page-locked by offload=True"
    yield from map(_cache, facts.caches)
    if facts.environment:
        yield f"Environment: {', '.join(f'{name}={value}' for name, value in facts.environment.items())}"
    yield f"Untested: {'; '.join(NEVER_TESTED)}."
    yield ""
    for problem in problems:
        yield f"{'PROBLEM' if problem.serious else 'Note'}: {problem.what}"
        yield f"  {problem.do}"
    serious = sum(problem.serious for problem in problems)
    if serious:
        yield f"\n{serious} problem{'s' * (serious > 1)} found."
    else:
        yield f"No problems found. `{frame.program()} verify` checks that steps compute what they should."


def _device(device: Device) -> Iterator[str]:
    yield f"{device.device}: {device.name}"
    yield f"  backend: {device.backend} ({'tested' if device.tested else 'untested'} on this device)"
    for name, reason in device.why_not.items():
        yield f"  {name}: {reason}" if reason == SLOWER else f"  not {name}: {reason}"
    if device.bus is not None:
        ways = f"{device.bus.to_device:.0f} GB/s to the device, {device.bus.from_device:.0f} from it"
        yield f"  bus: {ways}, {device.bus.both:.0f} each way at once (offload=True is bound by it)"


def _threads(threads: Threads) -> str:
    quota = "" if threads.quota is None else f" (the container may use {threads.quota:g})"
    cores = f"{threads.cores} core{'s' * (threads.cores > 1)}{quota}"
    where = "torch's OpenMP threads, in a forked process on our own pool" if threads.team else "our own pool"
    return f"Threads: {threads.torch}, for {cores}; kernels on the CPU run on {where}"


def _cache(cache: Cache) -> str:
    if cache.folder is None:
        return f"{cache.whose}'s compiled code: nowhere ({cache.error})"
    counted = "" if cache.kernels is None else f", {cache.kernels:,} kernels, {readable(cache.bytes)}"
    damaged = f"; {cache.damaged:,} damaged, compiled again when needed" if cache.damaged else ""
    return f"{cache.whose}'s compiled code: {cache.folder}{counted}{damaged}"
