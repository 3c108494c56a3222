"""The Triton kernel of a rule, as source text: one program a chunk, for all tensors of a launch.

A chunk that is full and whose tensors are aligned takes the plain path, whose loads and stores the compiler makes
16 bytes wide; every other chunk takes the masked one.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusedadam.rule import Special

TYPES = {"f32": "tl.float32", "f16": "tl.float16", "bf16": "tl.bfloat16", "f64": "tl.float64"}


def source(special: Special, storage: Mapping[str, str], compute: str, scaled: bool, interpreted: bool) -> str:
    """``storage`` names how each role is kept. With ``scaled``, ``grad_scale`` and ``found_inf`` are obeyed."""
    suffix = "64" if compute == "f64" else ""
    words = ["abs", "float_to_bf16", "maximum", "minimum", "round_to_odd", "where"]
    words += [f"{word}{suffix} as {word}" for word in ("divide", "number", "sqrt")]
    per_chunk = [f"    _at_{r} = tl.load(addresses + {k} * tensors + _t)" for k, r in enumerate(special.roles)]
    per_chunk += [
        f"    {s} = tl.load(rows + {k} * tensors + _t).to({TYPES[compute]})" for k, s in enumerate(special.scalars)
    ]
    stop_at_inf = [
        "    if tl.load(found_inf) != 0:",
        "        return",
        f"    _scale = tl.load(grad_scale).to({TYPES[compute]})",
    ]
    lines = [
        f"# {special.title}: {', '.join(f'{r} {storage[r]}' for r in special.roles)}, computed in {compute}",
        "import triton",
        "import triton.language as tl",
        f"from fusedadam.backends.triton.words import {', '.join(words)}",
        "",
        *(f"\n@triton.jit\n{function}\n" for function in special.functions),
        "",
        '@triton.jit(do_not_specialize=["tensors"])',
        "def run(",
        "    addresses, sizes, chunk_tensor, chunk_index, rows, tensors, grad_scale, found_inf,",
        "    CHUNK: tl.constexpr, BLOCK: tl.constexpr,",
        "):",
        *(stop_at_inf if scaled else []),
        "    _chunk = tl.program_id(0)",
        "    _t = tl.load(chunk_tensor + _chunk)",
        "    _start = tl.load(chunk_index + _chunk).to(tl.int64) * CHUNK",
        "    _size = tl.load(sizes + _t)",
        *per_chunk,
        f"    _together = {' | '.join(f'_at_{r}' for r in special.roles)}",
        "    if (_start + CHUNK <= _size) & (_together % 16 == 0):",
        *_loop(special, storage, compute, scaled, interpreted, masked=False),
        "    else:",
        *_loop(special, storage, compute, scaled, interpreted, masked=True),
        "",
    ]
    return "\n".join(lines)


def _loop(
    special: Special, storage: Mapping[str, str], compute: str, scaled: bool, interpreted: bool, masked: bool
) -> list[str]:
    def pointer(role: str) -> str:
        raw = f"_at_{role}.to(tl.pointer_type({TYPES[storage[role]]}))"
        return raw if masked else f"tl.multiple_of({raw}, 16)"

    mask = ", mask=_live" if masked else ""
    outputs = ", ".join(f"_new_{r}" for r in special.outputs) + ("," if len(special.outputs) == 1 else "")
    inner = [
        "_i = _start + _offset + tl.arange(0, BLOCK)"
        if masked
        else "_i = tl.multiple_of(_start + _offset, BLOCK) + tl.arange(0, BLOCK)",
        *(["_live = _i < _size"] if masked else []),
        *(f"{r} = tl.load(_to_{r} + _i{mask}).to({TYPES[compute]})" for r in special.inputs),
        *(["grad = divide(grad, _scale)"] if scaled else []),
        f"{outputs} = update({', '.join([*special.inputs, *special.scalars])})",
        *(
            f"tl.store(_to_{r} + _i, {_rounded(f'_new_{r}', storage[r], compute, interpreted)}{mask})"
            for r in special.outputs
        ),
    ]
    return [
        *(f"        _to_{r} = {pointer(r)}" for r in special.roles),
        "        for _offset in range(0, CHUNK, BLOCK):",
        *(f"            {line}" for line in inner),
    ]


def _rounded(value: str, storage: str, compute: str, interpreted: bool) -> str:
    if storage in ("f16", "bf16") and compute == "f64":
        value = f"round_to_odd({value})"
    if storage == "bf16" and interpreted:
        return f"float_to_bf16({value})"
    return f"{value}.to({TYPES[storage]})"
