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
        path = _in_folder(path)
    if not path.is_file():
        raise Unreadable(f"{path} does not exist")
    if path.name.endswith(".index.json"):
        shapes = _of_shards(path)
    elif path.suffix == ".json":
        shapes = _of_config(path)
    elif path.suffix == ".safetensors":
        shapes = _of_safetensors(path)
    else:
        shapes = _of_checkpoint(path)
    shapes = [shape for shape in shapes if math.prod(shape)]
    if not shapes:
        raise Unreadable(f"{path} has no floating-point tensors, so there is nothing to update")
    return shapes


def _in_folder(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors", "config.json"):
        if (folder / name).is_file():
            return folder / name
    raise Unreadable(f"{folder} is a folder without model.safetensors or config.json; name the file")


def _of_safetensors(path: Path) -> list[Shape]:
    _require("safetensors", path)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            return [tuple(e.get_shape()) for n, e in entries.items() if e.get_dtype() in FLOATS and _trained(n)]
    except (SafetensorError, OSError) as error:
        raise Unreadable(f"{path} is not a safetensors file: {error}") from None


def _of_shards(path: Path) -> list[Shape]:
    try:
        names = sorted({str(name) for name in _json(path)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError):
        raise Unreadable(f"{path} is not an index of safetensors files: it has no weight_map") from None
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise Unreadable(f"{path} names {missing[0]}, which is not beside it")
    return [shape for name in names for shape in _of_safetensors(path.parent / name)]


def _of_checkpoint(path: Path) -> list[Shape]:
    try:
        # mmap: weights stay on the disk
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle can raise nearly anything, KeyError for one
        first = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
        raise Unreadable(f"{path} cannot be read as a checkpoint of torch.save: {reason}") from None
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
    config = _json(path)
    if not isinstance(config, dict) or "model_type" not in config:
        raise Unreadable(f"{path} is not a Hugging Face config: it has no model_type")
    _require("transformers", path)
    import transformers

    try:
        loaded = transformers.AutoConfig.from_pretrained(path)
        named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
        with torch.device("meta"):
            make: Any = named[0] if named and named[0] else transformers.AutoModel.from_config
            model = make(loaded)
    except Exception as error:  # each architecture checks its config in its own way, or not at all
        raise Unreadable(f"{path}: transformers cannot make that model: {' '.join(str(error).split())[:200]}") from None
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]


def _require(package: str, path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unreadable(f"{path}: {package} reads such files and is not installed: pip install {package}")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Unreadable(f"{path} cannot be read as JSON: {error}") from None


def _trained(name: str) -> bool:
    return not name.endswith(NOT_TRAINED)
