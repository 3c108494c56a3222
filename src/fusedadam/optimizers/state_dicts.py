"""A state dict that is about to be loaded, from wherever it comes: put into our words, or refused.

Everything is looked at before anything is loaded, and an error says what does not fit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy

from fusedadam import checks
from fusedadam.tensors.shards import distributed_like

# What others may have chosen that not every optimizer here can: and what is the same as not choosing it
NEUTRAL = {"amsgrad": False, "nesterov": False, "bias_correction": True}
KNOWN = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "ema_params")

# Group, parameter -> the names of the states that an optimizer of ours keeps for it
Kept = Callable[[Mapping[str, Any], Tensor], Sequence[str]]


class Names(NamedTuple):
    """What the optimizer that is loading calls things. ``others``: its names for what other optimizers call otherwise;
    ``begin``: states that may begin at any time."""

    optimizer: str
    roles: Sequence[str]
    others: Mapping[str, str]
    begin: Sequence[str]


def check_is_one(state_dict: Mapping[str, Any]) -> None:
    """Whether this is the state dict of an optimizer, and not something that is saved beside it."""
    if "param_groups" in state_dict and "state" in state_dict:
        return
    inside = [k for k, v in state_dict.items() if isinstance(v, Mapping) and "param_groups" in v and "state" in v]
    if inside:
        raise ValueError(
            f"state_dict is a whole checkpoint, with a state dict of an optimizer under {inside[0]!r}; load that: "
            f"state_dict[{inside[0]!r}]"
        )
    if state_dict and all(isinstance(value, Tensor) for value in state_dict.values()):
        raise ValueError(
            "state_dict is the state dict of a model, all tensors; load it with model.load_state_dict, and pass what "
            "optimizer.state_dict() returned"
        )
    found = ", ".join(map(repr, list(state_dict)[:5])) or "nothing"
    raise ValueError(
        f"state_dict has {found} where an optimizer's has 'state' and 'param_groups'; pass what optimizer.state_dict() "
        "returned"
    )


def fitting(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], kept: Kept, names: Names
) -> dict[str, Any]:
    """``groups`` are the present ones, merged with those that are loaded."""
    state: dict[Any, dict[str, Any]] = {}
    params: dict[Any, Tensor] = {}
    given, anew, foreign = state_dict["state"], set(), set()
    for theirs, group in zip(state_dict["param_groups"], groups, strict=True):
        for key, param in zip(theirs["params"], group["params"], strict=True):
            if not given.get(key):
                continue
            if is_lazy(param):
                raise ValueError(
                    f"the state dict has a state for parameter {key!r}, which is lazy and has no shape yet; run a "
                    "forward pass first, then load it"
                )
            own = {names.others.get(name, name): value for name, value in given[key].items()}
            if "step" not in own and "step" in theirs:
                own["step"] = theirs["step"]  # apex and MindSpeed count by group
            needed = kept(group, param)
            mine = [name for name in needed if name in names.begin and name not in own]
            anew |= {*mine}
            # a running maximum begins at zero, whenever it is asked for
            there = [n for n in needed if n not in mine and (n in own or n != "max_exp_avg_sq")]
            _check(own, param, there, f"state {key!r}", names.optimizer)
            foreign |= {name for name in own if name not in (*names.roles, "step")}
            state[key] = {name: value for name, value in own.items() if name not in foreign}
            params[key] = param
    unknown = [key for key in given if key not in state and given[key]]
    if unknown:
        raise ValueError(f"the state dict has states of {unknown}, which are in none of its groups; it is incomplete")
    if anew:
        warnings.warn(
            f"the state dict has no {', '.join(sorted(anew))}, which {names.optimizer} keeps: it begins at the next "
            "step as a copy of the parameters; if the file was to bring it along, load another",
            stacklevel=8,  # where load_state_dict is called
        )
    if foreign:
        warnings.warn(
            f"the state dict has {', '.join(sorted(foreign))}, which {names.optimizer} does not keep: it is left "
            "out; to go on with it, load it with the optimizer that saved it",
            stacklevel=8,  # where load_state_dict is called
        )
    without_step = [{k: v for k, v in g.items() if k != "step"} for g in state_dict["param_groups"]]
    # all of it fits; divided before torch takes it over, since a device may have no room for all of it whole
    divided = {key: {n: _divided(n, value, params[key]) for n, value in own.items()} for key, own in state.items()}
    return {**state_dict, "state": divided, "param_groups": without_step}


def _divided(name: str, value: Any, param: Tensor) -> Any:
    if name == "step" or not isinstance(value, Tensor):
        return value
    return distributed_like(value.detach(), param)


def check_options(given: Mapping[str, Any], options: Mapping[str, Any], fixed: Mapping[str, Any], whose: str) -> None:
    """Refuses a group that was saved by an optimizer which computes something else, as far as its options tell."""
    ours = {**options, **fixed}
    for name, neutral in NEUTRAL.items():
        if name in given and name not in ours and given[name] != neutral:
            raise ValueError(
                f"the state dict has {name}={given[name]!r}, which {whose} does not support; load it with an optimizer "
                "that does"
            )
    if ("b1" in given) != ("b1" in ours) and ("betas" in given) != ("betas" in ours):
        have = ", ".join(sorted(given))
        raise ValueError(
            f"the state dict has the options of another optimizer than {whose} ({have}); load it with that one"
        )
    names = ("decoupled", "adam_w_mode", "decoupled_weight_decay")  # ours, apex's, torch's
    mine = next((name for name in names if name in ours), None)
    decoupled = True if mine is None else bool(ours[mine])
    for name in [] if mine in given and mine in options else names:
        if name in given and given.get("weight_decay") and bool(given[name]) != decoupled:
            saved, here = ("decoupled, as AdamW's", "an L2 penalty, as Adam's")[:: 1 if given[name] else -1]
            other = "AdamW" if given[name] else "Adam"
            raise ValueError(
                f"the state dict has {name}={given[name]}: its weight decay is {saved}, and {whose}'s is {here}, so "
                f"the training would go on differently; load it into {other}, or, to change over, remove {name!r} from "
                "its param_groups first"
            )


def _check(own: Mapping[str, Any], param: Tensor, kept: Sequence[str], which: str, whose: str) -> None:
    missing = [name for name in (*kept, "step") if name not in own]
    if missing:
        raise ValueError(
            f"{which} has no {', '.join(map(repr, missing))}, which {whose} keeps; it has {', '.join(sorted(own))}: "
            "is it another optimizer's? It must be loaded with one that keeps the same"
        )
    unknown = [name for name in own if name not in (*kept, *KNOWN)]
    if unknown:
        raise ValueError(
            f"{which} has {', '.join(map(repr, unknown))}, which {whose} does not keep: is it another optimizer's? It "
            "must be loaded with one that keeps the same"
        )
    for name in kept:
        checks.tensor(f"{which}: {name!r}", own[name])
        if own[name].shape != param.shape:
            raise ValueError(
                f"{which}: {name!r} has shape {tuple(own[name].shape)}, but the parameter has {tuple(param.shape)}; "
                "they must be equal: is it another model's?"
            )
    checks.one_number(f"{which}: 'step'", own["step"])
    step = float(own["step"])
    if not (0 <= step < math.inf and step == int(step)):
        raise ValueError(f"{which}: 'step' is {step}; it must be a whole number, at least 0")
