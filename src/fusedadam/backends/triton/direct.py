"""Kernels that Triton has compiled, launched by CUDA's driver instead of Triton's own launcher.

Triton's launcher asks in Python, at every launch, for what stays the same from step to step. This one asks once. It
checks what it assumes about a kernel: how many parameters there are, and how large each of them is. A tensor descriptor
is several parameters: a tensor map, which we make, and the tensor's shape and strides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from fusedadam.tensors.cuda_driver import GRAPHS_VARIABLE, MAP_WORDS, Driver, Graph, Kernel, Words, driver_of, raw

POINTER_SIZE = 8
DESCRIPTOR = "tensordesc"
GRAPH_AFTER = 2  # launches of the same kernels
# beyond a kernel's own parameters: memory that Triton allocates for a launch, if a kernel asks for some
SCRATCH = ("global_scratch_size", "profile_scratch_size")


class DirectKernel:
    """Launches a compiled kernel with its arguments, or with others at some positions."""

    def __init__(self, driver: Driver, device: int, kernel: Kernel, word_of: Mapping[int, int], alive: object) -> None:
        self.driver, self.device, self.kernel = driver, device, kernel
        self.word_of, self._words, self._alive = word_of, list(kernel.words), alive

    def __call__(self, changed: Mapping[int, Any] = {}) -> None:
        words = self.kernel.words
        try:
            for place, argument in changed.items():
                words[self.word_of[place]] = raw(argument)
            self.driver.launch([self.kernel], self.device)
        finally:
            for place in changed:
                words[self.word_of[place]] = self._words[self.word_of[place]]


def kernel(
    device: torch.device, compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]
) -> DirectKernel | None:
    """None if only Triton can launch it."""
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
    maps = [dict(found) for found in getattr(metadata, "tensordesc_meta", None) or ()]
    if not is_plain or passed is None or len(maps) != sum(kind.startswith(DESCRIPTOR) for _, kind in passed):
        return None
    sizes = driver.parameter_sizes(compiled.function)
    expected, words, word_of = list[int](), list[int | Words](), dict[int, int]()
    for place, kind in passed:
        word_of[place] = len(words)
        if kind.startswith(DESCRIPTOR):
            tensor, found = arguments[place].base, maps.pop(0)
            words += [driver.described(tensor, found["block_size"], found["swizzle"])]
            words += [*tensor.shape, *tensor.stride()]
            expected += [8 * MAP_WORDS, *[4] * tensor.dim(), *[8] * tensor.dim()]
        else:
            words.append(raw(arguments[place]))
            expected.append(POINTER_SIZE if kind.startswith("*") or kind == "i64" else 4)
    own, rest = sizes[: len(expected)], sizes[len(expected) :]
    if own != expected or len(rest) > len(SCRATCH) or any(size != POINTER_SIZE for size in rest):
        return None
    made = Kernel(compiled.function, grid, 32 * metadata.num_warps, metadata.shared, [*words, *(0 for _ in rest)])
    return DirectKernel(driver, device.index, made, word_of, alive=(compiled, arguments))


class Varying(NamedTuple):
    """An argument of a kernel in a queue that may differ from launch to launch."""

    kernel: int  # its number in the queue
    place: int  # the position of the argument
    name: str


class DirectQueue:
    """Kernels of one device, launched one after the other; as one CUDA graph, once they have been launched a few
    times."""

    def __init__(self, kernels: Sequence[DirectKernel], varying: Sequence[Varying]) -> None:
        self._driver, self._device, self._alive = kernels[0].driver, kernels[0].device, kernels
        # copies where arguments vary: the kernels themselves, and other queues of them, keep the arguments they have
        own = {k: kernels[k].kernel.copy() for k, _, _ in varying}
        self._kernels = [own.get(k, kernel.kernel) for k, kernel in enumerate(kernels)]
        self._varying = [(k, own[k].words, kernels[k].word_of[place], name) for k, place, name in varying]
        self._outdated: set[int] = set()  # kernels with arguments that the graph does not have yet
        self._launches = 0
        self._graph: Graph | None = None
        self._is_graph = len(kernels) > 1 and os.environ.get(GRAPHS_VARIABLE, "1") != "0"

    def __call__(self, values: Mapping[str, int]) -> None:
        """``values``: of the varying arguments, by their names."""
        for k, words, at, name in self._varying:
            if words[at] != values[name]:
                self._outdated.add(k)
                words[at] = values[name]
        if self._graph is None or torch._C._cuda_isCurrentStreamCapturing():
            self._driver.launch(self._kernels, self._device)
            self._launches += 1
            if self._is_graph and self._graph is None and self._launches >= GRAPH_AFTER:
                self._graph = self._driver.graph(self._kernels)
                self._outdated.clear()
        else:
            for k in [*self._outdated]:
                self._graph.update(k)
                self._outdated.discard(k)  # only now: it may have been interrupted
            self._driver.launch_graph(self._graph, self._device)


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
        if not kind.startswith(("*", DESCRIPTOR)) and kind not in ("i32", "i64", "fp32"):
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
