"""The Numba backend: a rule compiled for this CPU, at the speed of memory.

kernel.py      the source of a stage's kernel
load_store.py  the source that loads and stores a role in its format
sums.py        the source of the kernels that finish sums
ops.py         the ops, for Numba: of rules and of codecs
memory.py      loads, stores, and sums in memory on the stack
calling.py     how a kernel is compiled and called
threads.py     the threads that kernels run on
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusedadam import codegen
from fusedadam.backends.numba import kernel, sums
from fusedadam.backends.numba.threads import run_on_threads
from fusedadam.codegen import object_code
from fusedadam.engine.backend import Backend, SharedTerm, addresses
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Roles
from fusedadam.rules.positions import START, Position
from fusedadam.rules.stages import Stage, Sum
from fusedadam.tensors.layout import PER_BLOCK

CHUNK = 32768
THREADS_FROM = 65536  # elements: for fewer, waking a thread takes longer than the work
BATCHES = 16  # into which a thread's share of the chunks is divided, if all threads are equally fast


def prepare(table: LaunchTable) -> dict[Position, Callable[[Sequence[Roles]], None]]:
    visited = [stage for stage in table.specialized.stages if not stage.is_empty]
    if any(_key(table, stage, scaled=False) not in _texts for stage in visited):
        codegen.compile_missing(((f"numba_{title}", text) for title, text in _sources(table)), made_for())
    return {stage.position: _prepare_stage(table, stage) for stage in table.specialized.stages}


def _prepare_stage(table: LaunchTable, stage: Stage) -> Callable[[Sequence[Roles]], None]:
    runs = []
    if not stage.is_empty:
        runs.append(_tensor_stage(table, stage) if stage.space == "tensor" else _array_stage(table, stage))
    for source in _sums_source(table, stage):
        arguments = np.array([table.words.ctypes.data, len(table)], dtype=np.int64)
        runs.append(_call(_compile(*source), arguments, table.words))

    def run_stage(_: Sequence[Roles]) -> None:
        if table.found_inf is None or table.found_inf.item() == 0:
            for run in runs:
                run()

    return run_stage


def _array_stage(table: LaunchTable, stage: Stage) -> Callable[[], None]:
    """A stage over elements or rows, divided among threads."""
    chunk_sizes = np.full_like(table.sizes, CHUNK)
    if stage.in_segments and not stage.by_columns:  # as in the kernel itself
        chunk_sizes = np.maximum(1, CHUNK // np.maximum(1, table.lengths(stage)))
    chunks = table.column_chunks(kernel.STRIP) if stage.by_columns else table.chunks(stage, chunk_sizes)
    # backwards, if this is not the first visit: what was visited last is still in the cache
    step = -1 if stage.position > START else 1
    tensor, first = (np.ascontiguousarray(a[::step], dtype=np.int64) for a in chunks)
    worth_threads = int(table.counts(stage.space).sum()) >= THREADS_FROM
    counter = np.zeros(1, dtype=np.int64)  # how many chunks the threads have taken
    arrays = {"table": table.words, "chunk_tensor": tensor, "chunk_first": first, "counter": counter}
    numbers = {"tensors": len(table), "chunks": len(tensor), "chunk_size": CHUNK, "batch": 1, "grad_scale": 0}
    numbers["per_block"] = PER_BLOCK
    values = {name: array.ctypes.data for name, array in arrays.items()} | numbers
    arguments = np.array([values[name] for name in kernel.ARGUMENTS], dtype=np.int64)
    batch_at, scale_at = kernel.ARGUMENTS.index("batch"), kernel.ARGUMENTS.index("grad_scale")
    plain = _ready(_compile(*_stage_source(table, stage, scaled=False)), arguments)
    scaled = functools.cache(lambda: _ready(_compile(*_stage_source(table, stage, scaled=True)), arguments))
    if "grad" in stage.reads:
        table.compile_scaled.append(scaled)

    # a default argument, so that arrays whose addresses the kernel has live as long as the function
    def visit_chunks(_alive: object = arrays) -> None:
        ready = plain
        if table.grad_scale is not None and "grad" in stage.reads:
            ready = scaled()
            arguments.view(np.float64)[scale_at] = table.grad_scale.item()
        threads = torch.get_num_threads() if worth_threads else 1
        arguments[batch_at] = 1 + len(tensor) // (threads * BATCHES)
        counter[0] = 0
        ready(threads)

    return visit_chunks


def _tensor_stage(table: LaunchTable, stage: Stage) -> Callable[[], None]:
    values = {"table": table.words.ctypes.data, "tensors": len(table)}
    arguments = np.array([values.get(name, 0) for name in kernel.ARGUMENTS], dtype=np.int64)
    return _call(_compile(*_stage_source(table, stage, scaled=False)), arguments, table.words)


def sum_across(summation: Sum, term_lists: Sequence[Sequence[SharedTerm]]) -> Callable[[], None]:
    """Adds up ``summation`` over each list of terms, and stores the result for each of them."""
    arrays = addresses(summation, term_lists)
    arguments = np.array([*(array.ctypes.data for array in arrays), len(term_lists)], dtype=np.int64)
    tables = [term.table.words for terms in term_lists for term in terms]
    return _call(_compile("sums_across", sums.across(summation.largest)), arguments, arrays, tables)


def _call(function: int, arguments: np.ndarray[Any, Any], *alive: object) -> Callable[[], None]:
    ready = _ready(function, arguments)

    def call_once(_alive: object = alive) -> None:
        ready(1)

    return call_once


def _ready(function: int, arguments: np.ndarray[Any, Any]) -> Callable[[int], None]:
    """Calls a kernel with these arguments on some threads, through another kernel that sets each thread's mode."""
    call = np.array([function, arguments.ctypes.data], dtype=np.int64)
    trampoline, address = _compile("with_denormals", kernel.WITH_DENORMALS), call.ctypes.data

    def call_on_threads(threads: int, _alive: object = (call, arguments)) -> None:
        run_on_threads(trampoline, address, threads)

    return call_on_threads


def _sources(table: LaunchTable) -> Iterator[tuple[str, str]]:
    """Titles and texts of all kernels but the trampoline and those for scaled gradients."""
    for stage in table.specialized.stages:
        if not stage.is_empty:
            yield _stage_source(table, stage, scaled=False)
        yield from _sums_source(table, stage)


def _key(table: LaunchTable, stage: Stage, scaled: bool) -> tuple[Any, ...]:
    """Everything that a kernel's text depends on: functional.py gets here in every call."""
    return (table.specialized, stage.position, *table.formats.values(), table.compute, *table.fields, scaled)


def _stage_source(table: LaunchTable, stage: Stage, scaled: bool) -> tuple[str, str]:
    key = _key(table, stage, scaled)
    text = _texts.get(key)
    if text is None:
        formats, compute = table.formats_of(stage), table.compute_of(stage)
        text = _texts[key] = kernel.source(
            table.specialized.title, stage, table.fields, formats, compute, scaled, table.specialized.rule.roles
        )
    return table.specialized.rule.name, text


def _sums_source(table: LaunchTable, stage: Stage) -> Iterator[tuple[str, str]]:
    """The kernel that finishes the sums of a stage, if they need one."""
    unfinished = [*filter(table.needs_combining, stage.sums), *stage.matrix_sums]
    if unfinished:
        yield f"sums_{table.specialized.rule.name}", sums.combine(unfinished, table.fields, table.formats_of(stage))


_texts: dict[tuple[Any, ...], str] = {}  # of kernels


@functools.cache
def _compile(title: str, text: str) -> int:
    return codegen.function(f"numba_{title}", text, made_for()).address


@functools.cache
def made_for() -> str:
    """What compiled code depends on besides a kernel's own source: Numba, the processor, and its vocabulary."""
    folder = Path(__file__).parent  # the files are read: to import them is to import Numba
    texts = (folder.joinpath(f"{module}.py").read_text(encoding="utf-8") for module in kernel.VOCABULARY)
    return "\n".join([object_code.made_for(), *texts])


BACKEND = Backend(prepare, sum_across, needs_tensors=False)
