"""`install()` adds "npu" and the names of torch_npu to torch; `uninstall()` removes them."""

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

STAND_INS = str(Path(__file__).parent / "stand_ins")  # our packages torch_npu and mindspeed
PACKAGES = ("torch_npu", "mindspeed")

_lock = threading.RLock()
_patches: list[Patch] = []


class Installation:
    """Returned by :func:`install`. Leaving its ``with`` block uninstalls, if this call of ``install`` installed.

    While blocks in other threads are still open, nothing is uninstalled until the last of them ends.
    """

    _open: ClassVar[set[Installation]] = set()

    def __init__(self, kind: str, uninstalls: bool) -> None:
        self.kind, self._uninstalls = kind, uninstalls

    def __enter__(self) -> Installation:
        with _lock:
            self._open.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            self._open.discard(self)
            if self._uninstalls and self._open:
                next(iter(self._open))._uninstalls = True
            elif self._uninstalls:
                uninstall()

    def __repr__(self) -> str:
        return f'<"npu" means {self.kind} here>'


@functools.cache
def _warn_of_real_torch_npu() -> None:
    warnings.warn(
        "torch_npu is installed, so fusedadam.ascend.install() does nothing; you can keep or remove the call",
        stacklevel=3,  # where install() is called
    )


def install(device: str | None = None) -> Installation:
    """Makes ``import torch_npu``, ``.npu()``, ``device="npu"`` and ``torch.npu`` work, on a GPU or else on the CPU.

        fusedadam.ascend.install()              # until fusedadam.ascend.uninstall()
        with fusedadam.ascend.install("cpu"):   # until the end of the block
            ...

    It affects this thread and threads started later; a thread that is already running must call it, too.
    If the real torch_npu is installed, it changes nothing and warns.

    Args:
        device: the device type that "npu" means, such as ``"cuda"`` or ``"cpu"``; None chooses a GPU if there is one
    """
    with _lock:
        if real_torch_npu():
            _warn_of_real_torch_npu()
            return Installation("npu", uninstalls=False)
        if devices.installed():
            if device is not None and device != devices.kind():
                raise RuntimeError(
                    f'device={device!r}, but "npu" already means {devices.kind()}; call uninstall() first'
                )
            mode.enter()
            return Installation(devices.kind(), uninstalls=False)
        kind = devices.chosen(device)
        devices.begin(kind)
        try:
            for patch in patches():
                _patches.append(patch)
            sys.path.append(STAND_INS)  # at the end, so that the real packages come first
            sys.meta_path.append(_FINDER)
            sys.modules |= {"torch.npu": npu, "torch.npu.amp": npu.amp}
            torch.serialization.register_package(30, _no_tag, _restore)
            mode.enter()
        except BaseException:
            uninstall()
            raise
        return Installation(kind, uninstalls=True)


def uninstall() -> None:
    """Undoes :func:`install`, from any thread; does nothing if nothing is installed."""
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
        registry[:] = [entry for entry in registry if entry[2] is not _restore]
        ours = [name for name in PACKAGES if _is_stand_in(name)]
        for name in list(sys.modules):
            if name.split(".")[0] in ours or name in ("torch.npu", "torch.npu.amp"):
                del sys.modules[name]


def real_torch_npu() -> bool:
    """Whether Ascend's own torch_npu is installed."""
    if "torch_npu" in sys.modules:
        return not _is_stand_in("torch_npu")
    found = importlib.util.find_spec("torch_npu")
    return found is not None and not str(found.origin).startswith(STAND_INS)


def transfer_to_npu() -> None:
    """Makes "cuda" mean what "npu" means; on a GPU it already does."""
    with _lock:
        if devices.installed() and devices.kind() == "cpu":
            devices.also_translate("cuda")
            _patches.extend(cuda_on_cpu())


def _is_stand_in(package: str) -> bool:
    return str(getattr(sys.modules.get(package), "__file__", "")).startswith(STAND_INS)


_FINDER = missing.Finder(_is_stand_in)


def _no_tag(storage: Any) -> None:
    """Tags no storage as being on an NPU when it is saved."""


def _restore(storage: Any, location: str) -> Any:
    """Loads a storage that was saved on an NPU to the device that "npu" means."""
    if devices.is_named(location):
        return torch.serialization.default_restore_location(storage, devices.translated(location))
    return None
