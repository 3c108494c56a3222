"""The base of all optimizers: torch's contract, once for all of them. The step itself is in stepper.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fusedadam import backends, checks
from fusedadam.contract import (
    callers,
    capture,
    class_checks,
    complex_params,
    conversion,
    memory,
    nonfinite,
    norms,
    precision,
    role_arrays,
    spelling,
    state_dicts,
    storage,
    weights,
    wrappers,
)
from fusedadam.contract.declarations import DERIVED, OPTIONS, Check, Derive, Group, State
from fusedadam.contract.group_options import Options
from fusedadam.contract.stepper import Stepper, Targets
from fusedadam.engine.launch import NO_AMP, Amp, norm_of
from fusedadam.rules.rule import PARAM_FLAGS, Rule, SpecializedRule
from fusedadam.tensors.transfer import capturing

if TYPE_CHECKING:
    from fusedadam.in_backward import InBackward

# in 2.6 each call of get_eval_frame_callback takes away a reference: Python dies after some ten thousand
CAN_ASK_DYNAMO = torch.torch_version.TorchVersion(torch.__version__) >= "2.8"

P = ParamSpec("P")
R = TypeVar("R")
Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def _outside_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """As _disable_dynamo, which takes longer than a small step, but only where TorchDynamo is at work."""
    disabled = _disable_dynamo(function)
    if not CAN_ASK_DYNAMO:
        return disabled

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        is_traced = torch.compiler.is_compiling() or get_eval_frame_callback() is not None
        return disabled(*args, **kwargs) if is_traced else function(*args, **kwargs)

    return call


class FusedOptimizer(torch.optim.Optimizer):
    """A subclass declares its rule, states and options (declarations.py); everything else is here."""

    rule: ClassVar[Rule]
    states: ClassVar[Mapping[str, State]]
    options: ClassVar[dict[str, Check]] = OPTIONS
    derived: ClassVar[dict[str, Derive]] = DERIVED  # flags and hyper-parameters that follow from options
    fixed: ClassVar[Mapping[str, bool]] = {}  # flags with the same value in every group
    also_called: ClassVar[Mapping[str, str]] = {}  # another optimizer's name of a state -> ours, for its state dicts
    takes_complex: ClassVar[bool] = False  # parameters, by updating real and imaginary parts as two real numbers
    step_if_uncounted: ClassVar[float | None] = None  # the step of a saved state that has none; None refuses it
    _flags: ClassVar[tuple[str, ...]]  # of the rule, as far as a group decides them
    _stepper: Stepper
    _no_steps: str | None = None  # why stepping is refused at the moment
    _in_backward: InBackward | None = None
    _is_under_zero = False  # a ZeroRedundancyOptimizer made it, and other processes have other parameters
    _skipped: Tensor | int = 0  # steps, because a gradient was not finite
    _watches_norms = False
    _is_untrained = False  # a checkpoint has created the states, and no step has been taken since

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "rule"):
            return
        cls._flags = tuple(name for name in cls.rule.flags if name not in PARAM_FLAGS)
        if "states" in cls.__dict__:
            cls.states = class_checks.as_the_rule_says(cls)
        # a wrapper may subclass an optimizer for its type alone, as Lightning does, with another __init__
        if "rule" in cls.__dict__ and not cls.__module__.startswith("fusedadam."):
            class_checks.check_class(cls)

    def __init__(self, params: Params, **options: Any) -> None:
        """``options``: the defaults of all groups."""
        if not hasattr(self, "rule"):
            raise TypeError(f"{type(self).__name__} has no rule; set rule = ... in the class")
        self._is_under_zero = callers.zero_creates_optimizer()
        self._reset()
        checks.iterable_of_parameters("params", params)
        # a set stays one: torch 2.15 warns that it has no order
        given: Any = params if isinstance(params, (Tensor, Mapping, set)) else list(params)
        self.check(options)
        class_checks.check_options(type(self), options)
        with _restored_on_error([g for g in given if isinstance(g, dict)]):
            super().__init__(given, options)
        self._stepper.check_sums(self.param_groups, self._params())

    @classmethod
    def check(cls, group: Group, names: Iterable[str] | None = None) -> None:
        """Refuses options that are out of range; ``names``: the options to check, all unless given."""
        for name in cls.options if names is None else names:
            if name in group:
                cls.options[name](name, group[name])
        storage.check(cls, group)
        if group.get("foreach") and group.get("fused"):
            raise RuntimeError("foreach=True and fused=True exclude each other; every step is fused, so leave them out")

    @classmethod
    def value(cls, group: Group, name: str) -> Any:
        """A flag or hyper-parameter of the rule, as a group's options give it."""
        if name in cls.fixed:
            return cls.fixed[name]
        return cls.derived[name](group) if name in cls.derived else group[name]

    @classmethod
    def specialized(cls, group: Group, param: Tensor) -> SpecializedRule:
        """The rule as it is for a parameter of a group."""
        return cls.rule.specialize({flag: bool(cls.value(group, flag)) for flag in cls._flags}, param)

    @classmethod
    def storage_of(cls, group: Group, param: Tensor) -> storage.Choice:
        """What a parameter of a group and its states are kept in."""
        return storage.choose(cls, group, param, cls.specialized(group, param).roles)

    def add_param_group(self, param_group: Group) -> None:
        with _restored_on_error([param_group] if isinstance(param_group, dict) else []):
            if isinstance(param_group, dict):
                if "params" in param_group:
                    checks.iterable_of_parameters("params", param_group["params"])
                self.check({**self.defaults, **param_group})
                class_checks.check_effects(type(self), {**self.defaults, **param_group})
            count = len(self.param_groups)
            try:
                super().add_param_group(param_group)
                self._check_params(param_group)
            except BaseException:
                del self.param_groups[count:]
                raise
        spelling.warn_of_misspelt(type(self).__name__, param_group, self.options)
        if self.states:
            precision.warn_of_bfloat16(type(self).__name__, param_group, param_group["params"])
        self._stepper.forget_plans()

    def _check_params(self, group: Group) -> None:
        params = self.param_groups[-1]["params"]
        if len(set(map(id, params))) < len(params):
            raise ValueError("params has a parameter twice in one group; list each of them once")
        # not yet whether ZeRO allows sums: it has taken the group in already, so that only a step can refuse it
        self._stepper.check_flat_sums(self.param_groups, params)
        for param in params:
            if not is_lazy(param):  # a lazy one has no shape yet, and is checked when it has a gradient
                complex_params.check(type(self), group, param)
                checks.written("param", param, checks.dtypes_like(param))
                self.storage_of(group, param)
            if group.get("backend") is not None:
                backends.check(group["backend"], param.device)

    def __repr__(self) -> str:
        return memory.described(super().__repr__(), self)

    def memory_summary(self) -> str:
        """A table to print: the memory of parameters, gradients, each state and launch tables, for each device."""
        return memory.summary(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler: True means that step() unscales gradients, and skips infinities, itself.

        Lightning reads True as "gradients must be scaled" and refuses to clip. Ours may also come unscaled.
        """
        if self._in_backward is not None:
            raise RuntimeError(
                "this optimizer steps in backward, where gradients would still be scaled by the GradScaler; use "
                "bfloat16 without a scaler, or do not step in backward"
            )
        if wrappers.are_flat(self._params()):  # whether another process has found an infinity is not known here
            return False
        return not callers.lightning_asks_about_unscaling()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_outside_dynamo  # under torch.compile: one break of the graph, and kernels of our own
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Performs one step. ``closure``, if given, reevaluates the model and returns the loss."""
        self._check_may_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._check_may_step()  # it may have put averages into the model
        if self._in_backward is not None:
            self._in_backward.end_iteration()
        # modes and subclasses that look at every use of a tensor have nothing to see here, and would take their time
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._step()
        return loss

    @staticmethod
    def profile_hook_step(func: Callable[P, R]) -> Callable[P, R]:
        """Called by torch, once for each class, to add hooks and a profiler's record to ``step``. They take as long as
        a small step does, so a step without hooks, outside a profiler, does without."""
        watched = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(*args: P.args, **kwargs: P.kwargs) -> R:
            optimizer: Any = args[0]
            is_watched = (
                len(args) > 1  # a closure, which may add a hook
                or kwargs
                or optimizer._optimizer_step_pre_hooks
                or optimizer._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
                or _profiler_enabled()
            )
            return watched(*args, **kwargs) if is_watched else func(*args, **kwargs)

        return step

    def _step(self) -> None:
        is_first = not self.state
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        may_skip = nonfinite.is_asked_for(self.param_groups)
        # a GradScaler that has still to unscale has just looked; after unscale_(), gradients may have changed
        if may_skip and grad_scale is None and (params := self._params()):
            nonfinite.check(params, self._is_under_zero)
            found_inf = nonfinite.found(params, found_inf)
        amp = NO_AMP if grad_scale is None and found_inf is None else Amp(grad_scale, found_inf)
        prepared = self._stepper.prepare(self._targets(), amp, self._watches_norms)
        if is_first and callers.checkpoint_creates_states():
            self._is_untrained = True
            return
        self._begin_copies()
        found_inf = self._stepper.run(prepared)
        if may_skip and found_inf is not None:
            self._skipped = (found_inf.reshape(()) != 0) + self._skipped

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite=True`` has left out since the optimizer was made; waits for the device."""
        return int(self._skipped)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim. Where steps are taken in backward, it also ends an iteration that broke off."""
        super().zero_grad(set_to_none)
        if self._in_backward is not None:
            self._in_backward.abandon_iteration()

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step, before clipping, on their device; None if nothing was clipped."""
        plan = self._stepper.last_plan
        return None if plan is None else norm_of(plan.launches, "grad_norm")

    @property
    def watch_norms(self) -> bool:
        """Whether steps measure the norms of gradients, updates and weights, for :meth:`norms`. It may change between
        any two steps; while it is False, as at first, norms cost nothing."""
        return self._watches_norms

    @watch_norms.setter
    def watch_norms(self, value: bool) -> None:
        checks.boolean("watch_norms", value)
        self._watches_norms = value

    def norms(self) -> norms.Norms:
        """The norms of each parameter's gradient, update and weights in the last step, which ``watch_norms`` made it
        measure: tensors on the device, so nothing waits. Those of a sharded parameter are of the whole."""
        return norms.of_last_step(self)

    def report(self, name: str) -> dict[Tensor, float]:
        """A value that the rule names in its ``reports``, of the last step of each parameter that took part in one.

        Waits for the device. A value that the options leave out, such as a norm where nothing is clipped, is reported
        for no parameter.
        """
        if name not in self.rule.reports:
            known = ", ".join(map(repr, self.rule.reports)) or "none"
            raise ValueError(f"{name!r} is not reported by {type(self).__name__}; its rule reports {known}")
        params = self._params()
        return {params[k]: value for k, value in sorted(self._report(name).items())}

    def _report(self, name: str) -> dict[int, float]:
        """A value of the last step for each parameter that took part, by its position among all."""
        in_backward = {} if self._in_backward is None else self._in_backward.report(name, self._params())
        return {**self._stepper.report(name), **in_backward}

    def _targets(self) -> Targets:
        return Targets(self.param_groups, [group["params"] for group in self.param_groups], self.state)

    def _params(self) -> list[Tensor]:
        return self._targets().params

    def _options(self) -> Options:
        """The flags and the hyper-parameters of each group, checked."""
        return self._stepper.read(self.param_groups)

    def _begin_copies(self) -> None:
        """Called before every step. States that are copies begin with the parameters that the first step finds."""
        self._refresh_copies()
        self._is_untrained = False

    def _refresh_copies(self) -> None:
        """Until the first step, states that begin as copies of the parameters follow them."""
        if not self._is_untrained:
            return
        copies = [name for name, declared in self.states.items() if declared.initial == "param"]
        with torch.no_grad():
            for param, state in self.state.items():
                for name in copies:
                    role_arrays.refresh_copy(name, param, state, self.states)

    def _check_may_step(self) -> None:
        if self._no_steps is not None:
            raise RuntimeError(self._no_steps)
        if capturing():
            capture.check_may_be_captured(self)

    def _check_has_trained_weights(self) -> None:
        if self._no_steps is not None:
            raise RuntimeError(
                "inside ema_weights() the model has averages, which the low bits of the trained weights do not belong "
                "to; call this outside, or use ema_state_dict(model, dtype=torch.float32)"
            )

    def _reset(self) -> None:
        """Forgets earlier steps, so that the next one looks at everything."""
        captured = self._stepper.captured_plans if hasattr(self, "_stepper") else []
        self._stepper = Stepper(type(self), self._is_under_zero)
        self._stepper.captured_plans = captured  # a graph may be replayed at any time
        self._is_untrained = False
        if self._in_backward is not None:
            self._in_backward.reset()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles. A state dict says nothing about skipped steps, as GradScaler's does not."""
        return {**super().__getstate__(), "_skipped": self._skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; it also says, as torch's does, how weights decay."""
        self._refresh_copies()
        with state_dicts.saving(self):
            return super().state_dict()

    @classmethod
    def widen_state_dict(cls, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of an optimizer with ``storage=``, with every state as one float32 tensor.

        torch.optim can load it. It is also the template for distributed checkpoints of float32 states:
        ``torch.distributed.checkpoint.load`` fills it, and :meth:`load_state_dict` rounds it to this optimizer's own
        formats. The low bits of the weights are left out; :meth:`float32_state_dict` has them.
        """
        conversion.check_is_state_dict(state_dict)
        return weights.widened(cls.states, state_dict)

    def float32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """A copy of the model's state dict with float32 weights, to export: bfloat16 weights that this optimizer keeps
        with low bits (``storage=``) are joined with them."""
        self._check_has_trained_weights()
        return weights.float32(self, model)

    def load_float32_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
        """Loads a model's state dict with float32 weights. What the model's own bfloat16 weights have no room for goes
        into the low bits that this optimizer keeps (``storage=``), so that nothing is lost."""
        self._check_has_trained_weights()
        weights.load_float32(self, model, state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but each state keeps its own dtype, and nothing is shared with ``state_dict``.

        Also loads state dicts of torch's optimizers of the same names, of the adamp package, NVIDIA's BertAdam, apex
        and MindSpeed, into the optimizer that computes the same. A state dict that does not fit is refused, and nothing
        is loaded.
        """
        with state_dicts.loading(self, state_dict):
            super().load_state_dict(state_dict)

    def _of_others(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict of a package that lays it out in another way, as a torch optimizer would have saved it."""
        return state_dict


@contextlib.contextmanager
def _restored_on_error(groups: list[Group]) -> Iterator[None]:
    """torch fills defaults into the caller's own dicts; on an error they are given back as they came."""
    before = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        for group, old in zip(groups, before, strict=True):
            group.clear()
            group.update(old)
        raise
