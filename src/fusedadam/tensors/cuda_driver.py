"""CUDA's driver, called directly, for launches and small copies.

torch's copies and Triton's launcher run much Python each time, as much as everything else in a step of a small model.
Where the driver is unavailable (ROCm, Windows, another device), or a kernel needs more than a plain launch, torch and
Triton do it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any, TypeAlias

import torch

# Copies from pageable memory of up to 64 KB: the driver takes the bytes along with the command, and does not wait.
SMALL = 1 << 16
RELAXED = 2  # a mode of CUDA's captures
GRAPHS_VARIABLE = "FUSEDADAM_CUDA_GRAPHS"  # 0: kernels are launched one after the other
CAN_MAP_HOST_MEMORY, UNIFIED_ADDRESSING = 19, 41  # attributes of a device
INVALID_CONTEXT = 201  # this thread has not used the device yet
MAP_WORDS, MAP_ALIGNMENT = 16, 64  # of a tensor map
KINDS = {torch.float16: 6, torch.float32: 7}  # of elements, as CUDA counts them
PROMOTED = 2  # the second-level cache loads 128 bytes at a time
Words: TypeAlias = ctypes.Array[c_uint64]


class Driver:
    """The functions of libcuda that are used here, on the current device and stream."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._launch, self._copy = library.cuLaunchKernel, library.cuMemcpyHtoDAsync_v2
        self._launch.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
        self._copy.argtypes = [c_uint64, c_void_p, c_size_t, c_void_p]
        self._parameter = library.cuFuncGetParamInfo
        self._parameter.argtypes = [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)]

    def launch(self, kernels: Sequence[Kernel], device: int) -> None:
        """One after the other."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        for kernel in kernels:
            status = self._launch(*kernel.configuration, stream, kernel.pointers, None)
            if status != 0:
                self._retry(status, device, functools.partial(self.launch, [kernel], device))

    def launch_graph(self, graph: Graph, device: int) -> None:
        status = graph.launch(device)
        if status != 0:
            self._retry(status, device, lambda: self.launch_graph(graph, device))

    def copy(self, target: int, source: int, nbytes: int, device: int) -> None:
        """From pageable memory of the host, which may change as soon as this returns; at most SMALL bytes."""
        status = self._copy(target, source, nbytes, torch._C._cuda_getCurrentRawStream(device))
        if status != 0:
            self._retry(status, device, lambda: self.copy(target, source, nbytes, device))

    def _retry(self, status: int, device: int, again: Callable[[], None]) -> None:
        """Once more, if only the context that torch uses on a device was not yet current in this thread."""
        if status != INVALID_CONTEXT:
            self.check(status)
        current = c_void_p()
        self.check(self._library.cuCtxGetCurrent(byref(current)))
        if current.value:
            self.check(status)
        context, handle = c_void_p(), c_int()
        self.check(self._library.cuDeviceGet(byref(handle), device))
        self.check(self._library.cuDevicePrimaryCtxRetain(byref(context), handle))
        self.check(self._library.cuCtxSetCurrent(context))
        again()

    def graph(self, kernels: Sequence[Kernel]) -> Graph:
        """The kernels, one after the other, as one command; with the arguments that they have now."""
        with _during_captures(self._library):
            return Graph(self._library, self.check, kernels)

    def attribute(self, which: int, device: int) -> int:
        value, handle = c_int(), c_int()
        self.check(self._library.cuDeviceGet(byref(handle), device))
        self.check(self._library.cuDeviceGetAttribute(byref(value), which, handle))
        return value.value

    def parameter_sizes(self, function: int) -> list[int]:
        """The bytes of each parameter of a kernel."""
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while self._parameter(function, len(sizes), byref(offset), byref(size)) == 0:
            sizes.append(size.value)
        return sizes

    def described(self, tensor: torch.Tensor, block: Sequence[int], swizzle: int) -> Words:
        """A tensor map: a tensor in blocks, as an argument of a kernel. ``swizzle``: how they lie in shared memory."""
        rank, room = tensor.dim(), (c_uint64 * (MAP_WORDS + 7))()
        aligned = -ctypes.addressof(room) % MAP_ALIGNMENT
        words = (c_uint64 * MAP_WORDS).from_buffer(room, aligned)
        strides = [stride * tensor.element_size() for stride in tensor.stride()[-2::-1]]
        sizes, steps = (c_uint64 * rank)(*tensor.shape[::-1]), (c_uint64 * max(1, rank - 1))(*strides)
        box, ones = (c_uint * rank)(*block[::-1]), (c_uint * rank)(*[1] * rank)
        address = ctypes.addressof(words)
        kind, begin = KINDS[tensor.dtype], tensor.data_ptr()
        encode = self._library.cuTensorMapEncodeTiled
        encode.argtypes = [c_void_p, c_int, c_uint, c_uint64, *[c_void_p] * 4, *[c_int] * 4]
        self.check(encode(address, kind, rank, begin, sizes, steps, box, ones, 0, swizzle, PROMOTED, 0))
        return words

    def check(self, status: int) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            raise RuntimeError(
                f"CUDA reports error {status} ({(text.value or b'unknown').decode()}), of this launch or of anything "
                "that ran before; set CUDA_LAUNCH_BLOCKING=1 to see where it comes from"
            )


class Graph:
    """Kernels in a row, which one call launches. It is put together from the kernels themselves: nothing is captured
    from a stream, so no other thread, allocation or capture can come between."""

    def __init__(self, library: ctypes.CDLL, check: Callable[[int], None], kernels: Sequence[Kernel]) -> None:
        self._check, self._launch = check, library.cuGraphLaunch
        self._update = library.cuGraphExecKernelNodeSetParams_v2
        self._launch.argtypes = [c_void_p, c_void_p]
        self._update.argtypes = [c_void_p, c_void_p, c_void_p]
        graph, executable = c_void_p(), c_void_p()
        check(library.cuGraphCreate(byref(graph), c_uint(0)))
        weakref.finalize(self, _destroy, library, library.cuGraphDestroy, graph).atexit = False
        self._nodes: list[int | None] = []
        self._parameters = [_NodeParameters(kernel) for kernel in kernels]
        for parameters in self._parameters:
            node, before = c_void_p(), self._nodes[-1:]
            waits_for, count = (c_void_p * len(before))(*before), c_size_t(len(before))
            check(library.cuGraphAddKernelNode_v2(byref(node), graph, waits_for, count, byref(parameters)))
            self._nodes.append(node.value)
        check(library.cuGraphInstantiateWithFlags(byref(executable), graph, c_ulonglong(0)))
        weakref.finalize(self, _destroy, library, library.cuGraphExecDestroy, executable).atexit = False
        self._executable = executable.value

    def update(self, index: int) -> None:
        """Takes the present arguments of a kernel; launches that are on their way keep theirs."""
        status = self._update(self._executable, self._nodes[index], self._parameters[index].address)
        if status != 0:
            self._check(status)

    def launch(self, device: int) -> int:
        status: int = self._launch(self._executable, torch._C._cuda_getCurrentRawStream(device))
        return status


@contextlib.contextmanager
def _during_captures(library: ctypes.CDLL) -> Iterator[None]:
    """Makes and destroys what does not belong to any capture, while a stream is captured by this thread or another one:
    torch's usual mode of capture would not only forbid it, but be invalidated."""
    mode = c_int(RELAXED)
    library.cuThreadExchangeStreamCaptureMode(byref(mode))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(byref(mode))


def _destroy(library: ctypes.CDLL, destroy: Callable[[c_void_p], int], handle: c_void_p) -> None:
    """At any time, since garbage may be collected at any time; what still runs is finished first, by the driver."""
    with _during_captures(library):
        destroy(handle)


class _NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = (
        ("function", c_void_p), *((f"{what}_{axis}", c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", c_uint), ("arguments", c_void_p), ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    )  # fmt: skip

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(*kernel.configuration, ctypes.addressof(kernel.pointers))
        self.address, self.alive = ctypes.addressof(self), kernel


class Kernel:
    """A compiled kernel with its grid and arguments, which are words (addresses and numbers) or tensor maps."""

    def __init__(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, arguments: Sequence[int | Words]
    ) -> None:
        self.configuration = (function, *grid, threads, 1, 1, shared)
        words = (argument % (1 << 64) if isinstance(argument, int) else 0 for argument in arguments)
        self.words = (c_uint64 * len(arguments))(*words)
        self._maps = {k: argument for k, argument in enumerate(arguments) if not isinstance(argument, int)}
        begin = ctypes.addressof(self.words)
        at = (ctypes.addressof(self._maps[k]) if k in self._maps else begin + 8 * k for k in range(len(arguments)))
        self.pointers = (c_void_p * len(arguments))(*at)

    def copy(self) -> Kernel:
        """The same, with words of its own."""
        function, x, y, z, threads, _, _, shared = self.configuration
        arguments = [self._maps.get(k, word) for k, word in enumerate(self.words)]
        return Kernel(function, (x, y, z), threads, shared, arguments)


@functools.cache
def driver() -> Driver | None:
    """None where it is unavailable."""
    if torch.version.cuda is None:
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):  # no such library, or a driver before CUDA 12.4
        return None


def driver_of(device: torch.device) -> Driver | None:
    return driver() if device.type == "cuda" else None


def can_map_host_memory(device: torch.device) -> bool:
    """Whether kernels reach page-locked memory under the host's own addresses; True where nobody can be asked."""
    asked = driver_of(device)
    return asked is None or all(asked.attribute(w, device.index) for w in (CAN_MAP_HOST_MEMORY, UNIFIED_ADDRESSING))


def raw(argument: Any) -> int:
    """An argument of a kernel as a word; a float is passed in 32 bits."""
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<f", argument), "little")
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else int(argument)
