"""The base of all optimizers: torch's contract, once for all of them. The step itself is in stepper.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from fusedadam import backends, checks
from fusedadam.contract import (
    advice,
    around_step,
    class_checks,
    memory,
    nonfinite,
    refusals,
    state_dicts,
    storage,
    weights,
    wrappers,
)
from fusedadam.contract.conversion import check_is_state_dict
from fusedadam.contract.copies import Copies
from fusedadam.contract.declarations import DERIVED, OPTIONS, Check, Derive, Group, State, check_is_decoupled
from fusedadam.contract.reports import Reports
from fusedadam.contract.stepper import Stepper, Targets
from fusedadam.engine.launch import NO_AMP, Amp
from fusedadam.engine.scalars import Options
from fusedadam.rules.newton_schulz import DEFAULT, NewtonSchulz
from fusedadam.rules.rule import PARAM_FLAGS, SpecializedRule
from fusedadam.tensors import host_memory
from fusedadam.tensors.transfer import capturing

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class FusedOptimizer(Reports):
    """The base class of every optimizer; a subclass declares its rule, states and options.

    Its ``__init__`` passes every option on: ``super().__init__(params, lr=lr, ...)``.

    Attributes:
        rule: the function under ``@rule(...)``
        states: the name of each state, and its ``State``
        options: the name of each option, and its check
        derived: flags and hyper-parameters that are computed from a group's options
        fixed: flags with the same value in every group
        also_called: another package's name of a state, and ours, so that its state dicts load
        takes_complex: whether it takes complex parameters, whose parts it updates as two real numbers
        step_if_uncounted: the step of a loaded state that has none; None refuses it
    """

    states: ClassVar[Mapping[str, State]]
    options: ClassVar[dict[str, Check]] = OPTIONS
    derived: ClassVar[dict[str, Derive]] = DERIVED
    fixed: ClassVar[Mapping[str, bool]] = {}
    also_called: ClassVar[Mapping[str, str]] = {}
    takes_complex: ClassVar[bool] = False
    kept: ClassVar[tuple[str, ...]] = ("backend", "storage", "offload")  # options that no state dict changes
    step_if_uncounted: ClassVar[float | None] = None
    _check_param: ClassVar[Any] = staticmethod(lambda group, param: None)  # refuses one, whenever a plan is made
    _flags: ClassVar[tuple[str, ...]]  # of the rule, as far as a group decides them
    _is_under_zero = False  # a ZeroRedundancyOptimizer made it, and other processes have other parameters
    _copies: Copies  # the states that still follow their parameters

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "rule"):
            return
        class_checks.check_kinds(cls)
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
        self._is_under_zero = wrappers.zero_creates_optimizer()
        self.check(options)  # before params, as in torch
        class_checks.check_options(type(self), options)
        checks.iterable_of_parameters("params", params)
        checks.new_tensors("params")
        self._copies = Copies()
        self._reset()
        # a set stays one: torch 2.15 warns that it has no order
        given: Any = params if isinstance(params, (Tensor, Mapping, set)) else list(params)
        with restored_on_error([g for g in given if isinstance(g, dict)]):
            super().__init__(given, options)
        self._stepper.check_sums(self.param_groups, self._params())
        advice.warn_of_wide(self)

    @classmethod
    def check(cls, group: Group, names: Iterable[str] | None = None) -> None:
        """Refuses options that are out of range; ``names``: the options to check, all unless given."""
        for name in cls.options if names is None else names:
            if name in group:
                cls.options[name](name, group[name])
        storage.check(cls, group)
        check_is_decoupled(cls, group)
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
    def newton_schulz(cls, group: Group) -> NewtonSchulz:
        """How a rule that orthogonalizes does so; a class may read options of its own."""
        return DEFAULT

    @classmethod
    def storage_of(cls, group: Group, param: Tensor) -> storage.Choice:
        """What a parameter of a group and its states are kept in."""
        return storage.choose(cls, group, param, cls.specialized(group, param))

    def add_param_group(self, param_group: Group) -> None:
        with restored_on_error([param_group] if isinstance(param_group, dict) else []):
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
        advice.warn_of_misspelt(type(self).__name__, param_group, self.options)
        advice.warn_of_bfloat16(type(self), param_group)
        advice.warn_of_float16(param_group, param_group["params"])
        self._stepper.forget_plans()

    def _check_params(self, group: Group) -> None:
        params = self.param_groups[-1]["params"]
        if len(set(map(id, params))) < len(params):
            raise ValueError("params has a parameter twice in one group; list each of them once")
        # not yet whether ZeRO allows sums: it has taken the group in already, so that only a step can refuse it
        self._stepper.check_flat_sums(self.param_groups, params)
        for param in params:
            if not is_lazy(param):  # a lazy one has no shape yet, and is checked when it has a gradient
                refusals.check_param(type(self), group, param)
                checks.written("param", param, checks.dtypes_like(param))
                self.storage_of(group, param)
            if group.get("backend") is not None:
                backends.check(group["backend"], param.device)
            refusals.offloads(group, param.device)

    def __repr__(self) -> str:
        return memory.described(super().__repr__(), self)

    def memory_summary(self) -> str:
        """A table to print: the memory of parameters, gradients, each state and launch tables, for each device."""
        return memory.summary(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler: True means that step() unscales gradients, and skips infinities, itself.

        Lightning reads True as "gradients must be scaled" and refuses to clip. We also accept unscaled gradients.
        """
        if self._in_backward is not None:
            raise RuntimeError(
                "this optimizer steps in backward, where gradients would still be scaled by the GradScaler; use "
                "bfloat16 without a scaler, or do not step in backward"
            )
        if wrappers.are_flat(self._params()):  # whether another process has found an infinity is not known here
            return False
        return not wrappers.lightning_asks_about_unscaling()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @around_step.outside_dynamo  # under torch.compile: one break of the graph, and kernels of our own
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
        # modes and subclasses that look at every use of a tensor are skipped for speed
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._step()
        return loss

    profile_hook_step = staticmethod(around_step.profile_hook_step)  # torch wraps ``step`` with it, once for each class

    def _step(self) -> None:
        is_first = not any(map(torch.is_tensor, list(self.state)))  # other threads may change it
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if isinstance(found_inf, int):  # the sum over all devices with gradients, if there are none
            found_inf = torch.zeros((), device="cpu")
        options = self._options()
        # a GradScaler that has still to unscale has just looked; after unscale_(), gradients may have changed
        if options.skips_nonfinite and grad_scale is None and (params := self._params()):
            nonfinite.check(params, self._is_under_zero)
            found_inf = nonfinite.found(params, found_inf)
        amp = NO_AMP if grad_scale is None and found_inf is None else Amp(grad_scale, found_inf)
        prepared = self._stepper.prepare(self._targets(), options, amp, self._watches_norms)
        if is_first and wrappers.checkpoint_creates_states():
            return
        found_inf = self._stepper.run(prepared)
        if self._copies.params:
            self._copies.settle(self.state)
        if options.skips_nonfinite and found_inf is not None:
            self._skipped = (found_inf.reshape(()) != 0) + self._skipped

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim. Where steps are taken in backward, it also ends an iteration that broke off."""
        super().zero_grad(set_to_none)
        if self._in_backward is not None:
            self._in_backward.abandon_iteration()

    def stop_in_backward(self) -> None:
        """Ends what :func:`fusedadam.step_in_backward` began: gradients accumulate again, and ``step()`` uses them.

        States and options stay. ``step_in_backward(model, lambda params: optimizer)`` resumes it.
        """
        if self._in_backward is not None:
            self._in_backward.end()
            self._in_backward = None

    def _targets(self) -> Targets:
        return Targets(self.param_groups, [group["params"] for group in self.param_groups], self.state)

    def _options(self) -> Options:
        return self._stepper.read(self.param_groups)

    def _states_of_params(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """``optimizer.state`` without what users put there under other keys, as torch allows."""
        return [(param, self.state[param]) for param in self._params() if param in self.state]

    def _before_reading(self) -> None:
        """Until their first step, states that begin as copies of the parameters follow them."""
        if self._copies.params:
            host_memory.wait()  # for earlier steps, perhaps on another stream
        self._copies.refresh(self.state, self.states)
        host_memory.wait()

    def _check_may_step(self) -> None:
        if capturing():
            refusals.check_may_be_captured(self)

    def _check_has_trained_weights(self) -> None:
        """Optimizers that put averages into the model refuse while they are there."""

    def _reset(self) -> None:
        """Forgets earlier steps, so that the next one looks at everything."""
        captured = self._stepper.captured_plans if hasattr(self, "_stepper") else []
        self._stepper = Stepper(type(self), self._copies, self._is_under_zero)
        self._stepper.captured_plans = captured  # a graph may be replayed at any time
        if self._in_backward is not None:
            self._in_backward.reset()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles. A state dict says nothing about skipped steps, as GradScaler's does not."""
        host_memory.wait()
        copied = {"_skipped": self._skipped, "_copies": Copies(self._copies.params), "_in_backward": self._in_backward}
        return {**super().__getstate__(), **copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_copies": Copies(), **state})
        if state.get("_in_backward") is not None:  # a copy, and not a state dict that is being loaded
            state["_in_backward"].begin(self)
        self._reset()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, including the kind of weight decay."""
        self._before_reading()
        with state_dicts.saving(self):
            return super().state_dict()

    @classmethod
    def widen_state_dict(cls, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of an optimizer with ``storage=``, with every state as one float32 tensor.

        torch.optim can load it. It is also the template for distributed checkpoints of float32 states:
        ``torch.distributed.checkpoint.load`` fills it, and :meth:`load_state_dict` rounds it to this optimizer's own
        formats. The low bits of the weights are left out; :meth:`float32_state_dict` has them.
        """
        check_is_state_dict(state_dict)
        return weights.widened(cls.states, state_dict)

    def float32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """A copy of the model's state dict with float32 weights, to export: bfloat16 weights are joined with the
        low-order bits that this optimizer keeps (``storage=``)."""
        self._check_has_trained_weights()
        return weights.float32(self, model)

    def load_float32_state_dict(self, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
        """Loads a model's state dict with float32 weights without losing bits: the upper halves become the model's
        bfloat16 weights, and the low-order bits go into this optimizer's states (``storage=``). If the model refuses
        the state dict, parameters, buffers and states stay as they were."""
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
def restored_on_error(groups: list[Group]) -> Iterator[None]:
    """torch fills defaults into the caller's own dicts; on an error they are given back as they came."""
    before = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        for group, old in zip(groups, before, strict=True):
            group.clear()
            group.update(old)
        raise
