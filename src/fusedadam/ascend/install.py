"""Ascend's names throughout torch: `install()` puts them there, `uninstall()` takes them away again."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch

from fusedadam.ascend import device as devices
from fusedadam.ascend import missing, mode, npu
from fusedadam.ascend.patches import Patch, cuda_on_cpu, patches

STAND_INS = str(Path(__file__).parent / "stand_ins")  # the packages torch_npu and mindspeed, as far as we have them
PACKAGES = ("torch_npu", "mindspeed")

_lock = threading.RLock()
_patches: list[Patch] = []


class Installation:
    """What :func:`install` returns: if it was this call that installed, leaving a ``with`` statement uninstalls.

    Where other such blocks are still open, in other threads, the last of them does.
    """

    _open: ClassVar[set[Installation]] = set()

    def __init__(self, kind: str, began: bool) -> None:
        self.kind, self._began = kind, began

    def __enter__(self) -> Installation:
        with _lock:
            self._open.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            self._open.discard(self)
            if self._began and self._open:
                next(iter(self._open))._began = True  # it is for another to end
            elif self._began:
                uninstall()

    def __repr__(self) -> str:
        return f'<"npu" means {self.kind} here>'


@functools.cache
def _leave_it_to_the_real_one() -> None:
    warnings.warn(
        "torch_npu is installed, so fusedadam.ascend.install() leaves everything to it; the call can stay, or go",
        stacklevel=3,  # where install() is called
    )


def install(device: str | None = None) -> Installation:
    """From now on ``import torch_npu``, ``.npu()``, ``device="npu"`` and ``torch.npu`` work, and mean the best device
    that is there: a GPU, else the CPU.

        fusedadam.ascend.install()              # until fusedadam.ascend.uninstall()
        with fusedadam.ascend.install("cpu"):   # until the end of the block
            ...

    It holds for this thread and those that are started from now on; a thread that was running already calls it as well.
    Where the real torch_npu is installed nothing is changed, and a warning says so.

    Args:
        device: the kind of device that is meant, such as ``"cuda"`` or ``"cpu"``; None chooses the best
    """
    with _lock:
        if real_torch_npu():
            _leave_it_to_the_real_one()
            return Installation("npu", began=False)
        if devices.installed():
            if device is not None and device != devices.kind():
                raise RuntimeError(f'device={device!r}, but "npu" means {devices.kind()} already; uninstall() first')
            mode.enter()
            return Installation(devices.kind(), began=False)
        kind = devices.chosen(device)
        devices.begin(kind)
        try:
            for patch in patches():
                _patches.append(patch)
            sys.path.append(STAND_INS)  # at the end: what is really installed comes first
            sys.meta_path.append(_FINDER)
            sys.modules |= {"torch.npu": npu, "torch.npu.amp": npu.amp}
            torch.serialization.register_package(30, _no_tag, _restored)
            mode.enter()
        except BaseException:
            uninstall()
            raise
        return Installation(kind, began=True)


def uninstall() -> None:
    """Torch is as it was; from any thread, and also where nothing is installed."""
    with _lock:
        devices.end()
        mode.leave()
        while _patches:
            _patches.pop().undo()
        if STAND_INS in sys.path:
            sys.path.remove(STAND_INS)
            sys.path_importer_cache.pop(STAND_INS, None)
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _FINDER]
        registry = torch.serialization._package_registry
        registry[:] = [entry for entry in registry if entry[2] is not _restored]
        ours = [name for name in PACKAGES if _stands_in(name)]
        for name in list(sys.modules):
            if name.split(".")[0] in ours or name in ("torch.npu", "torch.npu.amp"):
                del sys.modules[name]


def real_torch_npu() -> bool:
    """Whether Ascend's own package is there, which knows better."""
    if "torch_npu" in sys.modules:
        return not _stands_in("torch_npu")
    found = importlib.util.find_spec("torch_npu")
    return found is not None and not str(found.origin).startswith(STAND_INS)


def transfer_to_npu() -> None:
    """From now on cuda means what npu means: nothing new on a GPU."""
    with _lock:
        if devices.installed() and devices.kind() == "cpu":
            devices.also_translate("cuda")
            _patches.extend(cuda_on_cpu())


def _stands_in(package: str) -> bool:
    return str(getattr(sys.modules.get(package), "__file__", "")).startswith(STAND_INS)


_FINDER = missing.Finder(_stands_in)


def _no_tag(storage: Any) -> None:
    """Nothing is saved as being on an NPU."""


def _restored(storage: Any, location: str) -> Any:
    """What was saved on an NPU is loaded to the device that is meant."""
    if devices.is_named(location):
        return torch.serialization.default_restore_location(storage, devices.translated(location))
    return None
