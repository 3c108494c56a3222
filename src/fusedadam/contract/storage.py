"""Which format each role is kept in: what ``storage=`` asks for, and what a state and a parameter allow.

What a role may be kept in follows from what its state declares: whether it is signed, how slowly it decays, whether
another state is its running maximum or is subtracted from it, whether it is a copy of the parameter. What a parameter
may be kept in follows from its dtype and its shape as a whole, never from a shard: another mesh must not change the
precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusedadam.contract.declarations import Group, State
from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS, Format
from fusedadam.rules.rule import SpecializedRule
from fusedadam.tensors.layout import PER_BLOCK, is_channels_last, is_row_major
from fusedadam.tensors.shards import cuts_blocks, is_dtensor

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

Storage: TypeAlias = str | Mapping[str, str] | None
States: TypeAlias = Mapping[str, State]

# By what a role is: the parameter, a copy of it, or any other state
PRESETS = {
    "exact": {"param": "bf16+16", "copy": "bf16+16", "state": "float32"},
    "16bit": {"param": "bf16+16", "copy": "bf16+16", "state": "bf16"},
    "8bit": {"param": "bf16+8", "copy": "bf16+8", "state": "slice8"},
}
EXACT = PRESETS["exact"]
LINEAR = "linear8"  # in place of slice8 where a rule orthogonalizes: an error counts by its size, wherever it is
SMALLEST = 4096  # elements of a parameter whose states are kept in 8 bits
SLOWEST = 0.99  # decay of a signed average in 8 bits: above it, the noise drowns the average
# By what a state declares about another one: why both stay float32
NEED_FLOAT32 = {
    "maximum_of": "the maximum of a rounded average only grows",
    "subtracted_from": "a difference of values that were rounded is mostly rounding error",
}
OTHER_DTYPES = ("state_dtype", "ema_dtype")  # options that ``storage`` takes the place of


class Choice(NamedTuple):
    """The format of each role, and of roles that are kept wider than asked for, why. A role without a format is a plain
    tensor, and its dtype tells."""

    formats: dict[str, str]
    reasons: dict[str, str]

    @property
    def is_exact(self) -> bool:
        return not any(FORMATS[fmt].is_deferred for fmt in self.formats.values())


def check(optimizer: type[FusedOptimizer], group: Group) -> None:
    """Refuses a ``storage`` that is unknown, or that a role cannot have."""
    storage = group.get("storage")
    if storage is None:
        return
    given = [name for name in OTHER_DTYPES if group.get(name) is not None]
    if given:
        raise ValueError(
            f"storage={storage!r} and {given[0]}={group[given[0]]} exclude each other; leave {given[0]} out, or name a "
            "format for each state: storage={'exp_avg': 'bf16', ...}"
        )
    roles = ("param", *optimizer.states)
    if isinstance(storage, str):
        if storage not in PRESETS:
            raise ValueError(
                f"storage={storage!r} is unknown; use one of {_quoted(PRESETS)}, None, or a format for each role: "
                f"{{{_quoted(roles[1:2])}: 'bf16', ...}}"
            )
        return
    if not isinstance(storage, Mapping):
        raise TypeError(
            f"storage={storage!r} is a {type(storage).__name__}; it must be one of {_quoted(PRESETS)}, None, or a dict "
            "of formats by role"
        )
    for role, title in storage.items():
        if role not in roles:
            raise ValueError(f"storage has {role!r}, which {optimizer.__name__} does not keep; it has {_quoted(roles)}")
        _check_format(role, title, optimizer.states)


def _check_format(role: str, title: Any, states: States) -> None:
    allowed = dict.fromkeys(fmt.title for fmt in FORMATS.values() if fmt.title and may_hold(fmt, role, states))
    if isinstance(title, str) and title in allowed:
        return
    known = {fmt.title for fmt in FORMATS.values() if fmt.title}
    why = "a format that it cannot have" if isinstance(title, str) and title in known else "an unknown format"
    raise ValueError(f"storage[{role!r}]={title!r} is {why}; use one of {_quoted(allowed)}")


def choose(optimizer: type[FusedOptimizer], group: Group, param: Tensor, specialized: SpecializedRule) -> Choice:
    """``specialized``: the rule under the group's flags. Raises if the parameter allows no format."""
    storage = group.get("storage")
    if storage is None or is_lazy(param):
        return Choice({}, {})
    states = optimizer.states
    roles = [role for role in specialized.roles if role != "grad"]
    if param.is_complex():
        return Choice({}, dict.fromkeys(roles, "complex"))
    if param.dtype == torch.float64:
        return Choice(dict.fromkeys(roles, "f64"), dict.fromkeys(roles, "float64"))
    if param.dtype == torch.float16 and storage == "exact":
        raise ValueError(
            "storage='exact' needs bfloat16 or float32 parameters, and one is float16, which has no room for the bits "
            "that it lacks; use model.bfloat16(), or storage='16bit' or '8bit', which keep float16 weights as they are"
        )
    asked = {role: _asked(storage, role, states) for role in roles}
    titles, reasons = dict(asked), dict[str, str]()
    if isinstance(storage, str) and specialized.product is not None:
        titles |= {role: LINEAR for role, title in asked.items() if title == "slice8" and states[role].signed}
    _keep_related_states_wide(storage, titles, reasons, states)
    _keep_slow_averages_wide(storage, titles, reasons, optimizer, group)
    wanted = [format_of(title, role, states) for role, title in titles.items()]
    why = _not_eligible(param, wanted, specialized)
    if why is not None:
        wide = {role: EXACT[_kind(role, states)] for role in roles}
        reasons |= {role: why for role in roles if titles[role] != wide[role]}
        titles = wide
    formats = {role: format_of(title, role, states).name for role, title in titles.items()}
    if param.dtype != torch.bfloat16:
        formats["param"] = FORMAT_OF_DTYPE[param.dtype]
        reasons.pop("param", None)  # it is as wide as it was
        for role in roles:  # a copy of a float32 parameter needs no low bits beside it
            if param.dtype == torch.float32 and _kind(role, states) == "copy" and titles[role] == "bf16+16":
                formats[role] = "f32"
    if any(FORMATS[fmt].by_block for fmt in formats.values()) and cuts_blocks(param):
        raise RuntimeError(
            f"a DTensor of shape {tuple(param.shape)} is sharded within blocks of {PER_BLOCK} neighbors that share an "
            f"exponent; shard it along dimension 0 (a matrix also into multiples of {PER_BLOCK} columns), or put it "
            "into a group with storage='16bit'"
        )
    return Choice(formats, reasons)


def key(optimizer: type[FusedOptimizer], group: Group) -> Any:
    """Equal for groups that keep alike parameters alike."""
    storage = group.get("storage")
    if storage is None:
        return None
    return dict(storage) if isinstance(storage, Mapping) else storage, group.get("seed", 0), _slow(optimizer, group)


def format_of(title: str, role: str, states: States) -> Format:
    """The format that a title means for a role."""
    return next(fmt for fmt in FORMATS.values() if fmt.title == title and may_hold(fmt, role, states))


def may_hold(fmt: Format, role: str, states: States) -> bool:
    if role == "param":
        return fmt.is_for == "weights"
    if states[role].by != "element":  # there are few of them
        return fmt.name == "f32"
    is_copy = _kind(role, states) == "copy"
    signs = ("anything", "signed" if states[role].signed else "non-negative")
    return fmt.holds in signs and fmt.is_for in (("weights", "all") if is_copy else ("states", "all"))


def _kind(role: str, states: States) -> str:
    return "param" if role == "param" else "copy" if states[role].initial == "param" else "state"


def _asked(storage: Any, role: str, states: States) -> str:
    """A role that a dict does not name is kept exactly."""
    kind = _kind(role, states)
    if kind != "param" and states[role].by != "element" and isinstance(storage, str):
        return EXACT["state"]
    return PRESETS[storage][kind] if isinstance(storage, str) else storage.get(role, EXACT[kind])


def _keep_related_states_wide(
    storage: Storage, titles: dict[str, str], reasons: dict[str, str], states: States
) -> None:
    """Keeps both of two states as float32 if one is computed with, or used with, the other so that noise would stay."""
    for role in [role for role in titles if role in states]:
        for relation, why in NEED_FLOAT32.items():
            other = getattr(states[role], relation)
            for each in (role, other) if other is not None else ():
                if each not in titles or titles[each] == "float32":
                    continue
                if not isinstance(storage, str):
                    raise ValueError(
                        f"storage[{each!r}]={titles[each]!r} cannot be used with {other if each == role else role}: "
                        f"{why}; use 'float32', or leave {each!r} out"
                    )
                titles[each], reasons[each] = "float32", why


def _keep_slow_averages_wide(
    storage: Storage, titles: dict[str, str], reasons: dict[str, str], optimizer: type[FusedOptimizer], group: Group
) -> None:
    for role in _slow(optimizer, group):
        if role not in titles or not format_of(titles[role], role, optimizer.states).by_block:
            continue
        decay = optimizer.states[role].decay
        if not isinstance(storage, str):
            raise ValueError(
                f"storage[{role!r}]={titles[role]!r} cannot be used with {decay} above {SLOWEST}: the noise of 8 bits "
                "drowns so slow an average; use 'bf16' or 'float32'"
            )
        titles[role] = "bf16"
        reasons[role] = f"{decay} is above {SLOWEST}: the noise of 8 bits drowns so slow an average"


def _slow(optimizer: type[FusedOptimizer], group: Group) -> tuple[str, ...]:
    """The signed states that decay slowly."""
    signed = [(name, state.decay) for name, state in optimizer.states.items() if state.signed and state.decay]
    return tuple(name for name, decay in signed if float(optimizer.value(group, decay)) > SLOWEST)


def _not_eligible(param: Tensor, formats: Sequence[Format], specialized: SpecializedRule) -> str | None:
    """Why a parameter is kept exactly; None if it may have these formats."""
    if not any(fmt.is_deferred for fmt in formats):
        return None
    if getattr(param, "_fsdp_flattened", False):
        return "flattened by FullyShardedDataParallel"
    by_block, by_rows = any(fmt.by_block for fmt in formats), is_row_major(param)
    # the shards of a channels_last DTensor may be stored in any order
    is_factored = specialized.is_factored  # kernels walk along the last dimension, so that blocks must, too
    by_matrix = is_factored or specialized.product is not None
    along_channels = by_block and not by_matrix and not is_dtensor(param) and is_channels_last(param)
    if not by_rows and not along_channels:
        return "not row-major"
    if not by_block:
        return None
    if param.dim() < 2:
        return "fewer than 2 dimensions"
    if param.numel() < SMALLEST:
        return f"fewer than {SMALLEST:,} elements"
    if along_channels:
        if param.shape[1] % PER_BLOCK:
            return f"channels_last, and channels not divisible by {PER_BLOCK}"
        if param.shape[-1] % PER_BLOCK == 0:  # the array by block could not tell along which of the two blocks run
            return f"channels_last, and last dimension divisible by {PER_BLOCK}"
        return None
    if param.shape[-1] % PER_BLOCK == 0:
        return None
    if is_factored or param.dim() == 2:
        return f"last dimension not divisible by {PER_BLOCK}"
    if param.shape[1:].numel() % PER_BLOCK:
        return f"product of all dimensions but the first not divisible by {PER_BLOCK}"
    return None


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
