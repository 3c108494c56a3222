"""What fusedadam needs to know about this machine. Nothing is compiled, and no step is taken."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import os
import platform
import shutil
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import fusedadam
from fusedadam import backends
from fusedadam.cli import frame
from fusedadam.cli.doctor.bus import Bus, bandwidth
from fusedadam.codegen import cache_files
from fusedadam.machine import cores
from fusedadam.tensors import host_memory

PACKAGES = ("torch", "numpy", "numba", "llvmlite", "triton", "rich")
FAMILIES, VARIABLES = ("FUSEDADAM_", "NUMBA_", "OMP_", "TRITON_"), ("CC", "CUDA_VISIBLE_DEVICES")

# What our tests and measurements have run on.
TESTED_PROCESSORS, TESTED_SYSTEM, TESTED_GPUS = ("x86_64", "amd64"), "Linux", ("NVIDIA H200",)
NEVER_TESTED = (
    "NVIDIA GPUs other than the H200", "AMD GPUs (ROCm)", "Intel GPUs (XPU)", "Ascend NPUs",
    "processors other than x86-64", "Apple's MPS and other devices that torch knows", "macOS and Windows",
)  # fmt: skip
SLOWER = "available, slower"  # in place of a reason why a backend is not used


@dataclass(frozen=True)
class Device:
    device: str
    name: str
    backend: str
    why_not: dict[str, str]  # why the other backends are not used
    lacking: str | None  # why a faster backend is unavailable
    tested: bool
    bus: Bus | None = None  # what states in host memory are bound by


@dataclass(frozen=True)
class Threads:
    torch: int
    cores: int  # that this process may use
    quota: float | None  # cores that the container may use
    team: bool  # whether kernels run on torch's own threads

    @property
    def usable(self) -> int:
        return self.cores if self.quota is None else max(1, min(self.cores, math.ceil(self.quota)))


@dataclass(frozen=True)
class Cache:
    whose: str
    folder: str | None
    kernels: int | None = None  # not counted in Triton's
    bytes: int = 0
    free: int | None = None  # bytes on the disk
    error: str | None = None
    damaged: int = 0  # files whose checksum is wrong, as after a power loss


@dataclass(frozen=True)
class Facts:
    fusedadam: str
    location: str
    python: str
    system: str
    versions: dict[str, str | None]
    broken: dict[str, str]  # packages that are installed but cannot be imported, and why
    devices: list[Device]
    gpus: int  # NVIDIA GPUs that the driver knows, whether or not torch can use them
    cuda: str | None  # the version that torch was built for
    complaints: list[str]  # warnings of torch
    threads: Threads
    caches: list[Cache]
    headers: bool  # Python's C headers
    lockable: int | None = None  # bytes of host memory that can be page-locked, as far as is known
    environment: dict[str, str] = field(default_factory=dict)


def gather() -> Facts:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()  # warns if the driver is broken
        devices = [_device(device) for device in frame.devices()]
        caches = [_own_cache()]
        if _version("triton") is not None:
            caches.append(_cache("Triton", triton_folder()))
    needed = ["numba", *(["triton"] if any(d.device != "cpu" for d in devices) else [])]
    broken = {name: error for name in needed if (error := _import_error(name)) is not None}
    variables = {n: value for n, value in os.environ.items() if n.startswith(FAMILIES) or n in VARIABLES}
    return Facts(
        fusedadam=fusedadam.__version__,
        location=str(Path(fusedadam.__file__).parent),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions={name: _version(name) for name in PACKAGES} | {"torch": torch.__version__},
        broken=broken,
        devices=devices,
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        cuda=torch.version.cuda or torch.version.hip,
        complaints=[m for m in dict.fromkeys(str(w.message) for w in caught) if not m.startswith("fusedadam")],
        threads=_threads(),
        caches=caches,
        lockable=host_memory.lockable(),
        headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        environment=dict(sorted(variables.items())),
    )


def _device(device: torch.device) -> Device:
    name = frame.device_name(device)
    if device.type == "cpu":
        tested = platform.machine().lower() in TESTED_PROCESSORS and platform.system() == TESTED_SYSTEM
    else:
        tested = name in TESTED_GPUS and torch.version.hip is None
    backend, lacking = backends.best(device)
    reasons = {n: backends.why_not(n, device) or SLOWER for n in backends.NAMES if n != backend}
    if device.type == "cpu" and backends.why_not("triton") is not None:
        reasons["triton"] = "it needs a GPU"  # a package or a compiler that it lacks is not needed here
    bus = None
    if device.type in host_memory.DEVICES:
        with contextlib.suppress(RuntimeError):  # out of memory, of either kind
            bus = bandwidth(device)
    return Device(str(device), name, backend, reasons, lacking, tested, bus)


def _threads() -> Threads:
    from fusedadam.backends.numba.threads import torchs_team

    return Threads(torch.get_num_threads(), cores(), _quota(), torchs_team() is not None)


def _quota(folder: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores a container may use, from Linux's control groups, version 2."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _own_cache() -> Cache:
    try:
        folder = cache_files.cache_folder()
    except RuntimeError as error:
        return Cache("fusedadam", None, error=str(error))
    if folder is None:
        return Cache("fusedadam", None, error="none could be written to; it must be a folder of your own")
    return _cache(
        "fusedadam", folder, [path for path in folder.iterdir() if path.suffix in (".py", cache_files.SUFFIX)]
    )


def triton_folder() -> Path:
    """Where Triton caches compiled code, without importing Triton."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _cache(whose: str, folder: Path, files: Sequence[Path] | None = None) -> Cache:
    existing = next((f for f in (folder, *folder.parents) if f.exists()), folder)
    error = None if os.access(existing, os.W_OK | os.X_OK) else "cannot be written to"
    kernels = None if files is None else sum(path.suffix == ".py" for path in files)
    size = damaged = 0
    for path in files or ():
        with contextlib.suppress(FileNotFoundError):  # another process may delete it at any time
            size += path.stat().st_size
            damaged += path.suffix == cache_files.SUFFIX and cache_files.is_damaged(path)
    return Cache(whose, str(folder), kernels, size, shutil.disk_usage(existing).free, error, damaged)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_error(package: str) -> str | None:
    """None if the package is missing, which is reported elsewhere."""
    if not backends._installed(package):
        return None
    try:
        importlib.import_module(package)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
