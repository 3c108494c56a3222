"""Attributes of torch that are replaced while installed, because the mode does not see their calls.

Every wrapper checks whether it is still installed: other code may keep a reference to it, or have wrapped it in turn.
After uninstalling it only calls the original.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fusedadam.ascend import device, mode, npu, on_cpu

MISSING = object()


class Patch:
    """Replaces an attribute of torch; ``undo`` restores it."""

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self.owner, self.name, self.new = owner, name, new
        self.old = vars(owner).get(name, MISSING)
        setattr(owner, name, new)

    def undo(self) -> None:
        if vars(self.owner).get(self.name) is not self.new:
            return  # other code has replaced it since
        if self.old is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.old)


def patches() -> Iterator[Patch]:
    yield Patch(torch, "npu", npu)
    yield Patch(torch.Tensor, "npu", tensor_npu)
    yield Patch(torch.Tensor, "is_npu", property(lambda tensor: tensor.device.type == device.kind()))
    yield Patch(nn.Module, "npu", module_npu)
    yield Patch(torch.UntypedStorage, "npu", storage_npu)
    yield Patch(torch, "Generator", _made_by(torch.Generator, _generator(torch.Generator)))
    yield Patch(torch, "Stream", _made_by(torch.Stream, _stream(torch.Stream)))
    yield Patch(torch, "Event", _made_by(torch.Event, _event(torch.Event)))
    yield Patch(torch, "load", _mapping_location(torch.load))
    yield Patch(torch.jit, "load", _mapping_location(torch.jit.load))
    yield Patch(torch.autocast, "__init__", _autocast(torch.autocast.__init__))
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield Patch(torch, name, device.translating(getattr(torch, name)))
    for name in ("custom_fwd", "custom_bwd", "is_autocast_available"):
        yield Patch(torch.amp, name, device.translating(getattr(torch.amp, name)))
    yield Patch(torch.amp.GradScaler, "__init__", _translating(torch.amp.GradScaler.__init__, "device"))
    yield Patch(torch.utils.data.DataLoader, "__init__", _data_loader(torch.utils.data.DataLoader.__init__))
    yield Patch(torch.random, "fork_rng", _fork_rng(torch.random.fork_rng))
    yield Patch(threading.Thread, "start", _start(threading.Thread.start))
    yield Patch(torch.autograd, "_engine_run_backward", _backward(vars(torch.autograd)["_engine_run_backward"]))
    parallel = importlib.import_module("torch.nn.parallel.data_parallel")  # in torch.nn.parallel it is a function
    yield Patch(parallel, "_get_available_device_type", _no_accelerator(vars(parallel)["_get_available_device_type"]))
    if torch.distributed.is_available():
        ddp, changes = nn.parallel.DistributedDataParallel, {"device_ids": _device_ids, "output_device": _device_id}
        yield Patch(ddp, "__init__", _changing(ddp.__init__, changes))
        yield Patch(torch.distributed, "is_hccl_available", lambda: True)
        for name in ("init_process_group", "new_group"):
            yield Patch(torch.distributed, name, _without_hccl(getattr(torch.distributed, name)))
        for owner in (torch.distributed, torch.distributed.device_mesh):
            yield Patch(owner, "init_device_mesh", _translating(owner.init_device_mesh, "device_type"))
        mesh = torch.distributed.device_mesh.DeviceMesh
        yield Patch(mesh, "__init__", _translating(mesh.__init__, "device_type"))


def cuda_on_cpu() -> Iterator[Patch]:
    """Makes "cuda" mean "npu", as torch_npu.contrib.transfer_to_npu does, where "npu" means the CPU."""
    yield Patch(torch.Tensor, "cuda", tensor_npu)
    yield Patch(nn.Module, "cuda", module_npu)
    for name in (
        "current_device", "set_device", "device", "get_device_name", "synchronize", "manual_seed", "manual_seed_all",
        "initial_seed", "seed", "seed_all", "get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all",
        "get_device_properties", "mem_get_info", "empty_cache", "memory_allocated", "max_memory_allocated",
        "memory_reserved", "max_memory_reserved", "memory_stats", "memory_summary", "reset_peak_memory_stats",
        "reset_max_memory_allocated", "ipc_collect", "is_bf16_supported", "Stream", "Event", "current_stream",
        "default_stream", "set_stream", "stream",
    ):  # fmt: skip
        yield Patch(torch.cuda, name, getattr(npu, name))


def tensor_npu(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    """This tensor on the device that "npu" means. On a CPU this is a copy, since an NPU shares no memory with it."""
    target = _device(device)
    return self.to(target, non_blocking=non_blocking, memory_format=memory_format, copy=target.type == "cpu")


def module_npu(self: nn.Module, device: Any = None) -> nn.Module:
    """Moves all parameters and buffers to the device that "npu" means."""
    return self.to(_device(device))


def storage_npu(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> torch.UntypedStorage:
    moved: torch.UntypedStorage = self.to(device=_device(device), non_blocking=non_blocking)
    return moved


def _device(given: Any) -> torch.device:
    """The device for an argument of ``.npu()``: None, an index, a name or a device."""
    if isinstance(given, torch.device):
        return given
    return torch.device(device.translated("npu" if given is None else f"npu:{given}" if type(given) is int else given))


def _translating(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Wraps a function so that the arguments with these names are translated."""
    return _changing(function, dict.fromkeys(names, device.translated))


def _changing(function: Callable[..., Any], changes: Mapping[str, Callable[[Any], Any]]) -> Callable[..., Any]:
    """Wraps a function so that ``changes[name]`` is applied to its argument ``name``, or to the argument's default."""
    parameters = inspect.signature(function).parameters
    positions = {name: k for k, name in enumerate(parameters) if name in changes}
    defaults = {name: parameters[name].default for name in positions if parameters[name].default is not inspect._empty}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if device.installed():
            given = list(args)
            for name, position in positions.items():
                if position < len(given):
                    given[position] = changes[name](given[position])
                elif name in kwargs or name in defaults:
                    kwargs[name] = changes[name](kwargs.get(name, defaults.get(name)))
            args = tuple(given)
        return function(*args, **kwargs)

    return call


def _mapping_location(load: Callable[..., Any]) -> Callable[..., Any]:
    def translated(location: Any) -> Any:
        if isinstance(location, dict):  # its keys are locations in the file, which may name the NPU or its translation
            keys = {f"{device.kind()}:{k.partition(':')[2]}": v for k, v in location.items() if device.is_named(k)}
            return {k: device.translated(v) for k, v in {**keys, **location}.items()}
        return device.translated(location)

    return _changing(load, {"map_location": translated})


def _autocast(init: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast defaults to float16 on an NPU, but to bfloat16 on a CPU."""
    translating = _translating(init, "device_type")

    @functools.wraps(init)
    def call(self: Any, device_type: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if dtype is None and device.is_named(device_type):
            dtype = torch.float16
        translating(self, device_type, dtype, *args, **kwargs)

    return call


def _data_loader(init: Callable[..., Any]) -> Callable[..., Any]:
    """Drops ``pin_memory_device="npu"``: torch pins for the current accelerator, and warns if one is named."""
    return _changing(init, {"pin_memory_device": lambda name: "" if device.is_named(name) else name})


def _fork_rng(fork: Callable[..., Any]) -> Callable[..., Any]:
    """``fork_rng`` always saves the CPU's state, and does not accept the CPU as a device."""

    @functools.wraps(fork)
    def call(devices: Any = None, *args: Any, device_type: Any = None, **kwargs: Any) -> Any:
        kind = device.translated(device_type)
        if device.is_named(device_type) and kind == "cpu":
            devices, kind = [], None
        if kind is not None:  # what None stands for differs between versions of torch: it is left out
            kwargs["device_type"] = kind
        return fork(devices, *args, **kwargs)

    return call


def _without_hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces Ascend's backend hccl by nccl on a GPU, and by gloo on a CPU."""

    def translated(backend: Any) -> Any:
        if not isinstance(backend, str):
            return backend
        available = "nccl" if device.kind() == "cuda" else "gloo"
        for name, library in (("npu", "hccl"), ("cuda", "nccl")):
            if device.is_named(name):
                backend = backend.replace(f"{name}:", f"{device.kind()}:").replace(library, available)
        return ",".join(dict.fromkeys(backend.split(",")))  # "cpu:gloo,npu:hccl" has become "cpu:gloo,cpu:gloo"

    return _changing(function, {"backend": translated, "device_id": _device_id})


def _device_id(given: Any) -> Any:
    """The argument for a function that takes an accelerator, and for a CPU None."""
    target = device.translated_argument(given)
    if target is None or device.kind() != "cpu":
        return target
    return None if torch.device(target).type == "cpu" else given


def _device_ids(given: Any) -> Any:
    """The argument for a function that takes a list of accelerators, and for a CPU None."""
    targets = None if given is None else [_device_id(target) for target in given]
    return None if targets == [None] else targets


def _no_accelerator(find: Callable[[], str | None]) -> Callable[[], str | None]:
    """DataParallel moves a model to the accelerator; where "npu" means the CPU, the model stays on the CPU."""

    @functools.wraps(find)
    def call() -> str | None:
        return None if device.installed() and device.kind() == "cpu" else find()

    return call


def _start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Each thread has its own modes: a thread that starts while installed enters ours first."""

    @functools.wraps(start)
    def call(self: threading.Thread) -> None:
        run = self.run

        def run_in_mode() -> None:
            del self.run
            mode.enter()
            try:
                run()
            finally:
                mode.leave()

        if not device.installed():
            return start(self)
        self.run = run_in_mode  # type: ignore[method-assign]
        try:
            start(self)
        except BaseException:
            self.run = run  # type: ignore[method-assign]
            raise

    return call


def _backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """Enters the mode for the functions of the script that a backward pass calls: hooks, custom Functions, checkpoints.

    While the mode handles ``backward()`` it is off. On a GPU the pass runs in a thread of autograd, which is entered by
    a hook on the first nodes of the graph.
    """

    entered: set[int] = set()  # GPUs whose autograd thread has entered the mode, and stays in it

    def enter(_: Any) -> None:
        mode.enter()

    def enter_gpu_thread() -> None:
        """Runs a trivial backward pass on the GPU, since a pass may begin on the CPU and reach the GPU later."""
        if device.kind() == "cuda" and torch.cuda.current_device() not in entered:
            entered.add(torch.cuda.current_device())
            with torch.enable_grad():
                output = torch.zeros((), device="cuda", requires_grad=True) * 1
            output.grad_fn.register_prehook(enter)  # type: ignore[union-attr]
            torch.autograd.backward(output)

    @functools.wraps(run)
    def call(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not device.installed():
            return run(outputs, *args, **kwargs)
        enter_gpu_thread()
        nodes = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        hooks = [node.register_prehook(enter) for node in nodes] if device.kind() != "cpu" else []
        new = mode.enter()
        try:
            return run(outputs, *args, **kwargs)
        finally:
            if new:
                mode.leave()
            for hook in hooks:
                hook.remove()

    return call


def _made_by(real: type, make: Callable[..., Any]) -> type:
    """Stands for a type of torch whose constructor the mode does not see: calls ``make``, and isinstance works."""

    class Maker(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs) if device.installed() else real(*args, **kwargs)

        def __getattr__(cls, name: str) -> Any:  # torch.Event.from_ipc_handle and the like
            return getattr(real, name)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    return Maker(real.__name__, (), {"__module__": "torch", "__doc__": real.__doc__})


def _generator(real: type) -> Callable[..., Any]:
    translated = device.translated_argument
    return lambda device="cpu": real(device=translated(device))


def _stream(real: type) -> Callable[..., Any]:
    translating = device.translating(real)

    def make(*args: Any, **kwargs: Any) -> Any:
        exists = len(args) > 1 or "stream_id" in kwargs  # its ids are given
        target = args[0] if args else kwargs.get("device")
        return on_cpu.Stream(*args, **kwargs) if _is_cpu(target) and not exists else translating(*args, **kwargs)

    return make


def _event(real: type) -> Callable[..., Any]:
    translating = device.translating(real)

    def make(device: Any = None, **kwargs: Any) -> Any:
        return on_cpu.Event(**kwargs) if _is_cpu(device) else translating(device, **kwargs)

    return make


def _is_cpu(given: Any) -> bool:
    """Whether "npu" means the CPU and this argument does, too; None is the current device."""
    return device.kind() == "cpu" and (given is None or torch.device(device.translated_argument(given)).type == "cpu")
