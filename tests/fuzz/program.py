"""The state of a program, and the steps that it takes.

The program keeps a record of what every parameter, state, gradient and option must be. An event changes the optimizer
and the record. A step is compared with the reference, and its results are then copied into the record. After every
event the optimizer must equal the record to the bit, so anything changed by mistake is found at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from fusedadam.tensors.factored import shape_in
from tests.fuzz import own_rule
from tests.fuzz.judge import compare
from tests.fuzz.options import Family, Group, groups, lr_of
from tests.fuzz.reference import SMALLER, STATES, Member, expected_step, states_of
from tests.fuzz.tensors import DTYPES, GRADIENT_LAYOUTS, VIEWS, gradient, is_expanded, laid_out, plain, values

START = {"lr": 0.05, "weight_decay": 0.1}
MOST_GROUPS = 3


@dataclass
class Kept:
    """The record of one parameter: what is stored, to the bit and in its dtype; ``step`` is None before the first."""

    value: Tensor
    group: int
    grad: Tensor | None = None
    states: dict[str, Tensor] = field(default_factory=dict)
    step: int | None = None


groups_of = functools.cache(groups)
a_group_to_add = st.runner().flatmap(lambda program: groups_of(program.family))
a_param = st.runner().flatmap(lambda program: st.sampled_from(range(len(program.kept))))
a_group = st.runner().flatmap(lambda program: st.sampled_from(range(len(program.options))))


# the gradients of a step: the present ones, or new ones for every parameter
some_steps = st.lists(st.sampled_from(["the same", *VIEWS]), max_size=2)


def event(**arguments: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule that may take steps afterwards: otherwise most events would be overwritten before a step sees them."""

    def wrap(happen: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(happen)
        def run(self: Program, then: list[str], **given: Any) -> None:
            happen(self, **given)
            for gradients in then:
                self.all_is_as_recorded()
                self.train("as the parameter", gradients)

        return rule(**arguments, then=some_steps)(run)

    return wrap


class Program(RuleBasedStateMachine):
    family: ClassVar[Family]

    def __init__(self) -> None:
        super().__init__()
        self.optimizer: Any = None
        self.kept: list[Kept] = []
        self.options: list[dict[str, Any]] = []  # of each group
        self.drawn = 0

    # Parameters and gradients

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def has_reference(self) -> bool:
        return self.family.name in STATES

    def is_compiled(self, param: int) -> bool:
        return self.options[self.kept[param].group]["backend"] == "numba"

    def new_values(self, param: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.new_values_like(self.kept[param].value, dtype)

    def new_values_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Different on every call, and the same when the program is run again."""
        self.drawn += 1
        return values(tuple(like.shape), dtype or like.dtype, self.drawn)

    def set_grad(self, param: int, grad: Tensor | None) -> None:
        self.params[param].grad = grad
        self.kept[param].grad = None if grad is None else plain(grad)

    def read_gradients(self) -> None:
        """After torch has written or replaced them; several parameters may share one."""
        for kept, param in zip(self.kept, self.params, strict=True):
            kept.grad = None if param.grad is None else plain(param.grad)

    def set_all_grads(self, layout: str = "as the parameter", view: str = "plain") -> None:
        for k, param in enumerate(self.params):
            self.set_grad(k, gradient(self.new_values(k), param, layout, view))

    # Groups

    @initialize(groups=st.lists(a_group_to_add, min_size=1, max_size=MOST_GROUPS))
    def start(self, groups: list[Group]) -> None:
        self.optimizer = self.family.make([self._made(group) for group in groups], **START)
        self._record_groups()

    @precondition(lambda self: len(self.options) < MOST_GROUPS)
    @event(group=a_group_to_add)
    def add_group(self, group: Group) -> None:
        self.optimizer.add_param_group(self._made(group))
        self._record_groups()

    def _made(self, group: Group) -> dict[str, Any]:
        dtype, state_dtype = (DTYPES.get(name or "") for name in group.dtypes)
        params = []
        for shape, layout in group.params:
            self.drawn += 1
            params.append(torch.nn.Parameter(laid_out(values(shape, dtype or torch.float32, self.drawn), layout)))
        options = {**group.options, "lr": lr_of(group.lr, START["lr"]), "state_dtype": state_dtype}
        options |= {state.dtype_option: state_dtype for state in self.family.make.states.values()}
        return {"params": params, **options}

    def _record_groups(self) -> None:
        """Adds the optimizer's new groups to the record."""
        for k, made in enumerate(self.optimizer.param_groups[len(self.options) :], len(self.options)):
            options = {name: value for name, value in made.items() if name != "params"}
            self.options.append({**self.optimizer.defaults, **options, "lr": START["lr"]})
            self.kept += [Kept(plain(p), k) for p in made["params"]]

    # Steps

    @event(layout=st.sampled_from(GRADIENT_LAYOUTS), gradients=st.sampled_from(["the same", *VIEWS]))
    def step(self, layout: str, gradients: str) -> None:
        self.train(layout, gradients)

    def train(self, layout: str, gradients: str) -> None:
        if gradients != "the same":
            self.set_all_grads(layout, gradients)
        self.take_step(self.optimizer.step)

    @event()
    def step_with_a_closure(self) -> None:
        def closure() -> float:
            assert torch.is_grad_enabled()
            return 0.25

        def run() -> None:
            assert self.optimizer.step(closure) == 0.25

        self.set_all_grads()
        self.take_step(run)

    @event(scale=st.sampled_from([1.0, 4.0]), found_inf=st.booleans())
    def step_under_a_grad_scaler(self, scale: float, found_inf: bool) -> None:
        """As torch.amp.GradScaler asks an optimizer that unscales by itself. Powers of two round nothing."""
        self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(scale), torch.tensor(float(found_inf))
        try:
            if self._has_gradients_that_cannot_be_unscaled():
                with pytest.raises(RuntimeError, match="a step with a GradScaler"):
                    self.optimizer.step()
            else:
                self.take_step(self.optimizer.step, scale, is_skipped=found_inf)
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf

    def _has_gradients_that_cannot_be_unscaled(self) -> bool:
        """Expanded ones, and ones that parameters share."""
        grads = [p.grad for p in self.params if p.grad is not None and p.grad.numel()]
        return any(map(is_expanded, grads)) or len({grad.data_ptr() for grad in grads}) < len(grads)

    @precondition(lambda self: all(kept.step is not None for kept in self.kept))
    @event()
    def step_in_inference_mode(self) -> None:
        """Only once all states exist: as in torch, a state created in this mode cannot be updated outside of it."""
        with torch.inference_mode():
            self.take_step(self.optimizer.step)

    def take_step(self, run: Callable[[], Any], scale: float = 1.0, is_skipped: bool = False) -> None:
        params = self.params
        taking_part = [k for k, kept in enumerate(self.kept) if kept.grad is not None]
        for k in taking_part:
            self._begin_states(self.kept[k])
        members = [self._member(self.kept[k], scale) for k in taking_part]
        versions = [p._version for p in params]
        run()
        if is_skipped:
            return  # nothing may have changed: the comparison with the record shows it
        self._judge(taking_part, members)
        for k in taking_part:
            self.kept[k].grad = self.kept[k].grad / scale  # a GradScaler's step leaves gradients unscaled
        for k, param in enumerate(params):
            assert (param._version > versions[k]) == (k in taking_part), f"version of parameter {k}"

    def _begin_states(self, kept: Kept) -> None:
        options = self.options[kept.group]
        kept.step = kept.step or 0
        if not self.has_reference:
            for name in own_rule.states_of(self.family.name, options, kept.value):
                if name not in kept.states:
                    kept.states[name] = own_rule.begin_state(self.family.name, name, options, kept.value)
            return
        for name in states_of(self.family.name, options, kept.value):
            if name not in kept.states:
                dtype = options["ema_dtype" if name == "ema_params" else "state_dtype"] or kept.value.dtype
                begin = kept.value if name == "ema_params" else torch.zeros_like(kept.value)
                if name in SMALLER:
                    begin = begin.new_zeros(shape_in(SMALLER[name], kept.value.shape))
                if name == "mu_product":
                    begin, dtype = begin + 1, torch.promote_types(dtype, torch.float32)
                kept.states[name] = begin.to(dtype, copy=True)

    def _member(self, kept: Kept, scale: float) -> Member:
        assert kept.grad is not None
        options, clips = self.options[kept.group], self.options[kept.group]["max_grad_norm"]
        norm_of: Any = "all"
        if clips is None or clips == -1:
            norm_of = None
        elif options.get("clip") == "group":
            norm_of = (kept.group, kept.grad.dtype)
        elif options.get("clip") == "parameter":
            norm_of = id(kept)
        return Member(
            param=kept.value.double(),
            grad=kept.grad.double() / scale,
            states={name: value.double() for name, value in kept.states.items()},
            done=kept.step or 0,
            options=options,
            dtype=kept.value.dtype,
            norm_of=norm_of,
        )

    def _judge(self, taking_part: list[int], members: list[Member]) -> None:
        after = [{n: v for n, v in self._states(k).items() if n != "step"} for k in taking_part]
        expect = expected_step if self.has_reference else own_rule.expected_step
        expected = expect(self.family.name, members, after)
        for k, states, exact in zip(taking_part, after, expected, strict=True):
            kept = self.kept[k]
            kept.step = (kept.step or 0) + 1
            assert states.keys() == kept.states.keys(), f"states of parameter {k} are {', '.join(states)}"
            for name, value in {**states, "param": self.params[k].detach()}.items():
                compare(value, exact[name], f"{name} of parameter {k} in step {kept.step}")
            kept.value = plain(self.params[k])
            for name, value in states.items():
                assert value.dtype == kept.states[name].dtype, f"{name} of parameter {k} became {value.dtype}"
                kept.states[name] = plain(value)

    def _states(self, param: int) -> dict[str, Any]:
        return self.optimizer.state.get(self.params[param], {})

    # What must hold after every event

    def check_invariants(self, *_: Any, **__: Any) -> None:
        """Called by Hypothesis after every rule. An ``@invariant`` would be a line of the printed program each time."""
        if self.optimizer is not None:
            self.all_is_as_recorded()

    def all_is_as_recorded(self) -> None:
        params = self.params
        assert len(params) == len(self.kept)
        for k, (param, kept) in enumerate(zip(params, self.kept, strict=True)):
            assert_same(param.detach(), kept.value, f"parameter {k}")
            assert (param.grad is None) == (kept.grad is None), f"gradient of parameter {k}"
            if kept.grad is not None:
                assert_same(param.grad, kept.grad, f"gradient of parameter {k}")
            states = dict(self._states(k))
            step = states.pop("step", None)
            assert (None if step is None else float(step)) == kept.step, f"step of parameter {k} is {step}"
            assert states.keys() == kept.states.keys(), f"states of parameter {k} are {', '.join(states)}"
            for name, value in states.items():
                assert_same(value, kept.states[name], f"{name} of parameter {k}")
        for k, (group, options) in enumerate(zip(self.optimizer.param_groups, self.options, strict=True)):
            now = {**{name: group.get(name) for name in options}, "lr": float(group["lr"])}
            assert now == options, f"options of group {k}"

    def teardown(self) -> None:
        """Takes two more steps, so that the last event is followed by one, too."""
        if sys.exc_info()[0] is None and self.optimizer is not None:
            for gradients in ("the same", "plain"):
                self.train("as the parameter", gradients)
                self.all_is_as_recorded()


def assert_same(got: Tensor, expected: Tensor, label: str) -> None:
    assert got.dtype == expected.dtype, f"{label} has become {got.dtype}"
    assert got.shape == expected.shape, f"{label} has become {tuple(got.shape)}"
    differ = ~((got == expected) | ((got != got) & (expected != expected)))
    assert not differ.any(), f"{label}: {int(differ.sum())} of {differ.numel()} elements have changed"
