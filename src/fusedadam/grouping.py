"""Parameter groups of a model: which parameters decay, which are for Muon, and a learning rate for each depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedadam import checks
from fusedadam.tensors.matrices import matrices_of

__all__ = ["param_groups"]

# Words in the names of weights that are not for Muon: anywhere; as a part, between dots and underscores; at the end of
# the parameter's own name
ANYWHERE, AS_A_PART = ("embed", "norm", "bias"), ("head", "heads", "classifier")
AT_THE_END = ("pos", "position", "positions", "token", "tokens", "wpe", "wte")
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
VECTORS = "1d"  # a word of no_decay that is a rule: Conv1d's matrices have it in the name of their class


def param_groups(
    model: nn.Module, weight_decay: float | None = None, no_decay: Sequence[str] = ("bias", "norm"), *,
    lr: float | Tensor | None = None, lr_by_depth: float | None = None, optimizer: str | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Parameter groups for any optimizer, of this package or of torch: biases and norms do not decay, and with
    ``lr_by_depth`` the first layers learn more slowly than the last. With ``optimizer="muon"`` they say which
    parameters are for :class:`Muon`, and what was chosen is printed.

    Each parameter that requires a gradient is in one group, once, also if modules share it (its first name counts). The
    order is that of ``model.named_parameters()`` in each group; groups go from the first layer to the last, and of two
    groups of one depth the one that decays comes first. Parameters come with their names, which torch keeps as
    ``group["param_names"]``.

    Depth is counted in blocks. A block is a child of a :class:`torch.nn.ModuleList` or :class:`torch.nn.Sequential`; of
    blocks inside each other, the outermost counts, and one without parameters does not. Blocks follow each other as in
    ``model.named_parameters()``. Parameters before the first block, and embeddings outside of blocks, are one step
    deeper than it. Parameters after the last block, as a final norm and a head, are one step above it. Others belong to
    the block that they follow. The topmost have the learning rate ``lr``, and each step down multiplies it by
    ``lr_by_depth``.

    Args:
        model: the module whose parameters are trained; parts of a model may be grouped one by one, and their lists
            added
        weight_decay: of parameters that decay; None leaves it to the optimizer
        no_decay: words. A parameter does not decay if its dotted name, or the class of the module that it belongs to,
            has one of them in it, in upper or lower case. ``"1d"`` stands for parameters with fewer than two dimensions
        lr: learning rate of all groups, or of the topmost; None leaves it to the optimizer. A tensor is shared by all
            groups, unless ``lr_by_depth`` scales it
        lr_by_depth: layer-wise decay of the learning rate, above 0 and at most 1, such as 0.75; it needs ``lr``
        optimizer: ``"muon"`` sets ``use_muon`` in each group: True for the matrices of hidden layers, False for the
            rest. That is embeddings, positions, tokens, heads (by name, and the last linear layer if it is a block of
            its own), norms, biases, vectors, matrices of one row or column, and convolutions over one dimension or in
            groups

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
        >>> for group in param_groups(model, weight_decay=0.1):
        ...     print(group["weight_decay"], [name for name, _ in group["params"]])
        0.1 ['0.weight', '2.weight']
        0.0 ['0.bias', '1.weight', '1.bias', '2.bias']
        >>> optimizer = AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module, not its parameters")
    _check(weight_decay, no_decay, lr, lr_by_depth, optimizer)
    places = list(_places(model))
    for_muon = _for_muon(model, places) if optimizer == "muon" else set()
    depths = [0] * len(places) if lr_by_depth is None else _depths(places)
    top = max(depths, default=0)
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for place, depth in zip(places, depths, strict=True):
        if not place.param.requires_grad:
            continue
        is_exempt = _is_exempt(place, no_decay)
        use_muon = {"use_muon": place.param in for_muon} if optimizer is not None else {}
        group = groups.setdefault((depth, place.param not in for_muon, is_exempt), {"params": [], **use_muon})
        group["params"].append((place.name, place.param))
        if is_exempt or weight_decay is not None:
            group["weight_decay"] = 0.0 if is_exempt else weight_decay
        if lr is not None:
            # a tensor itself, not a copy: schedulers, and steps in CUDA graphs, see it change
            group.setdefault("lr", lr if lr_by_depth is None else lr * lr_by_depth ** (top - depth))
    found = [groups[key] for key in sorted(groups)]
    if optimizer is not None:
        _tell(found)
    return found


def _check(weight_decay: Any, no_decay: Any, lr: Any, lr_by_depth: Any, optimizer: Any) -> None:
    if optimizer not in (None, "muon"):
        raise ValueError(f"optimizer={optimizer!r} is unknown; it must be 'muon', or None for any other optimizer")
    if optimizer is not None and (lr is not None or lr_by_depth is not None):
        raise ValueError(
            "lr and lr_by_depth cannot be used with optimizer='muon': its matrices and the rest need different "
            "learning rates; leave them out, pass Muon(..., lr=...) for matrices, and set group['lr'] of the others"
        )
    if weight_decay is not None:
        checks.number("weight_decay", weight_decay)
    if isinstance(no_decay, str) or not isinstance(no_decay, Sequence) or not all(map(_is_word, no_decay)):
        raise TypeError(f"no_decay={no_decay!r} must be a tuple of words, such as ('bias', 'norm'), or () for none")
    if lr is not None:
        checks.number("lr", lr)
    if lr_by_depth is None:
        return
    if not 0 < checks.real("lr_by_depth", lr_by_depth) <= 1:
        raise ValueError(f"lr_by_depth={lr_by_depth!r} is out of range; it must be above 0 and at most 1")
    if lr is None:
        raise ValueError(
            f"lr_by_depth={lr_by_depth!r} needs lr, the learning rate of the head; pass it here too: "
            "param_groups(model, lr=1e-3, ...)"
        )


def _is_word(word: Any) -> bool:
    return isinstance(word, str) and word != ""


class _Place(NamedTuple):
    """A parameter, its name, the module that it belongs to, and the block that this is in."""

    name: str
    param: nn.Parameter
    module: nn.Module
    block: str | None


def _places(model: nn.Module) -> Iterator[_Place]:
    """As ``model.named_parameters()``."""
    seen: set[nn.Parameter] = set()
    modules: dict[str, nn.Module] = {}
    blocks: dict[str, str | None] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        while parent not in modules and parent:  # setattr(model, "a.b", ...) makes a name with a dot
            parent = parent.rpartition(".")[0]
        is_child = path != "" and isinstance(modules[parent], (nn.ModuleList, nn.Sequential))
        modules[path], blocks[path] = module, blocks.get(parent) or (path if is_child else None)
        for name, param in module.named_parameters(path, recurse=False):
            if param not in seen:
                seen.add(param)
                yield _Place(name, param, module, blocks[path])


def _for_muon(model: nn.Module, places: Sequence[_Place]) -> set[nn.Parameter]:
    """The matrices of hidden layers."""
    not_hidden = {param for m in model.modules() if isinstance(m, EMBEDDINGS) for param in m.parameters()}  # or tied
    matrices = [place for place in places if place.param.dim() > 1]
    if matrices and isinstance(matrices[-1].module, nn.Linear):
        last = matrices[-1]
        if not any(place.block == last.block for place in matrices[:-1] if last.block is not None):
            not_hidden.add(last.param)
    return {
        place.param
        for place in matrices
        if place.param not in not_hidden
        and not _is_named_otherwise(place.name.lower())
        and min(matrices_of(place.param.shape)[1:]) > 1
        and "norm" not in type(place.module).__name__.lower()
        and not (isinstance(place.module, CONVOLUTIONS) and (place.param.dim() == 3 or place.module.groups > 1))
    }


def _is_named_otherwise(name: str) -> bool:
    """Whether a name says that a weight is no matrix of a hidden layer: ``lm_head``, but not ``multihead_attn``."""
    path = name.split(".")
    own = path[-1] if path[-1] not in ("weight", "original", "original0", "original1") else path[-2] if path[1:] else ""
    return (
        any(word in name for word in ANYWHERE)
        or any(word in part.split("_") for part in path for word in AS_A_PART)
        or own.split("_")[-1] in AT_THE_END
    )


def _tell(groups: Sequence[dict[str, Any]]) -> None:
    """Prints which parameters are for Muon, and which for AdamW."""
    for title, use_muon in (("Muon", True), ("AdamW", False)):
        params = [named for group in groups if group["use_muon"] is use_muon for named in group["params"]]
        elements = sum(param.numel() for _, param in params)
        names = ", ".join(name for name, _ in params)
        print(f"{title}: {len(params):,} parameters of {elements:,} elements: {names}")


def _is_exempt(place: _Place, no_decay: Sequence[str]) -> bool:
    """Whether a parameter does not decay."""
    names = (place.name.lower(), type(place.module).__name__.lower())
    words = [word.lower() for word in no_decay if word != VECTORS]
    return any(word in name for word in words for name in names) or (VECTORS in no_decay and place.param.dim() < 2)


def _depths(places: Sequence[_Place]) -> list[int]:
    """How many blocks each parameter comes after, as counted above. Frozen parameters count too, so that freezing some
    does not change the learning rates of others."""
    order: dict[str, int] = {}
    depths = []
    for place in places:
        if place.block is not None:
            depths.append(order.setdefault(place.block, len(order) + 1))
        else:
            depths.append(0 if isinstance(place.module, nn.Embedding) else len(order))
    if not order:
        raise ValueError(
            "lr_by_depth needs blocks to count, and model has no ModuleList or Sequential with parameters; leave it "
            "out, or group the parts of the model one by one"
        )
    return [
        len(order) + 1 if place.block is None and depth == len(order) else depth
        for place, depth in zip(places, depths, strict=True)
    ]
