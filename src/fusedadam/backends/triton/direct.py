"""Kernels that Triton has compiled, launched by CUDA's driver instead of Triton's own launcher.

Triton's launcher asks in Python, at every launch, for what stays the same from step to step. This one asks once. It
checks what it assumes about a kernel: how many parameters there are, and how large each of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton

from fusedadam.tensors.cuda_driver import Kernel, driver_of, raw

POINTER_SIZE = 8
# beyond a kernel's own parameters: memory that Triton allocates for a launch, if a kernel asks for some
SCRATCH = ("global_scratch_size", "profile_scratch_size")


def launcher(
    device: torch.device, compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]
) -> Callable[..., None] | None:
    """Launches a compiled kernel with these arguments; None if only Triton can. It takes arguments that differ this
    time, by their position."""
    driver, metadata = driver_of(device), compiled.metadata
    if driver is None or device.index is None:
        return None
    is_plain = (
        getattr(metadata, "num_ctas", 1) == 1
        and not getattr(metadata, "launch_cooperative_grid", False)
        and not getattr(metadata, "launch_pdl", False)
        and not any(getattr(metadata, name, 0) for name in SCRATCH)
    )
    passed = _passed(compiled.src)
    if not is_plain or passed is None:
        return None
    sizes = driver.parameter_sizes(compiled.function)
    own, rest = sizes[: len(passed)], sizes[len(passed) :]
    expected = [POINTER_SIZE if kind.startswith("*") or kind == "i64" else 4 for _, kind in passed]
    if own != expected or len(rest) > len(SCRATCH) or any(size != POINTER_SIZE for size in rest):
        return None
    places = [place for place, _ in passed]
    words = [*(raw(arguments[place]) for place in places), *(0 for _ in rest)]
    kernel = Kernel(compiled.function, grid, 32 * metadata.num_warps, metadata.shared, words)
    index, at = device.index, {place: k for k, place in enumerate(places)}

    def launch(changed: Mapping[int, Any] | None = None, _alive: object = (compiled, arguments)) -> None:
        if changed is None:
            driver.launch(kernel, index)
            return
        for place, argument in changed.items():
            kernel.words[at[place]] = raw(argument)
        try:
            driver.launch(kernel, index)
        finally:
            for place in changed:
                kernel.words[at[place]] = words[at[place]]

    return launch


def _passed(source: Any) -> list[tuple[int, str]] | None:
    """The arguments that a kernel is passed, by their number, and their types: all but the constants."""
    signature, constants = getattr(source, "signature", None), getattr(source, "constants", {})
    if not isinstance(signature, dict):
        return None
    names = list(source.fn.arg_names)
    fixed = {
        names[key] if isinstance(key, int) else names[key[0]] if isinstance(key, tuple) else key for key in constants
    }
    passed = []
    for key, kind in signature.items():
        name = names[key] if isinstance(key, int) else key
        if kind == "constexpr" or name in fixed:
            continue
        if not kind.startswith("*") and kind not in ("i32", "i64"):
            return None
        passed.append((names.index(name), kind))
    return passed


def has_hooks() -> bool:
    """Whether something, such as Proton, wants to know of every launch: Triton's own launcher tells it."""
    knobs = getattr(triton, "knobs", None)
    owner = triton.compiler.CompiledKernel if knobs is None else knobs.runtime
    for hook in (owner.launch_enter_hook, owner.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
