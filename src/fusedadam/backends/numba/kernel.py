"""The Numba kernel of a rule, as source text: one loop over chunks, one over elements."""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.rule import Special

# What a kernel is handed: the address of these words, one int64 (or the bits of a float64) each.
WORDS = (
    "addresses", "sizes", "chunk_tensor", "chunk_index", "rows", "tensors", "chunks", "chunk_size", "batch", "counter",
    "grad_scale",
)  # fmt: skip


def source(special: Special, storage: Mapping[str, str], compute: str, scaled: bool) -> str:
    """``storage`` names how each role is kept. With ``scaled``, gradients are divided by ``grad_scale``."""
    pad = " " * 12
    any_nan = {storage[r] for r in special.inputs} != {"bf16"}
    loads = [f"{pad}{r} = load_{r}(_at_{r}, _i)" for r in special.inputs]
    if scaled:
        loads.append(f"{pad}grad = divide(grad, _grad_scale)")
    results = ", ".join(f"_new_{r}" for r in special.outputs)
    results += "," * (len(special.outputs) == 1)
    arguments = ", ".join([*special.inputs, *special.scalars])
    stores = [f"{pad}store_{r}(_at_{r}, _i, _new_{r})" for r in special.outputs]
    per_chunk = [f"        _at_{r} = word(_addresses, {k} * _tensors + _t)" for k, r in enumerate(special.roles)]
    per_chunk += [f"        {s} = scalar(_rows, {k} * _tensors + _t)" for k, s in enumerate(special.scalars)]
    lines = [
        f"# {special.title}: {', '.join(f'{r} {storage[r]}' for r in special.roles)}, computed in {compute}",
        "from fusedadam.backends.numba.words import *",
        "",
        f'number = NUMBER["{compute}"]',
        f'scalar = load("f64", "{compute}")',
        *(f'load_{r} = load("{storage[r]}", "{compute}")' for r in special.inputs),
        *(f'store_{r} = store("{storage[r]}", "{compute}", {any_nan})' for r in special.outputs),
        "",
        *(f"\n@inline\n{function}\n" for function in special.functions),
        "",
        "@kernel(cached)",
        "def run(table):",
        *(f"    _{name} = {'scalar' if name == 'grad_scale' else 'word'}(table, {k})" for k, name in enumerate(WORDS)),
        "    _next = _end = 0",
        "    while True:",
        "        if _next == _end:",
        "            _next = take(_counter, _batch)",
        "            _end = min(_next + _batch, _chunks)",
        "            if _next >= _chunks:",
        "                return",
        "        _t = short(_chunk_tensor, _next)",
        "        _start = short(_chunk_index, _next) * _chunk_size",
        "        _stop = min(_start + _chunk_size, word(_sizes, _t))",
        "        _next += 1",
        *per_chunk,
        "        for _i in range(_start, _stop):",
        *loads,
        f"{pad}{results} = update({arguments})",
        *stores,
        "",
    ]
    return "\n".join(lines)
