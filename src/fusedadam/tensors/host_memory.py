"""States in page-locked host memory, which kernels of a device read and write in place, over the bus.

A kernel takes addresses from a launch table, so only the place of a state differs. Two dangers come with it. The host
sees memory that a kernel has not finished writing: whoever reads states calls ``wait`` first. And no allocator of torch
knows of an address in a table: ``mark_used`` tells the one for page-locked memory which streams use a slab, so that the
memory is not given to anyone else before the kernels there are done, even if the optimizer is deleted after ``step()``.

States are cut from slabs, since torch rounds each allocation up to a power of two; a slab has such a size. The memory
of a slab goes back to torch's pool when its last state is gone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusedadam.tensors.cuda_driver import can_map_host_memory
from fusedadam.tensors.layout import address_of, dense_strides
from fusedadam.tensors.shards import local, with_shard
from fusedadam.tensors.transfer import capturing, keep_for_graph

Bytes: TypeAlias = npt.NDArray[np.uint8]

DEVICES: tuple[str, ...] = ("cuda",)  # that read host memory in place; ROCm (untested) calls itself so, too
# Bytes of a state: smaller ones stay on the device. On an H200, those of 4 KiB reach 27 GB/s over the bus, those of
# 16 KiB and more 42 to 44.
SMALLEST = 1 << 14
ALIGNMENT = 512  # bytes, as on a device
SMALLEST_SLAB, LARGEST_SLAB = 1 << 20, 1 << 30  # bytes; larger states have slabs of their own
ANNOUNCED_FROM = 1 << 32  # bytes of slabs: page-locking takes 0.6 to 0.8 seconds a GiB


class Slab:
    """Page-locked memory that states are cut from. It knows its memory weakly: the states keep that alive."""

    def __init__(self, memory: Bytes, device: torch.device) -> None:
        self._memory, self.device = weakref.ref(memory), device
        self.begin, self.end = memory.ctypes.data, memory.ctypes.data + len(memory)
        self._free = 0  # where the rest begins
        self._streams: set[int] = set()  # that have used it

    @property
    def memory(self) -> Bytes | None:
        """None when the last state is gone."""
        return self._memory()

    def cut(self, nbytes: int) -> Tensor | None:
        """A piece with a storage of its own, if there is room: saving one state does not write the whole slab."""
        memory, begin = self.memory, self._free
        if memory is None or begin + nbytes > len(memory):
            return None
        self._free = -(-(begin + nbytes) // ALIGNMENT) * ALIGNMENT
        return torch.from_numpy(memory[begin : begin + nbytes])

    def mark_used(self) -> None:
        """Tells torch's allocator that the current stream uses the memory, by an asynchronous copy: it gives the memory
        to others only when the streams of such copies are done. What a CUDA graph uses is kept, since that may be
        replayed at any time."""
        memory: Any = self.memory
        if memory is None or self.device.type != "cuda":
            return
        if capturing():
            keep_for_graph(memory.base)
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream not in self._streams:
            torch.empty(1, dtype=torch.uint8, device=self.device).copy_(memory.base[:1], non_blocking=True)
            self._streams.add(stream)


_slabs: list[Slab] = []  # of all optimizers, some of them without memory by now; replaced, never changed in place
_adding = threading.Lock()  # autograd has one thread for each device


class HostMemory:
    """Makes the states of one optimizer."""

    def __init__(self) -> None:
        self._slabs: list[Slab] = []
        self.moved = 0  # states that were elsewhere when a step needed them

    def placed(self, state: Tensor, device: torch.device) -> Tensor:
        """A copy of a state of a parameter on this device: in host memory, or on the device if it is small."""
        here = local(state)
        if here.nbytes < SMALLEST:
            return state.to(device, copy=True)
        return with_shard(state, self.copy(here, dense_strides(here), device))

    def copy(self, tensor: Tensor, strides: Sequence[int], device: torch.device) -> Tensor:
        """A copy for the kernels of a device, with these strides, which leave no gaps."""
        copy = self._new(tensor.nbytes, device).view(tensor.dtype).as_strided(tensor.shape, strides)
        return copy.copy_(tensor, non_blocking=tensor.device == device)

    def _new(self, nbytes: int, device: torch.device) -> Tensor:
        self._slabs = [slab for slab in self._slabs if slab.memory is not None]
        for slab in self._slabs:
            if slab.device == device and (piece := slab.cut(nbytes)) is not None:
                slab.mark_used()  # by copies, even if no step follows
                return piece
        locked = sum(slab.end - slab.begin for slab in self._slabs)
        # up to a quarter more at a time, so that little is locked in vain
        more = min(LARGEST_SLAB, max(SMALLEST_SLAB, 1 << (locked // 4).bit_length() >> 1))
        size = max(more, 1 << (nbytes - 1).bit_length())
        if locked < ANNOUNCED_FROM <= locked + size:
            text = (
                f"fusedadam: offload=True page-locks more than {ANNOUNCED_FROM >> 30} GiB, at 0.6 to 0.8 seconds a GiB"
            )
            print(text, file=sys.stderr, flush=True)
        memory = allocate(size).numpy()
        slab = Slab(memory, device)
        slab.mark_used()
        _register(slab)
        self._slabs = [*self._slabs, slab]
        piece = slab.cut(nbytes)
        assert piece is not None
        return piece


def _register(slab: Slab) -> None:
    global _slabs
    with _adding:
        _slabs = [*(each for each in _slabs if each.memory is not None), slab]


def allocate(nbytes: int) -> Tensor:
    """Page-locked memory, or an error that says what to do."""
    left, error = lockable(), None
    if left is not None and left < nbytes:
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # torch's pool, which no public function empties yet
        left = lockable()
    why = f"{(left or 0) / 2**30:.2f} GiB are left"
    if left is None or left >= nbytes:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as refused:
            why, error = str(refused).partition("\n")[0], refused
    raise RuntimeError(
        f"offload=True could not page-lock {nbytes / 2**30:.2f} GiB of host memory ({why}); use storage='8bit', leave "
        "offload out in some groups, or allow this process more memory (its container's limit, ulimit -l)"
    ) from error


def lockable() -> int | None:
    """The bytes that are left to this process, by the machine and by its container; None where neither says."""
    found = []
    with contextlib.suppress(OSError, KeyError):  # only Linux has these files
        found.append(1024 * _numbers("/proc/meminfo")["MemAvailable:"])
    with contextlib.suppress(OSError, ValueError, KeyError):  # without a limit it is "max"
        most, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        pages = _numbers("/sys/fs/cgroup/memory.stat")  # of files, which the kernel drops when asked for more
        found.append(most - used + pages["active_file"] + pages["inactive_file"])
    return min(found, default=None)


def _numbers(path: str) -> dict[str, int]:
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines}


def reaches(device: torch.device) -> bool:
    """Whether kernels of a device read host memory in place."""
    return device.type in DEVICES and can_map_host_memory(device)


def slab_of(tensor: Any) -> Slab | None:
    """The slab that a tensor, or its local shard, was cut from."""
    here = local(tensor) if _slabs else None
    if type(here) is not Tensor or here.device.type != "cpu" or here.layout != torch.strided:
        return None
    address = address_of(here)
    return next((slab for slab in _slabs if slab.begin <= address < slab.end and slab.memory is not None), None)


def slabs_of(tensors: Iterable[Any]) -> list[tuple[Slab, Any]]:
    """The slabs that tensors were cut from, each with its memory, which is kept."""
    found = {id(slab): slab for slab in map(slab_of, tensors) if slab is not None}
    return [(slab, slab.memory) for slab in found.values()]


def wait() -> None:
    """Waits until no kernel writes to host memory: for everything on these devices, since a replayed CUDA graph does
    not call this package."""
    devices = {slab.device for slab in _slabs if slab.memory is not None}
    for device in devices if devices and not capturing() else ():
        synchronize(device)


def synchronize(device: torch.device) -> None:
    torch.cuda.synchronize(device)
