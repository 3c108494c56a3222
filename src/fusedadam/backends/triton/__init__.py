"""The Triton backend: a rule compiled for this GPU, at the speed of memory, one launch a stage for all tensors.

kernel.py       the source of a stage's kernel, which is one of these:
straight.py     straight through memory
segments.py     along rows, or down columns
writer.py       what they have in common
load_store.py   the source that loads and stores a role in its format
sums.py         the kernels that finish sums
scalars.py      the source of the kernel for scalars on the device
step_counts.py  the kernel that counts a step on the device
products.py     the kernels that multiply matrices
orthogonal.py   Newton-Schulz iterations, as a queue of these
launching.py    kernels that are ready to be launched, and queues of them
direct.py       launches by CUDA's driver
ops.py          the ops, for Triton
identity.py     Triton's hash of itself, kept from process to process

Under ``TRITON_INTERPRET=1`` the same kernels run on the CPU, slowly: that is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

from fusedadam import codegen, compat
from fusedadam.backends.triton import kernel, ops, orthogonal, scalars, step_counts, sums
from fusedadam.backends.triton.launching import AmpKernel, Queue, Ready, Scalars, joined
from fusedadam.engine.backend import (
    Action,
    Backend,
    EvaluateScalars,
    ScalarKernels,
    ScalarLaunch,
    SharedTerm,
    addresses,
)
from fusedadam.engine.launch_table import HERE, PARTIAL, LaunchTable
from fusedadam.engine.member import Roles
from fusedadam.formats import FORMATS
from fusedadam.rules.positions import Position
from fusedadam.rules.stages import Stage, Sum
from fusedadam.rules.sums import LANES, UPPER_LANES
from fusedadam.tensors.layout import PER_BLOCK
from fusedadam.tensors.transfer import keep_for_graph, sent

if ops.INTERPRETED:
    compat.mend_interpreter()


class Tile(NamedTuple):
    """Elements of a chunk, elements handled at a time, and warps that handle them."""

    chunk: int
    block: int
    warps: int


class RowTile(NamedTuple):
    """Rows handled side by side, the lanes of each, how many times a program does so, and its warps.

    ``full``: each row fills its lanes, again and again. ``ahead``: a tile is loaded while another is updated.
    """

    rows: int
    lanes: int
    run: int
    warps: int = 1
    full: bool = False
    ahead: bool = False


# The best of a few dozen tried on an H200: four elements per thread. Kernels that move half the bytes do as much
# arithmetic (division and square root are correctly rounded).
WIDE, NARROW = Tile(1024, 512, 4), Tile(4096, 256, 2)
BUSY, BLOCKS = Tile(2048, 256, 2), Tile(8192, 256, 1)
# With states in host memory: a block's exponents fill a sector of 32 bytes, since the bus moves no less
BLOCKS_OVER_THE_BUS = Tile(8192, 2048, 8)
# Beside a model few programs keep the bus busy: each must have many bytes on their way, and rarely begin a chunk, whose
# first loads nothing hides
STRAIGHT_BESIDE, BUSY_BESIDE = Tile(32768, 2048, 8), Tile(32768, 4096, 8)
SHARE_BESIDE = 8  # one program for so many multiprocessors: 16 of an H200's 132 reach the bandwidth of its bus
# By the longest row that each serves. All sums stay within a warp: no shared memory, no barrier.
SHORT_ROWS = {n: RowTile(LANES // n, n, 4) for n in (16, 32, 64, 128)}
LONG_ROWS, FULL_ROWS = RowTile(1, LANES, 1), RowTile(1, LANES, 1, full=True)
ROWS_OF_ROWS = RowTile(1, LANES, 1, warps=4)  # in float64, whose division and square root take long
COLUMNS = (RowTile(1, 512, 1, warps=4), RowTile(1, 64, 1))  # wide and narrow blocks of columns, down a segment
TENSORS = 128  # of a tensor stage, or of scalars, handled at a time

Bools: TypeAlias = npt.NDArray[np.bool_]
Chunks: TypeAlias = dict[tuple[str, RowTile], tuple[Tensor, Tensor]]
# the tensor and the first element, or segment, of each chunk; what a launch gives besides its arguments; warps
Visit: TypeAlias = tuple[tuple[Tensor, Tensor], tuple[int, ...], int]


def prepare(table: LaunchTable) -> dict[Position, Callable[[Sequence[Roles]], None]]:
    chunks: Chunks = {}
    return {
        stage.position: Queue(table.device, [*_stage(table, stage, chunks), *_finish(table, stage)])
        for stage in table.specialized.stages
    }


def _stage(table: LaunchTable, stage: Stage, chunks: Chunks) -> Iterator[AmpKernel]:
    """The launches of a stage: one, unless tensors are visited in several ways."""
    if stage.is_empty:
        return
    if stage.space == "tensor":
        nothing = torch.zeros(-(-len(table) // TENSORS), dtype=torch.int64, device=table.device)
        visits: Iterable[Visit] = [((nothing, nothing), (TENSORS,), 4)]
    elif stage.by_columns:
        visits = _columns(table)
    elif stage.in_segments:
        visits = _segments(table, stage, chunks)
    else:
        visits = _straight(table, stage)
    for (tensor, first), shape, warps in visits:
        if len(tensor):
            yield _launch(table, stage, tensor, first, shape, warps)


def _segments(table: LaunchTable, stage: Stage, chunks: Chunks) -> Iterator[Visit]:
    for tile, served in _row_tiles(table, stage):
        key = (stage.space, tile)  # several stages go by the same chunks
        if key not in chunks:
            chunk_sizes = np.full(len(table), tile.rows * tile.run)
            chunks[key] = _sent(table, *table.chunks(stage, chunk_sizes, only=served))
        yield chunks[key], (tile.rows, tile.lanes, _log(tile.lanes), tile.run, tile.full, tile.ahead), tile.warps


def _row_tiles(table: LaunchTable, stage: Stage) -> Iterator[tuple[RowTile, Bools]]:
    """Each tile, and which tensors it serves."""
    if stage.space == "row":
        yield ROWS_OF_ROWS, np.ones(len(table), dtype=bool)
        return
    # sums need more instructions for each byte; of narrow formats there are few bytes on their way at any time
    ahead = bool(stage.sums) and _is_narrow(table, stage)
    left = np.ones(len(table), dtype=bool)
    for longest, row_tile in SHORT_ROWS.items():
        yield row_tile, left & (table.widths <= longest)
        left = left & (table.widths > longest)
    full = left & (table.widths % LANES == 0)
    yield LONG_ROWS, left & ~full
    yield FULL_ROWS._replace(ahead=ahead), full


def _straight(table: LaunchTable, stage: Stage) -> Iterator[Visit]:
    """Kernels of busy formats have large chunks, and small tiles where a chunk is not full. So that no program has many
    of these to go through, one after the other, what is left of each tensor is a launch of its own, in small chunks."""
    sizes, tile = table.counts(stage.space), _tile(table, stage)
    tail = (PER_BLOCK * tile.warps,) if tile in (BUSY, BLOCKS, BLOCKS_OVER_THE_BUS, BUSY_BESIDE) else ()
    if tail and ops.INTERPRETED:  # which takes as long for a small tile as for a large one
        tile, tail = Tile(2048, 1024, 1), (1024,)
    full = sizes // tile.chunk * tile.chunk if tail else sizes
    parts = [(tile, full, np.zeros_like(sizes)), (tile._replace(chunk=tile.block), sizes - full, full)]
    for part, counts, begins in parts:
        tensor, first = table.in_chunks(counts, np.full(len(counts), part.chunk))
        yield _sent(table, tensor, first + begins[tensor]), (part.chunk, part.block, *tail), part.warps


def _columns(table: LaunchTable) -> Iterator[Visit]:
    """Wide blocks of columns, and narrow ones for tensors that would fill less than half of them."""
    narrow = table.widths <= COLUMNS[0].lanes // 2
    for tile, served in zip(COLUMNS, (~narrow, narrow), strict=True):
        yield _sent(table, *table.column_chunks(tile.lanes, only=served)), (tile.lanes,), tile.warps


def _tile(table: LaunchTable, stage: Stage) -> Tile:
    kept = table.formats_of(stage)
    formats = [FORMATS[kept[role]] for role in stage.arrays] if stage.space == "element" else []
    is_stochastic = stage.space == "element" and any(FORMATS[kept[role]].is_stochastic for role in stage.writes)
    if table.beside_model:
        return BUSY_BESIDE if is_stochastic or any(fmt.by_block for fmt in formats) else STRAIGHT_BESIDE
    if any(fmt.by_block for fmt in formats):
        return BLOCKS_OVER_THE_BUS if table.over_the_bus else BLOCKS
    if is_stochastic:
        return BUSY
    return NARROW if _is_narrow(table, stage) else WIDE


def _is_narrow(table: LaunchTable, stage: Stage) -> bool:
    kept = table.formats_of(stage)
    return stage.space == "element" and all(kept[role] in ("f16", "bf16") for role in stage.arrays)


def _launch(
    table: LaunchTable, stage: Stage, tensor: Tensor, first: Tensor, shape: tuple[int, ...], warps: int
) -> AmpKernel:
    common = (table.on_device, table.on_device.view(torch.float64), len(table), tensor, first)
    amp = torch.ones(1, device=table.device), torch.zeros(1, device=table.device)
    looped = table.beside_model and not (stage.space == "tensor" or stage.in_segments or stage.by_columns)
    programs = _programs_beside(table.device) if looped else len(tensor)
    arguments = (*common, *amp, *([len(tensor)] if looped else []), *shape)

    def compiled(scaled: bool) -> Ready:
        storage, compute = table.formats_of(stage), table.compute_of(stage)
        roles, title = table.specialized.rule.roles, table.specialized.title
        text = kernel.source(title, stage, table.fields, storage, compute, scaled, ops.INTERPRETED, roles, looped)
        function = _compile(table.specialized.rule.name, text)
        return Ready(table.device, function, (min(programs, len(tensor)), 1, 1), arguments, warps)

    amp_at = {"scale": len(common), "inf": len(common) + 1}
    return AmpKernel(table, compiled(scaled=False), lambda: compiled(scaled=True), amp_at)


def _programs_beside(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // SHARE_BESIDE)


def _finish(table: LaunchTable, stage: Stage) -> list[Ready]:
    """A launch for each kind of sum: segments into rows, columns and tensors; the rows of a matrix into one value."""
    kinds: dict[tuple[str, bool], list[Sum]] = {}
    for summation in (*filter(table.needs_combining, stage.sums), *stage.matrix_sums):
        kinds.setdefault((summation.over, summation.largest), []).append(summation)
    return [_finish_alike(table, alike, *kind) for kind, alike in kinds.items()]


def _finish_alike(table: LaunchTable, alike: Sequence[Sum], over: str, largest: bool) -> Ready:
    terms = [s.term if over == "matrix" else PARTIAL + s.name for s in alike]
    results = [HERE + s.name if over == "row" else s.name for s in alike]
    fields = [(table.fields[term], table.fields[result]) for term, result in zip(terms, results, strict=True)]
    sum_fields, of = sent(np.array(fields, dtype=np.int64), table.device), alike[0].of
    in_compute_dtype = of == "element" or over == "matrix"
    dtype = tl.float32 if in_compute_dtype and table.compute == "f32" else tl.float64
    if over == "tensor":
        lanes = _lanes(int(table.segments[of].max()))
        count_field = table.fields["_segments" if of == "element" else "_row_segments"]
        numbers = table.on_device.view(torch.float64)
        arguments: tuple[Any, ...] = (table.on_device, numbers, len(table), sum_fields, count_field)
        arguments += (dtype, lanes, _log(lanes), largest)
        return Ready(table.device, sums.combine_tensors, (len(table), len(alike), 1), arguments, warps=4)
    names: Sequence[str]
    if over == "row":
        function, counts, lengths, names = sums.combine_rows, table.rows, table.pieces, ("_rows", "_pieces")
    elif over == "column":
        function, counts, lengths = sums.combine_columns, table.matrices * table.widths, table.column_segments
        names = ("_columns", "_column_segments", "_width")
    else:
        function, counts, lengths, names = sums.sum_by_matrix, table.matrices, table.heights, ("_all_rows", "_height")
    lanes = _lanes(int(lengths.max()))
    per_program = UPPER_LANES // lanes
    tensor, first = _sent(table, *table.in_chunks(counts, np.full(len(table), per_program)))
    arguments = (table.on_device, len(table), sum_fields, tensor, first, *(table.fields[name] for name in names))
    arguments += (dtype, per_program, lanes, _log(lanes), largest)
    return Ready(table.device, function, (len(tensor), len(alike), 1), arguments, warps=4)


def sum_across(summation: Sum, term_lists: Sequence[Sequence[SharedTerm]]) -> Action:
    """Adds up ``summation`` over each list of terms, and stores the result for each of them."""
    device = term_lists[0][0].table.device
    terms, results, begins = (sent(array, device) for array in addresses(summation, term_lists))
    lanes = _lanes(max(map(len, term_lists)))
    arguments = (terms, results, begins, lanes, _log(lanes), summation.largest)
    return Queue(device, [Ready(device, sums.across, (len(term_lists), 1, 1), arguments, 4)])


def evaluate_scalars(launch: ScalarLaunch) -> EvaluateScalars:
    table, is_hosted = launch.table, launch.counts is None
    count = launch.members.shape[1]
    arguments = (
        table.on_device, table.on_device.view(torch.float64), len(table), 0 if is_hosted else launch.counts,
        launch.members, count, launch.options, launch.options.view(torch.float64), *(0 for _ in launch.passed), TENSORS,
    )  # fmt: skip
    function = _compile(f"{table.specialized.rule.name}_scalars", scalars.source(launch))
    ready = Ready(table.device, function, (-(-count // TENSORS), 1, 1), arguments, warps=4)
    return Scalars(table.device, ready, 3 if is_hosted else None, range(8, 8 + len(launch.passed)))


def count_steps(table: LaunchTable, counts: Tensor, places: Tensor) -> Action:
    no_inf = keep_for_graph(torch.zeros(1, device=table.device))
    arguments = (counts, places, len(places), no_inf, TENSORS)
    ready = Ready(table.device, step_counts.count_step, (-(-len(places) // TENSORS), 1, 1), arguments, warps=4)
    return Queue(table.device, [AmpKernel(table, ready, lambda: ready, {"inf": 3})])


def _sent(table: LaunchTable, *arrays: Any) -> tuple[Tensor, Tensor]:
    first, second = (sent(np.ascontiguousarray(a, dtype=np.int64), table.device) for a in arrays)
    return first, second


def _lanes(count: int) -> int:
    """As few as hold all terms, if there are fewer than the definition's; at least one."""
    return int(min(UPPER_LANES, 1 << max(0, count - 1).bit_length()))


def _log(lanes: int) -> int:
    return lanes.bit_length() - 1


@functools.cache
def _compile(title: str, text: str) -> Any:
    return codegen.load(f"triton_{title}", text, made_for="").run


BACKEND = Backend(
    prepare, sum_across, needs_tensors=False, scalars=ScalarKernels(evaluate_scalars, count_steps), join=joined,
    prepare_orthogonalize=orthogonal.prepare_orthogonalize, scratch=orthogonal.scratch,
)  # fmt: skip
