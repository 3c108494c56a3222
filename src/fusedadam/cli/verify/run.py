"""Runs cases in several processes: each in every place, judged, compared bit for bit, and repeated."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fusedadam.cli.children import ignore_sigint, sigint_blocked
from fusedadam.cli.optimizer_names import optimizer_class
from fusedadam.cli.verify.cases import Case, together
from fusedadam.cli.verify.judge import judge
from fusedadam.cli.verify.steps import Place, Step, difference, take

SEVERAL = 3  # threads in the first run; the second has one
EAGER = Place("cpu", "eager")  # whose bits storage formats must have everywhere


class Failure(NamedTuple):
    place: Place
    what: str


@dataclass
class Result:
    """The largest errors of one case in each place, of parameters and of states, and its failures."""

    case: Case
    errors: dict[Place, tuple[float, float]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


# the largest errors of parameters and states, in ulps, if they are judged; complaints
Judgement = tuple[tuple[float, float] | None, list[str]]


def verify(case: Case, places: Sequence[Place], seed: int) -> Result:
    result = Result(case)
    reference: tuple[Place, list[Step], Judgement] | None = None
    if case.storage is not None and case.has_same_bits:
        try:
            steps = _take(case, EAGER, seed, SEVERAL)
        except Exception as error:
            return Result(case, {}, [Failure(EAGER, f"{type(error).__name__}: {error}")])
        reference = EAGER, steps, _judged(case, steps)
    again_on = 1 if case.has_same_bits else SEVERAL
    for place in (place for place in places if _has(place.device, case.param)):
        try:
            steps, again = (_take(case, place, seed, threads) for threads in (SEVERAL, again_on))
        except Exception as error:
            result.failures.append(Failure(place, f"{type(error).__name__}: {error}"))
            continue
        complaints, judgement = [], None
        if reference is not None:
            first, theirs, judgement = reference
            if (apart := _first_difference(theirs, steps)) is not None:
                complaints.append(f"other bits than on {first}: {apart}")
                judgement = None
        errors, wrong = judgement = judgement or _judged(case, steps)  # the same bits have the same error
        if errors is not None:
            result.errors[place] = errors
        if (apart := _first_difference(steps, again)) is not None:
            complaints.append(f"other bits in a second run{', on one thread' * (again_on == 1)}: {apart}")
        result.failures += [Failure(place, what) for what in (*wrong, *complaints)]
        if reference is None and not wrong and case.has_same_bits:  # other places are compared with a correct one
            reference = place, steps, judgement
    return result


def _take(case: Case, place: Place, seed: int, threads: int) -> list[Step]:
    with _threads(threads):
        return take(case, place, seed)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _has(device: str, dtype: torch.dtype) -> bool:
    """Whether a device supports a dtype: not all of them have float64."""
    try:
        torch.ones(1, dtype=dtype, device=device).add_(1)
    except (RuntimeError, TypeError):
        return False
    return True


def _judged(case: Case, steps: Sequence[Step]) -> Judgement:
    if not case.is_judged:
        return None, []
    rule = optimizer_class(case.optimizer).rule
    param, states, complaints = [0.0], [0.0], []
    for number, step in enumerate(steps, start=1):
        if not step.members:
            if (apart := difference(steps[number - 2], step)) is not None:
                complaints.append(f"a step with infinite gradients has to be skipped, but changed {apart}")
            continue
        with _threads(1):  # the tensors are small, and threads of several processes would wait for each other
            judged = judge(rule, step.members, step.values, number)
        for (shape, layout), verdicts in zip(step.layouts, judged, strict=True):
            for verdict in verdicts:
                (param if verdict.role == "param" else states).append(verdict.ulps)
                if verdict.of_allowed > 1:
                    lies = "" if layout is Tensor.clone else f", {layout.__name__}"
                    complaints.append(
                        f"step {number}, {verdict.role} of the tensor of shape {shape}{lies} at {verdict.index}: "
                        f"expected {verdict.expected!r}, got {verdict.got!r}: "
                        f"{verdict.of_allowed:.3g} times the error that is allowed"
                    )
    return (max(param), max(states)), complaints


def _first_difference(a: Sequence[Step], b: Sequence[Step]) -> str | None:
    for number, (x, y) in enumerate(zip(a, b, strict=True), start=1):
        if (apart := difference(x, y)) is not None:
            return f"step {number}, {apart}"
    return None


def verify_all(cases: Sequence[Case], places: Sequence[Place], seed: int, jobs: int) -> Iterator[list[Result]]:
    """Yields results as they come. Nearly all of the time is spent compiling, so several processes share the work."""
    tasks = together(cases)
    if jobs == 1:
        yield from ([verify(case, places, seed)] for task in tasks for case in task)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of several processes must not spin while they wait
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(min(jobs, len(tasks)), context, initializer=ignore_sigint)
    try:
        with sigint_blocked():
            futures = {pool.submit(_verify_task, task, places, seed): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            try:
                yield future.result()
            except concurrent.futures.process.BrokenProcessPool as error:
                died = f"a process died while it, or another one, verified this: {error}"
                yield [Result(case, {}, [Failure(place, died) for place in places]) for case in futures[future]]
    except BaseException:  # mostly Ctrl-C: do not wait for compilers
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _verify_task(task: Sequence[Case], places: Sequence[Place], seed: int) -> list[Result]:
    return [verify(case, places, seed) for case in task]
