"""The Numba kernels that finish sums: segments into rows and tensors, and tensors into sums over several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fusedadam.backends.numba.kernel import IMPORTS, added
from fusedadam.codegen import indented
from fusedadam.rules.stages import Sum
from fusedadam.rules.sums import UPPER_LANES

_HEAD = f"""
{IMPORTS}

number = NUMBER["f64"]
load_f32, load_f64 = load("f32", "f64"), load("f64", "f64")
store_f32, store_f64 = store("f32", "f64"), store("f64", "f64")
_new, _get, _put = scratch("f64", {UPPER_LANES})


@kernel
def run(_arguments):
    _lanes = _new()
"""


def combine(sums: Sequence[Sum], fields: Mapping[str, int], storage: Mapping[str, str]) -> str:
    """Over all tensors of a table."""
    lines = [*_unpacked("table", "tensors"), "    for _t in range(_tensors):"]

    def entry(name: str) -> str:
        return f"int64_at(_table, {fields[name]} * _tensors + _t)"

    for summation in sums:
        if summation.over in ("column", "matrix"):
            lines += indented(8, _factored(summation, entry, storage))
            continue
        partial, by_row = f"_part_{summation.name}", summation.over == "row"
        segments = "_row_segments" if summation.of == "row" else "_segments"
        lines += [
            f"        _from, _count = {entry(partial)}, {entry('_pieces' if by_row else segments)}",
            f"        for _r in range({entry('_rows') if by_row else 1}):",
            *indented(12, _sum(f"load_{storage[partial]}(_from, _r * _count + _k)", summation.largest)),
            f"            store_{storage[summation.name]}({entry('_here_' + summation.name)}, _r, _sum)"
            if by_row
            else f"            store_f64(_table, {fields[summation.name]} * _tensors + _t, _sum)",
        ]
    return "\n".join([f"# the sums {', '.join(s.name for s in sums)}", _HEAD.strip("\n"), *lines, ""])


def _factored(summation: Sum, entry: Callable[[str], str], storage: Mapping[str, str]) -> list[str]:
    """The segments of each column; or the values of all rows of a matrix, whose sum each of them gets."""
    by_column, kept = summation.over == "column", storage[summation.name]
    source, count = ("_part_" + summation.name, "_column_segments") if by_column else (summation.term, "_height")
    load = f"load_{storage[source]}(_from, {'(_m * _count + _k) * _width + _c' if by_column else '_m * _count + _k'})"
    into = f"store_{kept}({entry(summation.name)}"
    return [
        f"_from, _count, _width = {entry(source)}, {entry(count)}, {entry('_width') if by_column else 1}",
        f"for _m in range({entry('_matrices')}):",
        "    for _c in range(_width):",
        *indented(8, _sum(load, summation.largest)),
        *(
            [f"        {into}, _m * _width + _c, _sum)"]
            if by_column
            else ["        for _k in range(_count):", f"            {into}, _m * _count + _k, _sum)"]
        ),
    ]


def across(largest: bool) -> str:
    """Over several parameters: ``terms`` and ``results`` are addresses; ``begins`` has the first term of each sum."""
    lines = [
        *_unpacked("terms", "results", "begins", "sums"),
        "    for _s in range(_sums):",
        "        _begin = int64_at(_begins, _s)",
        "        _count = int64_at(_begins, _s + 1) - _begin",
        *indented(8, _sum("load_f64(int64_at(_terms, _begin + _k), 0)", largest)),
        "        for _k in range(_count):",
        "            store_f64(int64_at(_results, _begin + _k), 0, _sum)",
    ]
    return "\n".join(["# a sum over several parameters", _HEAD.strip("\n"), *lines, ""])


def _unpacked(*names: str) -> list[str]:
    return [f"    _{name} = int64_at(_arguments, {k})" for k, name in enumerate(names)]


def _sum(term: str, largest: bool) -> list[str]:
    return [
        f"for _j in range(max(1, min(_count, {UPPER_LANES}))):",
        "    _put(_lanes, _j, number(0))",
        f"for _begin_k in range(0, _count, {UPPER_LANES}):",
        f"    for _j in range(min({UPPER_LANES}, _count - _begin_k)):",
        "        _k = _begin_k + _j",
        f"        _put(_lanes, _j, {added('_get(_lanes, _j)', term, largest)})",
        f"_terms_here = max(1, min(_count, {UPPER_LANES}))",
        f"_sum = {'find_largest' if largest else 'add_up'}(_lanes, 0, _terms_here, {UPPER_LANES}, _get, _put)",
    ]
