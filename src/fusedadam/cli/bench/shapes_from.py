"""The shapes of a user's own model: from a checkpoint, without reading its weights, or from a Hugging Face config."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedadam.cli.harness.shapes import Shape

WRAPPED_IN = ("state_dict", "model_state_dict", "model", "module")  # keys under which trainers save the model
NOT_TRAINED = ("running_mean", "running_var")  # of batch norm, which checkpoints have among the weights
FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors calls them


class Unreadable(Exception):
    """A file without usable shapes; the message names the file and says why."""


def shapes_from(path: Path) -> list[Shape]:
    if path.is_dir():
        names = ("model.safetensors.index.json", "model.safetensors", "config.json")
        path = next((path / name for name in names if (path / name).is_file()), path)
    if not path.is_file():
        raise Unreadable(f"{path} is not a file; --from takes a checkpoint or a Hugging Face config.json")
    try:
        shapes = [shape for shape in _read(path) if math.prod(shape)]
    except Unreadable:
        raise
    except Exception as error:  # a damaged pickle, or a config of any architecture, can raise nearly anything
        first = (str(error).splitlines() or [""])[0][:200]
        raise Unreadable(f"{path} cannot be read: {type(error).__name__}: {first}") from None
    if not shapes:
        raise Unreadable(f"{path} has no floating-point tensors, so there is nothing to update")
    return shapes


def _read(path: Path) -> list[Shape]:
    if path.name.endswith(".index.json"):
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        return [shape for name in names for shape in _of_safetensors(path.parent / name)]
    if path.suffix == ".json":
        return _of_config(path)
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_checkpoint(path)


def _of_safetensors(path: Path) -> list[Shape]:
    _require("safetensors", path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        return [tuple(e.get_shape()) for n, e in entries.items() if e.get_dtype() in FLOATS and _trained(n)]


def _of_checkpoint(path: Path) -> list[Shape]:
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)  # mmap: weights stay on the disk
    shapes: dict[Any, Shape] = {}
    for name, value in _state_dict(loaded, path).items():
        if isinstance(value, Tensor) and value.is_floating_point() and _trained(str(name)):
            # tied weights are saved twice and trained once
            shapes[value.data_ptr(), value.shape, value.stride()] = tuple(value.shape)
    return list(shapes.values())


def _state_dict(loaded: Any, path: Path) -> Mapping[Any, Any]:
    if isinstance(loaded, Mapping):
        if any(isinstance(value, Tensor) for value in loaded.values()):
            return loaded
        for key in WRAPPED_IN:
            if isinstance(loaded.get(key), Mapping):
                return _state_dict(loaded[key], path)
    keys = ", ".join(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
    raise Unreadable(f"{path} has no state dict of a model: found {keys}, looked for {', '.join(WRAPPED_IN)}")


def _of_config(path: Path) -> list[Shape]:
    """Lets transformers build the model on the meta device: only it knows the shapes of every architecture."""
    _require("transformers", path)
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    make: Any = named[0] if named and named[0] else transformers.AutoModel.from_config
    with torch.device("meta"):
        return [tuple(p.shape) for p in make(config).parameters() if p.requires_grad]


def _require(package: str, path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unreadable(f"{path}: {package} reads such files and is not installed: pip install {package}")


def _trained(name: str) -> bool:
    return not name.endswith(NOT_TRAINED)
