"""The shapes of your own model: from a checkpoint, without reading its weights, or from a Hugging Face config."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedadam.cli.bench.shapes import Shape

WRAPPED_IN = ("state_dict", "model_state_dict", "model", "module")  # as trainers save it, the model among other things
NOT_TRAINED = ("running_mean", "running_var")  # batch norm's, which a checkpoint has among the weights
FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors calls them


class Unreadable(Exception):
    """A file that has no shapes for us; the message says why and what to do."""


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
        raise Unreadable(f"{path} has no floating-point tensors, so there is nothing to step over")
    return shapes


def _in_folder(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors", "config.json"):
        if (folder / name).is_file():
            return folder / name
    raise Unreadable(f"{folder} is a folder without model.safetensors or config.json; name the file")


def _of_safetensors(path: Path) -> list[Shape]:
    """The file begins with the length of a JSON header, and the header."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("its header would be longer than the file")
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return [tuple(e["shape"]) for name, e in entries.items() if e["dtype"] in FLOATS and _trained(name)]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise Unreadable(f"{path} is not a safetensors file: {error}") from None


def _of_shards(path: Path) -> list[Shape]:
    try:
        names = sorted(set(_json(path)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise Unreadable(f"{path} is no index of safetensors files: it has no weight_map") from None
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise Unreadable(f"{path} names {missing[0]}, which is not beside it")
    return [shape for name in names for shape in _of_safetensors(path.parent / name)]


def _of_checkpoint(path: Path) -> list[Shape]:
    """``mmap``: weights stay on the disk, and only what describes them is read."""
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, ValueError, EOFError) as error:
        first = str(error).splitlines()[0]
        raise Unreadable(f"{path} cannot be read as a checkpoint of torch.save: {first}") from None
    return _of_state_dict(_state_dict(loaded, path))


def _state_dict(loaded: Any, path: Path) -> Mapping[str, Any]:
    if isinstance(loaded, Mapping):
        if any(isinstance(value, Tensor) for value in loaded.values()):
            return loaded
        for key in WRAPPED_IN:
            if isinstance(loaded.get(key), Mapping):
                return _state_dict(loaded[key], path)
    keys = ", ".join(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
    raise Unreadable(f"{path} has no state dict of a model: found {keys}, looked for {', '.join(WRAPPED_IN)}")


def _of_state_dict(state: Mapping[str, Any]) -> list[Shape]:
    shapes: dict[Any, Shape] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and _trained(name):
            # tied weights are saved twice and trained once
            key = value.data_ptr(), value.shape, value.stride()
            shapes[key] = tuple(value.shape)
    return list(shapes.values())


def _of_config(path: Path) -> list[Shape]:
    """The model itself, made without memory by the transformers package: nobody else knows all their shapes."""
    config = _json(path)
    if not isinstance(config, dict) or "model_type" not in config:
        raise Unreadable(f"{path} is not a Hugging Face config: it has no model_type")
    if importlib.util.find_spec("transformers") is None:
        raise Unreadable(
            f"{path}: shapes are made of a config by transformers, which is missing: pip install transformers"
        )
    import transformers

    try:
        loaded = transformers.AutoConfig.from_pretrained(path)
        named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
        with torch.device("meta"):
            make: Any = named[0] if named and named[0] else transformers.AutoModel.from_config
            model = make(loaded)
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise Unreadable(f"{path}: transformers cannot make that model: {' '.join(str(error).split())[:200]}") from None
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Unreadable(f"{path} cannot be read as JSON: {error}") from None


def _trained(name: str) -> bool:
    return not name.endswith(NOT_TRAINED)
