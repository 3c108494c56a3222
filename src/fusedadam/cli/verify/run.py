"""Runs cases in several processes: each in every place, judged, compared bit for bit, and repeated."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fusedadam.cli.children import born_deaf, stay_deaf
from fusedadam.cli.verify.cases import OPTIMIZERS, Case, together
from fusedadam.cli.verify.judge import judge
from fusedadam.cli.verify.steps import LAYOUTS, Place, Step, difference, take

SEVERAL = 3  # threads in the first run; the second has one


@dataclass(frozen=True)
class Failure:
    case: str
    place: Place
    what: str


@dataclass
class Result:
    """The largest errors of one case in each place, of parameters and of states, and its failures."""

    case: Case
    errors: dict[Place, tuple[float, float]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class Judgement:
    param: float  # the largest errors, in ulps
    states: float
    complaints: list[str]


def verify(case: Case, places: Sequence[Place], seed: int) -> Result:
    result = Result(case)
    reference: tuple[Place, list[Step], Judgement] | None = None
    for place in (place for place in places if _has(place.device, case.param)):
        try:
            with _threads(SEVERAL):
                steps = take(case, place, seed)
            with _threads(1):
                again = take(case, place, seed)
        except Exception as error:
            result.failures.append(Failure(case.title, place, f"{type(error).__name__}: {error}"))
            continue
        complaints = []
        judgement = None
        if reference is not None:
            first, theirs, judgement = reference
            if (apart := _first_difference(theirs, steps)) is not None:
                complaints.append(f"other bits than on {first}: {apart}")
                judgement = None
        judgement = judgement or _judged(case, steps)  # the same bits have the same error
        if (apart := _first_difference(steps, again)) is not None:
            complaints.append(f"other bits in a second run, on one thread: {apart}")
        result.errors[place] = judgement.param, judgement.states
        result.failures += [Failure(case.title, place, what) for what in (*judgement.complaints, *complaints)]
        if reference is None and not judgement.complaints:  # other places are compared with a correct one
            reference = place, steps, judgement
    return result


@functools.cache
def _has(device: str, dtype: torch.dtype) -> bool:
    """Whether a device supports a dtype: not all of them have float64."""
    try:
        torch.ones(1, dtype=dtype, device=device).add_(1)
    except (RuntimeError, TypeError):
        return False
    return True


def _judged(case: Case, steps: Sequence[Step]) -> Judgement:
    rule = OPTIMIZERS[case.optimizer].rule
    param = states = 0.0
    complaints = []
    for number, step in enumerate(steps, start=1):
        if not step.members:
            if (apart := difference(steps[number - 2].after, step.after)) is not None:
                complaints.append(f"a step with infinite gradients has to be skipped, but changed {apart}")
            continue
        verdicts = zip(LAYOUTS, judge(rule, step.members, step.after, number), strict=True)
        for (shape, layout), verdict in ((which, one) for which, own in verdicts for one in own):
            if verdict.role == "param":
                param = max(param, verdict.ulps)
            else:
                states = max(states, verdict.ulps)
            if verdict.of_allowed > 1:
                lies = "" if layout is LAYOUTS[0][1] else f", {layout.__name__}"
                complaints.append(
                    f"step {number}, {verdict.role} of the tensor of shape {shape}{lies} at {verdict.index}: "
                    f"expected {verdict.expected!r}, got {verdict.got!r}: "
                    f"{verdict.of_allowed:.3g} times the error that is allowed"
                )
    return Judgement(param, states, complaints)


def _first_difference(a: Sequence[Step], b: Sequence[Step]) -> str | None:
    for number, (x, y) in enumerate(zip(a, b, strict=True), start=1):
        if (apart := difference(x.after, y.after)) is not None:
            return f"step {number}, {apart}"
    return None


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def verify_all(cases: Sequence[Case], places: Sequence[Place], seed: int, jobs: int) -> Iterator[list[Result]]:
    """Yields results as they come. Nearly all of the time is spent compiling, so several processes share the work."""
    tasks = together(cases)
    if jobs == 1:
        yield from ([verify(case, places, seed)] for task in tasks for case in task)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of several processes must not spin while they wait
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=stay_deaf)
    try:
        with born_deaf():
            futures = {pool.submit(_verify_task, task, places, seed): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            try:
                yield future.result()
            except concurrent.futures.process.BrokenProcessPool as error:
                died = f"a process died while it, or another one, verified this: {error}"
                failures = [[Failure(case.title, p, died) for p in places] for case in futures[future]]
                yield [Result(case, {}, own) for case, own in zip(futures[future], failures, strict=True)]
    except BaseException:  # mostly Ctrl-C: do not wait for compilers
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _verify_task(task: Sequence[Case], places: Sequence[Place], seed: int) -> list[Result]:
    return [verify(case, places, seed) for case in task]
