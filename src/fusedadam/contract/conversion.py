"""State dicts that other optimizers have saved: converted to our names, or refused.

Everything is checked before anything is loaded, and an error says what does not fit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusedadam import checks
from fusedadam.contract.declarations import Group
from fusedadam.contract.role_arrays import LOW, from_state_dict, kept_as, loaded_as
from fusedadam.contract.storage import States
from fusedadam.formats import arrays_by_suffix, names_in
from fusedadam.tensors.factored import distributed_in, shape_in
from fusedadam.tensors.layout import PER_BLOCK, along_channels, block_shape

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

# Options of other optimizers that not all of ours have, with the value that changes nothing
NEUTRAL = {
    "amsgrad": False, "cautious": False, "update_clipping": False, "nesterov": False, "bias_correction": True,
    "beta3_warmup": None,
}  # fmt: skip
LAMBS = ("use_global_grad_norm", "max_weight_norm", "grad_averaging")  # options that only LAMBs have, ours or apex's
# What may be left out, with a warning: the rest of the state is of use without it
KNOWN = ("step", "max_exp_avg_sq", "ema_params")


def check_is_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Refuses the model's state dict, and a whole checkpoint."""
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


def keys_of_params(state_dict: Mapping[str, Any]) -> set[Any]:
    """Of parameters in ``state_dict["state"]``, where users may put anything else, as torch allows."""
    return {key for group in state_dict["param_groups"] for key in group["params"]}


def convert(optimizer: type[FusedOptimizer], state_dict: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """The state dict as our optimizer would have saved it. ``groups``: ours, merged with the ones to be loaded."""
    keys = keys_of_params(state_dict)
    others = {key: value for key, value in state_dict["state"].items() if key not in keys}
    loaded: dict[Any, dict[str, Any]] = {}
    missing, foreign, lost_low = set[str](), set[str](), False
    for saved_group, group in zip(state_dict["param_groups"], groups, strict=True):
        for key, param in zip(saved_group["params"], group["params"], strict=True):
            saved = _without_none(state_dict["state"].get(key))
            if not saved:
                continue
            if is_lazy(param):
                raise ValueError(
                    f"the state dict has a state for parameter {key!r}, which is lazy and has no shape yet; run a "
                    "forward pass first, then load it"
                )
            state = {optimizer.also_called.get(name, name): value for name, value in saved.items()}
            if "step" not in state and "step" in saved_group:
                state["step"] = saved_group["step"]  # apex and MindSpeed count by group
            if "step" not in state and optimizer.step_if_uncounted is not None:
                state["step"] = optimizer.step_if_uncounted
            begins, kept = _begins_and_kept(optimizer, group, param, state)
            missing |= {*begins}
            _check(optimizer, f"state {key!r}", state, param, kept)
            ours = {"step", *(array for role in optimizer.rule.roles for array in names_in(role, state))}
            foreign |= state.keys() - ours
            # sharded before torch moves it: a device may have no room for the whole
            sharded = {n: _sharded(n, v, param, optimizer.states) for n, v in state.items() if n in ours}
            formats = optimizer.storage_of(group, param).formats
            loaded[key] = loaded_as(param, sharded, group, formats, optimizer.states)
            lost_low = lost_low or (LOW in sharded and LOW not in loaded[key])
    alike = {int, *map(type, keys)}  # a state under such a key is another parameter's; the rest is the user's own
    unknown = [key for key, value in others.items() if type(key) in alike and isinstance(value, Mapping) and value]
    if unknown:
        raise ValueError(f"the state dict has states of {unknown}, which are in none of its groups; it is incomplete")
    if missing:
        warnings.warn(
            f"the state dict has no {', '.join(sorted(missing))}, which {optimizer.__name__} keeps: it begins at the "
            "next step as a copy of the parameters; if the file should have it, load another one",
            stacklevel=8,  # where load_state_dict is called
        )
    if foreign:
        warnings.warn(
            f"the state dict has {', '.join(sorted(foreign))}, which {optimizer.__name__} does not keep: it is left "
            "out; to go on with it, load it with the optimizer that saved it",
            stacklevel=8,
        )
    if lost_low:
        warnings.warn(
            "the state dict has param_low, the bits that bfloat16 weights lack, and this optimizer does not keep them: "
            "they are left out; to go on with them, give it storage='exact', '16bit' or '8bit', as the one that saved",
            stacklevel=8,
        )
    without_step = [{k: v for k, v in g.items() if k != "step"} for g in state_dict["param_groups"]]
    return {**state_dict, "state": {**loaded, **others}, "param_groups": without_step}


def _begins_and_kept(
    optimizer: type[FusedOptimizer], group: Group, param: Tensor, state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """The states that begin as copies of the parameter, and those that the state dict must have, or has in addition."""
    needed, optional = optimizer.specialized(group, param).states, optimizer.rule.optional_states
    present = {role for role in (*optimizer.rule.roles, *KNOWN) if names_in(role, state)}
    begins = [name for name in needed if optimizer.states[name].initial == "param" and name not in present]
    # what an option switches on begins then, such as a running maximum with amsgrad
    required = [n for n in needed if n not in begins and (n in present or n not in optional)]
    if present & {*optimizer.states} and not present & {*needed}:  # of the rule's other branch, as Muon's AdamW
        required = [*needed]
    if _is_at_zero(state):  # whatever is missing begins with the first step
        required = [name for name in required if name in present]
    return begins, [*required, *(name for name in optional if name in present and name not in required)]


def _without_none(state: Any) -> Any:
    """A saved state without what it only names: torch's SGD may have a momentum_buffer of None."""
    return {name: value for name, value in state.items() if value is not None} if isinstance(state, Mapping) else state


def _is_at_zero(state: Mapping[str, Any]) -> bool:
    step = state.get("step")
    if isinstance(step, Tensor):
        return step.numel() == 1 and float(step) == 0
    return isinstance(step, (int, float)) and step == 0


def _by(role: str, states: States) -> str:
    return states[role].by if role in states else "element"


def _sharded(name: str, value: Any, param: Tensor, states: States) -> Any:
    if name == "step" or not isinstance(value, Tensor):
        return value
    return from_state_dict(name, distributed_in(_by(name, states), value.detach(), param))


def check_options(given: Mapping[str, Any], options: Mapping[str, Any], fixed: Mapping[str, Any], whose: str) -> None:
    """Refuses a saved group whose options show that another computation was meant."""
    ours = {**options, **fixed}
    for name, neutral in NEUTRAL.items():
        if name in given and name not in options and given[name] != fixed.get(name, neutral):
            raise ValueError(
                f"the state dict has {name}={given[name]!r}, which {whose} does not support; load it with an optimizer "
                "that does"
            )
    is_of_bert = ("b1" in given) != ("b1" in ours) and ("betas" in given) != ("betas" in ours)
    both_rmsprop = "alpha" in given and "alpha" in options  # torch's and TensorFlow's, with states of the same names
    is_lamb, we_are_lamb = (any(name in those for name in LAMBS) for those in (given, options))
    both_lamb = is_lamb and we_are_lamb  # the paper's and torch_npu's, which says nothing about bias correction
    sgd_and_muon = ("dampening" in given and "ns_steps" in options) or ("ns_steps" in given and "dampening" in options)
    if (
        is_of_bert
        or sgd_and_muon  # whose buffers have the same name, and other sizes
        or is_lamb != we_are_lamb
        or (both_rmsprop and ("lr_in_momentum" in given) != ("lr_in_momentum" in options))
        or (both_lamb and ("bias_correction" in given) != ("bias_correction" in options))
    ):
        have = ", ".join(sorted(given))
        raise ValueError(
            f"the state dict has the options of another optimizer than {whose} ({have}); load it with that one"
        )
    names = ("decoupled", "adam_w_mode", "decoupled_weight_decay")  # ours, apex's, torch's
    our_name = next((name for name in names if name in ours), None)
    decoupled = True if our_name is None else bool(ours[our_name])
    for name in [] if our_name in given and our_name in options else names:
        if name in given and given.get("weight_decay") and bool(given[name]) != decoupled:
            saved, here = ("decoupled, as AdamW's", "an L2 penalty, as Adam's")[:: 1 if given[name] else -1]
            other = "AdamW" if given[name] else "Adam"
            raise ValueError(
                f"the state dict has {name}={given[name]}: its weight decay is {saved}, and {whose}'s is {here}, so "
                f"the training would go on differently; load it into {other}, or, to change over, remove {name!r} from "
                "its param_groups first"
            )


def _check_array(title: str, role: str, name: str, state: Mapping[str, Any], param: Tensor, by: str) -> None:
    """Refuses an array whose dtype or shape is not what its name says."""
    value, shape = state[name], shape_in(by, param.shape)
    arrays = arrays_by_suffix()[name.removeprefix(role)]
    in_bytes = any(array.dtype == torch.int16 for array in arrays)  # as state_dict() has them
    dtypes = [*(array.dtype for array in arrays), *([torch.uint8] if in_bytes else [])]
    checks.tensor(title, value, checks.dtypes_like(param, by) if name == role else dtypes)
    by_block = any(array.by == "block" for array in arrays)
    if by_block and len(shape):
        blocks = block_shape(shape, along_channels(shape, value.shape))  # of either memory format
        shape = blocks if blocks.numel() * PER_BLOCK == shape.numel() else shape
    if in_bytes and value.dtype == torch.uint8:
        shape = torch.Size((*shape, 2))
    if value.shape != shape:
        fits = f"it needs one for {PER_BLOCK} neighbors" if by_block else "they must be equal"
        fits = fits if by == "element" else f"with one value for each {by} it must be {tuple(shape)}"
        raise ValueError(
            f"{title} has shape {tuple(value.shape)}, but the parameter has {tuple(param.shape)}; {fits}: is it "
            "another model's?"
        )


def _check(
    optimizer: type[FusedOptimizer], which: str, state: Mapping[str, Any], param: Tensor, required: Sequence[str]
) -> None:
    whose, states = optimizer.__name__, optimizer.states
    missing = [name for name in required if not names_in(name, state)] + ["step"] * ("step" not in state)
    if missing:
        raise ValueError(
            f"{which} has no {', '.join(map(repr, missing))}, which {whose} keeps; it has {', '.join(sorted(state))}: "
            "is it another optimizer's? It must be loaded with one that keeps the same"
        )
    arrays = {array for role in (*required, *KNOWN, "param") for array in names_in(role, state)}
    unknown = [name for name in state if name not in (*arrays, "step")]
    if unknown:
        raise ValueError(
            f"{which} has {', '.join(map(repr, unknown))}, which {whose} does not keep: is it another optimizer's? It "
            "must be loaded with one that keeps the same"
        )
    for role in (*required, "param"):
        for name in names_in(role, state):
            _check_array(f"{which}: {name!r}", role, name, state, param, _by(role, states))
    torn = [role for role in required if names_in(role, state) and kept_as(role, state, states) is None]
    if torn:
        names = ", ".join(map(repr, names_in(torn[0], state)))
        raise ValueError(
            f"{which} has {names}, which is only a part of what {torn[0]!r} is kept in; is the file incomplete?"
        )
    checks.one_number(f"{which}: 'step'", state["step"])
    step = float(state["step"])
    if not (0 <= step < math.inf and step == int(step)):
        raise ValueError(f"{which}: 'step' is {step}; it must be a whole number, at least 0")
