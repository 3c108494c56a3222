"""Compiles Triton kernels for devices that are not there, as far as the machine code that they would be sent.

The interpreter runs what a compiler may refuse: words of different sizes, a value that changes its type in a loop, too
much shared memory. `recorded` collects the kernels of a step under the interpreter, with the types of their arguments;
`python -m tests.backends.compiling sm_90 KERNELS.json`, in a process without it, compiles them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# What a program may have on the smallest device of a kind; None: not checked
TARGETS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@contextlib.contextmanager
def recorded() -> Iterator[list[dict[str, Any]]]:
    """The kernels that plans make inside, each once, as a GPU from Hopper on has them. None of them runs."""
    from fusedadam import compat
    from fusedadam.backends.triton import launching, ops, orthogonal

    found: dict[str, dict[str, Any]] = {}

    def init(ready: Any, device: Any, function: Any, grid: Any, arguments: Any, warps: int, **options: Any) -> None:
        ready.direct = None
        parameters = inspect.signature(function.fn).parameters
        signature, constants = dict[str, str](), dict[str, Any]()
        for name, value in zip(parameters, arguments, strict=True):
            if value is None or "constexpr" in str(parameters[name].annotation):
                is_dtype = type(value).__name__ == "dtype"
                signature[name], constants[name] = "constexpr", {"dtype": value.name} if is_dtype else value
            else:
                signature[name] = "i64" if "int64" in str(parameters[name].annotation) else _type(value)
        kernel = {
            "file": inspect.getsourcefile(function.fn), "name": function.fn.__name__, "signature": signature,
            "constants": constants, "options": {"num_warps": warps, "enable_fp_fusion": False, **options},
        }  # fmt: skip
        found[json.dumps(kernel)] = kernel

    made: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (launching.Ready, "__init__", init),
            (launching.Ready, "__call__", lambda *_: None),
            (ops, "INTERPRETED", False),  # the interpreter has codecs and tiles of its own
            (
                orthogonal,
                "multiplies",
                lambda dtype, _: dtype == torch.float32 and compat.tensor_descriptor() is not None,
            ),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield made
    made += found.values()


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{DTYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return f"tensordesc<{DTYPES[value.base.dtype]}{list(value.block_shape)}>"


def _source(function: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """With addresses that are multiples of 16, as those of torch's allocators are."""
    import triton.backends.compiler as compiler
    from triton.compiler import ASTSource

    aligned = [k for k, kind in enumerate(types.values()) if kind.startswith("*")]
    if hasattr(compiler, "AttrsDescriptor"):  # Triton 3.2, where constants have no type
        known = {"arg_properties": {"tt.divisibility": tuple(aligned), "tt.equal_to": ()}, "cls": "AttrsDescriptor"}
        types = {name: kind for name, kind in types.items() if kind != "constexpr"}
        return ASTSource(function, types, constants, compiler.AttrsDescriptor.from_dict(known))
    return ASTSource(function, types, constants, {(k,): [["tt.divisibility", 16]] for k in aligned})


def main(target: str, kernels: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as to_machine_code
    from triton.language import dtype

    name = target.removeprefix("sm_")
    device = GPUTarget("cuda", int(name), 32) if name != target else GPUTarget("hip", target, 64)
    for kernel in json.loads(Path(kernels).read_text("utf-8")):
        spec = importlib.util.spec_from_file_location("compiled", kernel["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        given = kernel["constants"].items()
        constants = {name: dtype(value["dtype"]) if isinstance(value, dict) else value for name, value in given}
        source = _source(getattr(module, kernel["name"]), kernel["signature"], constants)
        compiled = to_machine_code(source, target=device, options=kernel["options"])
        assert "cubin" in compiled.asm or "hsaco" in compiled.asm
        assert compiled.metadata.shared <= TARGETS[target], f"{kernel['name']}: {compiled.metadata.shared} bytes"
        print(f"{kernel['file']} {kernel['name']} {kernel['constants']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
