"""What a backend is to the engine: the protocol that ``fusedadam.backends`` implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Roles
from fusedadam.rules import orthogonal, sums
from fusedadam.rules.positions import Position
from fusedadam.rules.scalar_program import ScalarProgram
from fusedadam.rules.stages import Sum
from fusedadam.tensors.matrices import Matrices

Action: TypeAlias = Callable[[], None]
RunStage: TypeAlias = Callable[[Sequence[Roles]], None]


class SharedTerm(NamedTuple):
    """One parameter's term of a sum over several: the table and column that hold it, and that receive the sum."""

    table: LaunchTable
    column: int
    term: str


SumAcross: TypeAlias = Callable[[Sum, Sequence[Sequence[SharedTerm]]], Action]


Kinds: TypeAlias = tuple[tuple[int, ...], ...]


class ScalarLaunch(NamedTuple):
    """Scalars that the device computes for some members of a table; see ``device_scalars.py`` for the tensors."""

    table: LaunchTable
    program: ScalarProgram
    kinds: Kinds  # of each of the program's arguments: what it is in one group or another
    counts: Tensor | None  # None: the host counts, and hands the number of the step to every launch
    members: Tensor
    options: Tensor
    passed: Sequence[tuple[str, int]] = ()  # hyper-parameter, group: numbers that are arguments of the kernel itself


class EvaluateScalars(Protocol):
    """Writes the scalars of the next step into the table. ``step``: its number, where the host counts."""

    def __call__(self, step: int, /) -> None: ...

    def set_passed(self, numbers: Sequence[float], /) -> None:
        """The numbers that are arguments of the kernel, in the order of ``ScalarLaunch.passed``."""


class ScalarKernels(NamedTuple):
    """``evaluate`` returns a function that writes the scalars of the next step into the table. ``count_steps`` returns
    a function that counts the step, unless the table's ``found_inf`` is set: its arguments are the table, the step
    counts and the positions of the members' counts."""

    evaluate: Callable[[ScalarLaunch], EvaluateScalars]
    count_steps: Callable[[LaunchTable, Tensor, Tensor], Action]


class Joined(Protocol):
    """Runs several stages as one. ``step``: its number, for scalars, where the host counts; the others: what a
    GradScaler hands to the step."""

    def __call__(self, step: int, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None: ...


def prepare_orthogonalize(table: LaunchTable, stack: Tensor, _scratch: Tensor) -> RunStage:
    """By torch's own products of matrices. In a step that is skipped, a CPU leaves them out; a device computes them,
    and the next stage writes nothing."""

    def run(_: object) -> None:
        if table.found_inf is None or table.home.type != "cpu" or table.found_inf.item() == 0:
            orthogonal.orthogonalize(stack, table.newton_schulz)

    return run


class Backend(NamedTuple):
    """What runs a rule over a table.

    ``prepare`` compiles everything a table needs and returns, for each position, the function that runs the stage
    there. ``sum_across`` returns a function that adds up a sum over several parameters, each list of terms by itself.
    ``scalars``: kernels for scalars on the device; a backend whose tables are on the host needs none. ``join`` makes
    one function of several that the others returned, or returns None; its second argument says whether gradients are
    scaled. ``prepare_orthogonalize`` returns the function that replaces a table's stack of matrices, (matrices, rows,
    columns); it may use the bytes of another tensor for it. ``scratch``: how many of them one matrix needs at least,
    and None if torch allocates what it needs.
    """

    prepare: Callable[[LaunchTable], Mapping[Position, RunStage]]
    sum_across: SumAcross
    needs_tensors: bool  # it runs torch's own operations, not on addresses; values by row and tensor are on the host
    scalars: ScalarKernels | None = None
    join: Callable[[Sequence[Callable[..., None]], bool], Joined | None] | None = None
    prepare_orthogonalize: Callable[[LaunchTable, Tensor, Tensor], RunStage] = prepare_orthogonalize
    scratch: Callable[[Matrices, torch.dtype, torch.device], int | None] = lambda *_: None


def addresses(summation: Sum, term_lists: Sequence[Sequence[SharedTerm]]) -> tuple[Int64s, Int64s, Int64s]:
    """Where the terms of a sum are and where it goes, term by term, and where each list begins."""
    every = [term for terms in term_lists for term in terms]
    sources = np.array([term.table.entry(term.term, term.column) for term in every], dtype=np.int64)
    results = np.array([term.table.entry(summation.name, term.column) for term in every], dtype=np.int64)
    return sources, results, np.cumsum([0, *map(len, term_lists)], dtype=np.int64)


def sum_across_devices(summation: Sum, term_lists: Sequence[Sequence[SharedTerm]]) -> Action:
    """A ``sum_across`` in plain torch, for terms that may be on several devices."""

    def run() -> None:
        for terms in term_lists:
            home = terms[0].table.home
            values = torch.stack([term.table.value(term.term)[term.column].to(home) for term in terms])
            result = sums.combine(values, summation.largest)
            for term in terms:
                term.table.value(summation.name)[term.column] = result

    return run
