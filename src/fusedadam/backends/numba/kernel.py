"""The Numba kernels of a rule's stages, as source text.

Straight through memory: one loop over chunks, one over elements. Where rows matter or terms are summed: row by row,
or segment by segment, with the lanes of ``fusedadam.rules.sums`` in memory on the stack, where they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.generated import indented
from fusedadam.rules.stages import Stage
from fusedadam.rules.sums import LANES, SEGMENT

# What a kernel is handed: the address of these words, one int64 (or the bits of a float64) each.
ARGUMENTS = (
    "table",
    "tensors",
    "chunk_tensor",
    "chunk_first",
    "chunks",
    "chunk_size",
    "batch",
    "counter",
    "grad_scale",
)
# Calls the kernel at an address with an argument, both of which are the words that it is handed.
WITH_DENORMALS = """
from fusedadam.backends.numba.ops import *


@kernel
def run(_words):
    call_with_denormals(word(_words, 0), word(_words, 1))
"""
BLOCK = 1024  # elements of short rows that are handled together


def source(
    title: str, stage: Stage, at: Mapping[str, int], storage: Mapping[str, str], compute: str, scaled: bool
) -> str:
    """``at``: the table's rows; ``storage``: how arrays are kept; ``scaled``: gradients are divided by grad_scale."""
    return "\n".join([*_head(title, stage, storage, compute), *_body(stage, at, scaled), ""])


def _head(title: str, stage: Stage, storage: Mapping[str, str], compute: str) -> list[str]:
    any_nan = {storage[r] for r in stage.reads} != {"bf16"}
    return [
        f"# {title}, {stage.space}s: {', '.join(f'{r} {storage[r]}' for r in stage.arrays)}, computed in {compute}",
        "from fusedadam.backends.numba.ops import *",
        "",
        f'number = NUMBER["{compute}"]',
        f'scalar = load("f64", "{compute}")',
        *([f'_new, _get, _put = scratch("{compute}", {BLOCK})'] if stage.in_segments else []),
        *(f'_load_{r} = load("{storage[r]}", "{compute}")' for r in (*stage.reads, *stage.rows)),
        *(f'_store_{r} = store("{storage[r]}", "{compute}", {any_nan})' for r in stage.writes),
        *(
            f'_stored_{r} = stored("{kept}", "{compute}", {any_nan})'
            for r, kept in storage.items()
            if f"_stored_{r}(" in stage.functions[-1]
        ),
        f'_store_part = store("{compute}", "{compute}")',
        "",
        *(f"\n@inline\n{function}\n" for function in stage.functions),
        "",
        "@kernel",
        "def run(_words):",
        *(
            f"    _{name} = {'scalar' if name == 'grad_scale' else 'word'}(_words, {k})"
            for k, name in enumerate(ARGUMENTS)
        ),
    ]


def _body(stage: Stage, at: Mapping[str, int], scaled: bool) -> list[str]:
    def entry(name: str) -> str:
        return f"(_table, {at[name]} * _tensors + _t)"

    if stage.space == "tensor":
        return [
            "    for _t in range(_tensors):",
            *(f"        {name} = scalar{entry(name)}" for name in stage.reads),
            f"        {_results(stage)} = update({', '.join(stage.reads)})",
            *(f"        _store_{name}(_table, {at[name]} * _tensors + _t, _new_{name})" for name in stage.writes),
        ]
    addresses = {name: name for name in (*stage.arrays, *(f"_part_{one.name}" for one in stage.sums))}
    addresses |= {name: f"_here_{name}" for name in stage.rows}
    width, pieces, segments = (
        ("_width", "_pieces", "_segments")
        if stage.space == "element"
        else ("_all_rows", "_row_segments", "_row_segments")
    )
    sizes = {"_size": "_size" if stage.space == "element" else "_all_rows"}
    if stage.in_segments:
        sizes = {"_width": width, "_pieces": pieces, "_segments": segments}
    return [
        "    _next = _end = 0",
        *(f"    _lanes_{one.name} = _new()" for one in stage.sums),
        *(f"    _wide_{row} = _new()" for row in stage.rows),
        "    while True:",
        "        if _next == _end:",
        "            _next = take(_counter, _batch)",
        "            _end = min(_next + _batch, _chunks)",
        "            if _next >= _chunks:",
        "                return",
        "        _t, _first = word(_chunk_tensor, _next), word(_chunk_first, _next)",
        "        _next += 1",
        *(f"        _at_{name} = word{entry(place)}" for name, place in addresses.items()),
        *(f"        {name} = scalar{entry(name)}" for name in stage.scalars),
        *(f"        {name} = word{entry(row)}" for name, row in sizes.items()),
        *indented(8, _in_segments(stage, scaled) if stage.in_segments else _straight(stage, scaled)),
    ]


def _straight(stage: Stage, scaled: bool) -> list[str]:
    return [
        "for _i in range(_first, min(_first + _chunk_size, _size)):",
        *indented(4, _visit(stage, scaled)),
    ]


def _in_segments(stage: Stage, scaled: bool) -> list[str]:
    """Rows of up to BLOCK elements: some at a time, their terms side by side. Longer ones: lane by lane."""
    segment, visit = SEGMENT[stage.space], _visit(stage, scaled)
    several_rows = [
        f"_count, _stride, _terms = min({BLOCK} // _width, _stop - _first), _width, _width",
        "_start = _first * _width",
    ]
    one_segment = [
        "_count, _stride = 1, 0",
        f"_start = _first * {segment}",
        f"_terms = min({segment}, _width - _start)",
    ]
    short = [
        *(several_rows if segment > BLOCK else one_segment),
        *(
            line
            for row in stage.rows
            for line in (
                "for _r in range(_count):",
                f"    _value = _load_{row}(_at_{row}, _first + _r)",
                "    for _j in range(_r * _width, (_r + 1) * _width):",
                f"        _put(_wide_{row}, _j, _value)",
            )
        ),
        "for _j in range(_count * _terms):",
        "    _i = _start + _j",
        *(f"    {row} = _get(_wide_{row}, _j)" for row in stage.rows),
        *indented(4, visit),
        # a lane begins at 0: minus zero must not survive here and nowhere else
        *(f"    _put(_lanes_{one.name}, _j, number(0) + _term_{one.name})" for one in stage.sums),
    ]
    long = [
        f"_count, _stride, _terms = 1, 0, {LANES}",
        "_row = _first // _pieces",
        f"_piece = (_first - _row * _pieces) * {segment}",
        "_start = _row * _width + _piece",
        f"_length = min({segment}, _width - _piece)",
        *(f"{row} = _load_{row}(_at_{row}, _row)" for row in stage.rows),
    ]
    if stage.sums:
        lane = {one: f"_get(_lanes_{one.name}, _j)" for one in stage.sums}
        added = [
            f"_put(_lanes_{one.name}, _j, "
            + (f"maximum({lane[one]}, _term_{one.name}))" if one.largest else f"{lane[one]} + _term_{one.name})")
            for one in stage.sums
        ]
        long += [
            f"for _j in range({LANES}):",
            *(f"    _put(_lanes_{one.name}, _j, number(0))" for one in stage.sums),
            f"for _column in range(0, _length, {LANES}):",
            f"    for _j in range(min({LANES}, _length - _column)):",
            "        _i = _start + _column + _j",
            *indented(8, [*visit, *added]),
        ]
    else:
        long += ["for _i in range(_start, _start + _length):", *indented(4, visit)]
    both = [f"if _width <= {BLOCK}:", *indented(4, short), "else:", *indented(4, long)]
    return [
        f"_stop = min(_first + max(1, _chunk_size // min({segment}, _width)), _segments)",
        "while _first < _stop:",
        *indented(4, both if segment > BLOCK else short),
        *indented(4, _finish(stage)),
        "    _first += _count",
    ]


def _finish(stage: Stage) -> list[str]:
    """Adds up the terms of each row or segment."""
    finished = [
        f"_store_part(_at__part_{one.name}, _first + _r, "
        f"{'find_largest' if one.largest else 'add_up'}(_lanes_{one.name}, _r * _stride, _terms, {LANES}, _get, _put))"
        for one in stage.sums
    ]
    return ["for _r in range(_count):", *indented(4, finished)] if finished else []


def _visit(stage: Stage, scaled: bool) -> list[str]:
    """One element: load, update, store."""
    return [
        *(f"{r} = _load_{r}(_at_{r}, _i)" for r in stage.reads),
        *(["grad = divide(grad, _grad_scale)"] if scaled and "grad" in stage.reads else []),
        f"{_results(stage)} = update({', '.join([*stage.reads, *stage.rows, *stage.scalars])})",
        *(f"_store_{r}(_at_{r}, _i, _new_{r})" for r in stage.writes),
    ]


def _results(stage: Stage) -> str:
    names = [*(f"_new_{r}" for r in stage.writes), *(f"_term_{one.name}" for one in stage.sums)]
    return ", ".join(names) + "," * (len(names) == 1)
