"""The base of all optimizers here: torch's contract once for all, and the path of a step.

step()
  -> have the tensors moved since the last step?               snapshot.py
  -> launch tables, kept from step to step                     plan.py, launch_table.py
  -> a row of scalars for each parameter, in float64           the rule's scalars
  -> one launch for each (device, dtypes, flags)               backends/
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from fusedadam import backends, checks
from fusedadam.engine.launch import Amp, norm_of
from fusedadam.engine.plan import Participant, Plan, Replaced
from fusedadam.engine.snapshot import Tensors
from fusedadam.engine.snapshot_names import CHANGED, MOVED
from fusedadam.engine.step_counts import StepCounts
from fusedadam.optimizers import distributed, memory, state_dicts
from fusedadam.optimizers.group_options import (
    Flags,
    GroupOptions,
    Source,
    only_known_there,
    readable,
    without_rounding_error,
)
from fusedadam.rules.rule import OWN_FLAGS, Options, Rule, SpecializedRule
from fusedadam.rules.tracing import MAY_BE_ON_DEVICE
from fusedadam.tensors.shards import is_dtensor, local, with_local
from fusedadam.tensors.transfer import capturing, outside_inference_mode

if TYPE_CHECKING:
    from fusedadam.in_backward import InBackward

Group: TypeAlias = dict[str, Any]
NOT_OPTIONS = ("self", "params", "__class__")
ATTEMPTS = 10  # to find all tensors as they were a moment ago
Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class State:
    """How a state begins, and which option of the group names its dtype (None there: the parameter's own)."""

    copy_of_param: bool = False
    dtype_option: str = "state_dtype"


class FusedOptimizer(torch.optim.Optimizer):
    """A subclass names its ``rule`` and checks its own options; everything else is here."""

    rule: ClassVar[Rule]
    fixed: ClassVar[Mapping[str, Any]] = {}  # flags and hyper-parameters that are the same for every group
    states: ClassVar[Mapping[str, State]] = {}  # those that do not simply begin as zeros
    also_called: ClassVar[Mapping[str, str]] = {}  # our names of states for others', whose state dicts are loaded
    _no_steps: str | None = None  # why stepping is refused at the moment
    _in_graphs: list[Plan]
    _in_backward: InBackward | None = None
    _has_a_part = False  # of the model's parameters; other processes have the others
    _plan: Plan | None
    _last_plan: Plan | None
    _groups: list[Any] | None  # what a plan takes from the groups
    _read: GroupOptions
    _only_asked: bool
    _steps: StepCounts

    def __init__(self, params: Params, arguments: Mapping[str, Any]) -> None:
        """``arguments``: the ``locals()`` of the subclass's own ``__init__``, which are its options."""
        self._forget()
        checks.iterable_of_parameters("params", params)
        given: Any = params if isinstance(params, (Tensor, Mapping)) else list(params)
        defaults = {name: value for name, value in arguments.items() if name not in NOT_OPTIONS}
        self.check(defaults)
        with _as_before_on_error([g for g in given if isinstance(g, dict)]):
            super().__init__(given, defaults)
        self._has_a_part = distributed.made_by_zero()
        self._check_sums_are_whole()

    def check(self, group: Group) -> None:
        """Refuses options that are out of range; called for each group before it is taken in."""
        checks.number("lr", group["lr"])
        checks.number("weight_decay", group["weight_decay"])
        checks.torch_options(group)
        checks.max_grad_norm(group.get("max_grad_norm"))
        if group.get("backend") is not None:
            backends.check(group["backend"])

    def add_param_group(self, param_group: Group) -> None:
        with _as_before_on_error([param_group] if isinstance(param_group, dict) else []):
            if isinstance(param_group, dict):
                if "params" in param_group:
                    checks.iterable_of_parameters("params", param_group["params"])
                self.check({**self.defaults, **param_group})
            count = len(self.param_groups)
            try:
                super().add_param_group(param_group)
                params = self.param_groups[-1]["params"]
                if len(set(map(id, params))) < len(params):
                    raise ValueError("params has a parameter twice in one group; list each of them once")
                distributed.check_not_flat(params, self)
                for param in params:
                    if not is_lazy(param):  # made by a first forward pass, and checked when it has a gradient
                        checks.written("param", param)
                    if param_group.get("backend") is not None:
                        backends.check(param_group["backend"], param.device)
            except BaseException:
                del self.param_groups[count:]
                raise
        self._plan = None

    def __repr__(self) -> str:
        return memory.described(super().__repr__(), self)

    def memory_summary(self) -> str:
        """A table to print: what is kept on each device, of parameters, gradients, each state, and beside them."""
        return memory.summary(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler: gradients may come scaled, and whether they are finite is read on the device.

        Lightning reads True as "gradients must be scaled" and refuses to clip. Ours may also come unscaled.
        """
        if self._in_backward is not None:
            raise RuntimeError(
                "this optimizer steps in backward, where gradients would still be scaled by the GradScaler; use "
                "bfloat16 without a scaler, or do not step in backward"
            )
        if distributed.are_flat(self._params()):  # whether another process has found an infinity is not known here
            return False
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return not asking.startswith(("lightning.", "lightning_fabric.", "pytorch_lightning."))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # under torch.compile: one break of the graph, and kernels of our own
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one step. ``closure``, if given, reevaluates the model and returns the loss."""
        self._check_may_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.end()
        # modes and subclasses that look at every use of a tensor have nothing to see here, and would take their time
        with torch._C.DisableTorchFunction():
            self._step()
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim. Where steps are taken in backward, it also ends an iteration that broke off."""
        super().zero_grad(set_to_none)
        if self._in_backward is not None:
            self._in_backward.give_up()

    def _step(self) -> None:
        params, counted = self._params(), len(self.state)
        flags, options = self._options()
        amp = Amp(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        on_device = self._counts_on_device(options, amp)
        graph = capturing()
        plan, tensors = self._current_plan(params, flags, on_device, graph)
        self._last_plan = plan
        if graph:
            self._in_graphs.append(plan)  # its memory is what the graph will use
            self._steps.in_graph = True
        else:
            self._plan = plan
        if not counted and distributed.only_wants_states():
            self._only_asked = True
            return
        self._begin_copies()
        if amp.found_inf is not None:
            amp = amp._replace(found_inf=distributed.found_anywhere(amp.found_inf, plan.meshes))
        if plan.is_hosted and amp.found_inf is not None and amp.found_inf.item() != 0:
            return
        plan.run(params, tensors, self._steps, options, amp)

    def _current_plan(
        self, params: list[Tensor], flags: list[Flags], on_device: bool, graph: bool
    ) -> tuple[Plan, Tensors]:
        """The last step's plan if it is still good, else a new one; and the tensors that it works on."""
        # taken away first: if this is interrupted between the look and place(), the next step makes another plan
        plan, self._plan = self._plan, None
        each = zip(self.param_groups, flags, strict=True)
        groups = [on_device, *((len(g["params"]), g.get("backend"), own) for g, own in each)]
        if graph or groups != self._groups:
            plan = None
        for _ in range(ATTEMPTS):
            if plan is None:
                try:
                    plan, self._groups = self._make_plan(params, flags, on_device), groups
                except Replaced:
                    continue
            answer, tensors = plan.snapshot.compare(params, self.state)
            if answer == MOVED:
                plan.place()
            if answer != CHANGED and plan.snapshot.is_of_expected:
                return plan, tensors
            plan = None
        raise RuntimeError(
            "another thread replaces parameters, gradients or states of this optimizer faster than step() can look at "
            "them; stop it before the step, or share a lock with it"
        )

    def looks_at_several(self) -> bool:
        """Whether a step sums over several parameters, under the present options."""
        return any(self._whole_special(own).shared for own in self._options()[0])

    def sums(self) -> bool:
        """Whether a step sums at all, under the present options, over matrices if not over vectors."""
        return any(self._whole_special(own).has_sums for own in self._options()[0])

    def _whole_special(self, flags: Flags) -> SpecializedRule:
        return self.rule.special({**dict(zip(self._flags, flags, strict=True)), **dict.fromkeys(OWN_FLAGS, True)})

    def _check_sums_are_whole(self) -> None:
        """Refuses to sum over parts of the model as if they were all of it."""
        distributed.check_not_flat(self._params(), self)
        if self._has_a_part and self.looks_at_several():
            raise ValueError(
                "ZeroRedundancyOptimizer gives each process some of the parameters, so a norm over several of them is "
                "not the model's; leave max_grad_norm out (BertAdam: use clip='parameter'), and clip with "
                "fusedadam.clip_grad_norm_ before step()"
            )

    def _counts_on_device(self, options: list[Options], amp: Amp) -> bool:
        """Whether the host does not know, or is not to be asked, which step this is or what a scalar is."""
        tensors = [t for own in (*options, amp) for t in own if isinstance(t, Tensor)]
        return (
            self._steps.on_device
            or any(group.get("capturable") for group in self.param_groups)
            or any(t.device.type != "cpu" for t in tensors)
        )

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step, before clipping, on their device; None if nothing was clipped."""
        if self._last_plan is None:
            return None
        return norm_of(self._last_plan.launches, "grad_norm")

    def _report(self, name: str) -> dict[int, float]:
        """A value of the last step for each parameter that took part, by its position among all."""
        reports = {} if self._last_plan is None else self._last_plan.report(name)
        if self._in_backward is not None:
            for k, param in enumerate(self._params()):
                if param in self._in_backward.alone:
                    reports.update(zip([k], self._in_backward.alone[param]._report(name).values(), strict=False))
        return reports

    def _params(self) -> list[Tensor]:
        if len(self.param_groups) == 1:
            only = self.param_groups[0]["params"]
            return only if type(only) is list else list(only)
        return [p for group in self.param_groups for p in group["params"]]

    @outside_inference_mode()
    def _make_plan(self, params: list[Tensor], flags: list[Flags], on_device: bool) -> Plan:
        self._check_sums_are_whole()
        members, position = [], 0
        for k, group in enumerate(self.param_groups):
            chosen = dict(zip(self._flags, flags[k], strict=True))
            for param in group["params"]:
                grad = param.grad
                if grad is not None or is_dtensor(param):
                    special = self.rule.special(chosen, param)
                    if grad is not None or distributed.is_waited_for(param, special):
                        backend = backends.choose(param.device, group.get("backend"))
                        new_state = functools.partial(self._new_state, param, group)
                        members.append(Participant(param, grad, position, k, special, backend, new_state))
                position += 1
        return Plan(self.rule, members, params, self.state, self._steps, on_device)

    def _new_state(self, param: Tensor, group: Group, name: str) -> Tensor:
        kind, here = self.states.get(name, State()), local(param)
        empty = torch.empty_like(here, dtype=group.get(kind.dtype_option), requires_grad=False)
        return with_local(param, empty.copy_(here) if kind.copy_of_param else empty.zero_())

    def _begin_copies(self) -> None:
        """States that begin as copies do so with the parameters that the first step finds, whenever they were made."""
        self._renew_copies()
        self._only_asked = False

    def _renew_copies(self) -> None:
        """Until that step, whoever looks at them sees what they would begin with now."""
        if not self._only_asked:
            return
        copies = [name for name, kind in self.states.items() if kind.copy_of_param]
        with torch.no_grad():
            for param, state in self.state.items():
                for name in copies:
                    if name in state:
                        local(state[name]).copy_(local(param))

    def _options(self) -> tuple[list[Flags], list[Options]]:
        """The flags and the hyper-parameters of each group, checked."""
        source = Source(self.defaults, self._flags, self.rule.hyper_parameters, self._option, self._check_changed)
        return self._read.read(self.param_groups, source)

    def _check_changed(self, group: Group, names: Sequence[str]) -> None:
        """Refuses options that somebody has put into a group later. A scheduler changes a number at a time."""
        if names == ["lr"] and type(group["lr"]) is float:
            checks.number("lr", without_rounding_error(group["lr"]))
        else:
            self.check(readable(group))

    @property
    def _flags(self) -> list[str]:
        """Those that a group decides; others are each parameter's own."""
        return [name for name in self.rule.flags if name not in OWN_FLAGS]

    def _option(self, group: Group, name: str) -> Any:
        if name in self.fixed:
            return self.fixed[name]
        if name in ("beta1", "beta2"):
            return group["betas"][name == "beta2"]
        # not every class has the options below
        if name == "maximize":
            return group.get(name, False)
        max_grad_norm = group.get("max_grad_norm")
        if name == "clipped":
            return max_grad_norm is not None and float(max_grad_norm) != 0
        if name == "max_grad_norm":
            return math.inf if max_grad_norm is None else max_grad_norm
        return group[name]

    def _check_may_step(self) -> None:
        if self._no_steps is not None:
            raise RuntimeError(self._no_steps)
        if capturing():
            self._check_may_be_captured()

    def _check_may_be_captured(self) -> None:
        """What a CUDA graph does not see on the device it would freeze."""
        where = "step() is being captured in a CUDA graph"
        for group in self.param_groups:
            if not group.get("capturable"):
                raise RuntimeError(
                    f"{where}, but step counts and lr live on the host and would be frozen; make the optimizer with "
                    "capturable=True, and take a step before the capture"
                )
            if isinstance(group["lr"], Tensor) and group["lr"].device.type == "cpu":
                raise RuntimeError(f"{where}, but lr is a tensor on the CPU and would be frozen; move it to the device")
            read = [n for n in only_known_there(group) if n in self.defaults and n not in MAY_BE_ON_DEVICE]
            if read:
                raise RuntimeError(
                    f"{where}, but {', '.join(read)} would have to be read from the device; only lr and "
                    "weight_decay may be tensors there, give the others as numbers"
                )
            for param in group["params"]:
                step = self.state[param].get("step") if param in self.state else None
                if param.grad is not None and not (isinstance(step, Tensor) and step.device == param.device):
                    raise RuntimeError(
                        f"{where}, but a parameter on {param.device} has no state there yet; take a step before the "
                        "capture (a CPU, or backend='eager', cannot be captured)"
                    )

    def _forget(self) -> None:
        """Nothing is known about the last step: the next one looks at everything."""
        self._plan = self._last_plan = self._groups = None
        self._read = GroupOptions()
        self._only_asked = False  # states are there because someone asked for them, and no step has been taken
        self._steps = StepCounts()
        self._in_graphs = getattr(self, "_in_graphs", [])  # a graph may be replayed whatever else is forgotten
        if self._in_backward is not None:
            self._in_backward.alone.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; it also says, as torch's does, how weights decay."""
        self._renew_copies()

        def say_how_weights_decay(_: Any, state_dict: dict[str, Any]) -> None:
            for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
                saved["decoupled_weight_decay"] = bool(self._option(group, "decoupled"))

        if "decoupled" not in self.rule.flags:
            return super().state_dict()
        with contextlib.ExitStack() as stack:  # a hook, and the first: the user's own may return anything
            stack.callback(self.register_state_dict_post_hook(say_how_weights_decay, prepend=True).remove)
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but each state keeps its own dtype, and nothing is shared with ``state_dict``.

        Also takes those of torch's Adam and AdamW, of the adamp package, NVIDIA's BertAdam, apex and MindSpeed, into
        the optimizer that computes the same. What does not fit is refused, and nothing is loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict is a {type(state_dict).__name__}; it must be what optimizer.state_dict() returned; open "
                "a file with torch.load first"
            )
        before = [dict(group) for group in self.param_groups]
        loaded: dict[str, Any] = {}

        def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:  # as the user's own hooks have left it
            loaded.update(self._fitting(state_dict))
            return loaded

        def keep_dtypes(_: Any) -> None:
            saved = [key for group in loaded["param_groups"] for key in group["params"]]
            for key, param in zip(saved, self._params(), strict=True):
                for name, value in loaded["state"].get(key, {}).items():
                    if isinstance(value, Tensor):
                        device = torch.device("cpu") if name == "step" else param.device
                        self.state[param][name] = value.detach().to(device, copy=True)
            for group, mine, theirs in zip(self.param_groups, before, loaded["param_groups"], strict=True):
                # what the saved group does not say stays; so does the backend, a choice for this machine
                group.update({name: mine[name] for name in mine if name not in theirs or name == "backend"})

        state, groups = self.state, self.param_groups
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self.register_load_state_dict_pre_hook(take).remove)
                stack.callback(self.register_load_state_dict_post_hook(keep_dtypes, prepend=True).remove)
                super().load_state_dict(state_dict)
        except BaseException:
            if self.state is not state:  # torch puts new ones in their place, and leaves these as they were
                self.state, self.param_groups = state, groups
                self._forget()
            raise

    def _fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dicts.check_is_one(state_dict)
        theirs = state_dict["param_groups"]
        if [len(g["params"]) for g in theirs] != [len(g["params"]) for g in self.param_groups]:
            return state_dict  # torch says so
        groups = [{**own, **g, "params": own["params"]} for own, g in zip(self.param_groups, theirs, strict=True)]
        for own, given, group in zip(self.param_groups, theirs, groups, strict=True):
            state_dicts.check_options(given, own, self.fixed, type(self).__name__)
            self.check(readable(group))

        def kept(group: Mapping[str, Any], param: Tensor) -> Sequence[str]:
            return self.rule.special({n: bool(self._option(dict(group), n)) for n in self._flags}, param).states

        begin = [name for name, kind in self.states.items() if kind.copy_of_param]
        names = state_dicts.Names(type(self).__name__, self.rule.roles, self.also_called, begin)
        return state_dicts.fitting(state_dict, groups, kept, names)


@contextlib.contextmanager
def _as_before_on_error(groups: list[Group]) -> Iterator[None]:
    """torch fills defaults into the caller's own dicts; a refused one is given back as it came."""
    before = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        for group, old in zip(groups, before, strict=True):
            group.clear()
            group.update(old)
        raise
