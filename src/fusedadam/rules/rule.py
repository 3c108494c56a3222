"""A rule: the mathematics of one optimizer, written once and compiled by every backend.

    def sgd_scalars(step, lr, keep):
        return {"lr": lr, "keep": keep}

    @rule(scalars=sgd_scalars)
    def sgd(param: Value, grad: Value, momentum: Value, *, lr: Scalar, keep: Scalar, nesterov: Flag) -> Values:
        momentum = keep * momentum + grad
        if nesterov:
            grad = grad + keep * momentum
        else:
            grad = momentum
        param = param - lr * grad
        return param, momentum

The contract for authors:

- The signature gives the kind of each argument. ``Value``: a role, one of the tensors of a parameter: ``param`` and
  ``grad`` first, then the states under their names in ``optimizer.state``. The code reads as for one element; inside a
  sum a role stands for all of them. ``Scalar``: one number for each parameter and step. ``Flag``: a choice made when
  the kernel is compiled. A state may also be smaller than its parameter: a ``RowValue`` leaves out the last dimension,
  a ``ColumnValue`` the second-to-last, a ``TensorValue`` all of them.
- The body assigns expressions of ``+ - * /``, comparisons (joined by ``&`` and ``|``), numbers, constants of the
  module, the functions of ``fusedadam.ops`` and calls, by position, of helper functions that follow the same rules.
  ``if`` and ``a if flag else b`` ask flags, joined by ``not``, ``and``, ``or``; an elementwise choice is ``where``.
  There is no ``+=``. The last statement returns the roles to be stored, by name. ``grad`` is never stored.
- A state that the code does not use under the given flags is not allocated, and a role is neither read nor written.
- ``scalars`` computes every scalar of the signature by name, in float64, from ``step`` and the hyper-parameters.
  Everything that is the same for all elements of a parameter belongs there. It uses ``+ - * /``, comparisons,
  ``beta ** step`` and ops (``where`` for ``if``), because a device may have to compute it: see ``tracing.py``. The
  scalars ``row_length``, ``last_length``, ``second_last_length``, ``matrix_rows``, ``matrix_columns``, ``numel`` and
  ``dtype_eps`` and the flag ``matrix`` (two dimensions or more) come from the parameter itself.
- ``row_sum``, ``tensor_sum``, ``group_sum``, ``total`` and ``largest`` may be used like any value, in helpers as well:
  ``stages.py`` divides the rule where it waits for them. Values by row or tensor are computed in float64. For states
  by row and column there are ``sum_last`` and ``sum_second_last``, over the dimension that each leaves out.
- ``orthogonalized(x)``, once in a rule, is a value by element that is known one round later: ``newton_schulz.py``
  says what it computes, and ``tensors/matrices.py`` which dimensions of a parameter are a matrix. A class may choose
  the iteration with ``newton_schulz``.
- ``reports`` names variables of the rule that have one value for each tensor. ``optimizer.report(name)`` reads them
  after a step; a variable that the flags leave out has no report.
- ``opening`` is a function whose statements come before those of the rule, and whose result is the rule's ``grad``. Its
  arguments are some of the rule's. ``maximized_and_clipped`` (``clipping.py``) is how most of our rules begin.

Code that breaks the contract is refused when the rule is defined, with the line and what to write instead.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam.rules import tracing
from fusedadam.rules.counts import Count
from fusedadam.rules.function import KINDS, Function, RuleError
from fusedadam.rules.lowering import Lowering
from fusedadam.rules.norms import REPORTS, with_norms
from fusedadam.rules.positions import Position
from fusedadam.rules.scalar_program import ScalarProgram, scalar_program
from fusedadam.rules.stages import Staged, split_into_stages
from fusedadam.tensors.matrices import matrices_of

__all__ = ["ColumnValue", "Flag", "RowValue", "Rule", "RuleError", "Scalar", "SpecializedRule", "TensorValue"]
__all__ += ["Value", "Values", "rule"]

Value: TypeAlias = Any
"""Annotates a role of a rule: ``param``, ``grad``, or a state. The code reads as for one element."""
RowValue: TypeAlias = Any
"""Annotates a state that leaves out the parameter's last dimension: one value for each row of a matrix."""
ColumnValue: TypeAlias = Any
"""Annotates a state that leaves out the second-to-last dimension: one value for each column."""
TensorValue: TypeAlias = Any
"""Annotates a state with one value for each parameter."""
Scalar: TypeAlias = Any
"""Annotates a number that is the same for all elements of a parameter; the rule's scalars compute it."""
Flag: TypeAlias = bool
"""Annotates a choice that is made when the kernel is compiled; ``if`` asks it."""
Values: TypeAlias = Any
"""Annotates what a rule returns: the roles to store."""

# Scalars and flags that come from the parameter itself, not from its group. ``dtype``: of the weight as the rule sees
# it between steps, which is float32 where a storage format keeps more than the parameter's own dtype can hold.
PARAM_SCALARS: dict[str, Callable[[Tensor, torch.dtype], float]] = {
    "row_length": lambda param, dtype: _real_numbers(param) / max(1, param.shape[0] if param.dim() else 1),
    "numel": lambda param, dtype: max(1, _real_numbers(param)),
    "dtype_eps": lambda param, dtype: torch.finfo(dtype).eps,
    "last_length": lambda param, dtype: max(1, param.shape[-1]) if param.dim() else 1,
    "second_last_length": lambda param, dtype: max(1, param.shape[-2]) if param.dim() > 1 else 1,
    "matrix_rows": lambda param, dtype: max(1, matrices_of(param.shape).rows) if param.dim() > 1 else 1,
    "matrix_columns": lambda param, dtype: max(1, matrices_of(param.shape).columns) if param.dim() > 1 else 1,
}
PARAM_FLAGS: dict[str, Callable[[Tensor], bool]] = {"matrix": lambda param: param.dim() > 1}
HyperParameters: TypeAlias = tuple[Any, ...]  # of a group, in the order of ``Rule.hyper_parameters``


@dataclass(frozen=True)
class SpecializedRule(Staged):
    """A rule with its flags decided: straight-line code in one stage or more, for the backends to compile."""

    rule: Rule
    flags: tuple[tuple[str, bool], ...]
    roles: tuple[str, ...]  # read or written, in the order of the signature
    outputs: tuple[str, ...]  # roles that are written
    scalars: tuple[str, ...]

    @property
    def title(self) -> str:
        return " ".join([self.rule.name, *(f"{name}={value}" for name, value in self.flags)])

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(r for r in self.roles if r not in ("param", "grad"))


class Rule:
    """A checked rule. Calling it runs the plain Python function, on tensors or numbers."""

    def __init__(
        self, update: Callable[..., Any], scalars: Callable[..., Mapping[str, Any]], reports: Sequence[str] = (),
        opening: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self._function = Function(update)
        self._opening = None if opening is None else Function(opening, places="opening_")
        if isinstance(reports, str) or not isinstance(reports, Sequence):
            name = reports if isinstance(reports, str) else "grad_norm"
            self._function.refuse(f"reports={reports!r} is not a tuple of names; write reports=({name!r},)")
        self.update, self.opening, self.reports, self.name = update, opening, tuple(reports), update.__name__
        self._scalars = _with_step(scalars)
        self.__doc__, self.__wrapped__ = update.__doc__, update
        kinds = self._function.kinds
        self.roles, self.scalar_names, self.flags = (tuple(n for n, k in kinds.items() if k == kind) for kind in KINDS)
        if self.roles[:1] != ("param",) or ("grad" in self.roles and self.roles[1] != "grad"):
            self._function.refuse("the first two roles must be `param: Value, grad: Value`")
        self.returned = self._function.returned_roles(self.roles)
        self.spaces: Mapping[str, str] = self._function.spaces  # what each role has a value for
        for role in self.roles[:2]:
            if role in ("param", "grad") and self.spaces[role] != "element":
                self._function.refuse(f"`{role}` has a value for each element; write `{role}: Value`")
        if self._opening is not None:
            self._check_opening(self._opening)
        self._specializations: dict[tuple[tuple[bool, ...], frozenset[str], bool], SpecializedRule] = {}
        self._scalar_programs: dict[tuple[tuple[str, str], ...], ScalarProgram] = {}
        self._shared_at: dict[str, Position] = {}  # sums over several parameters: the same under all flags
        if not (update.__module__ or "").startswith("fusedadam."):  # those are checked by tests, not in every import
            self.check()

    def check(self) -> None:
        """Raises where the code breaks the contract."""
        self.lowered(dict.fromkeys(self.flags, False), every_branch=True)
        self._check_is_stored()
        self._check_scalars()
        for choice in (False, True):  # other choices of flags are checked when they are first used
            self.specialize(dict.fromkeys(self.flags, choice))
        if "param" not in self.returned:
            self._function.refuse("the new `param` is not returned, so that nothing is trained; add it to the return")
        if "param" not in self._function.assigned and not self.reports:  # which a rule may be for
            self._function.refuse("`param` is returned, but never assigned; assign what it becomes")

    def _check_is_stored(self) -> None:
        """Refuses states that would keep their initial values, and reports of something that does not exist."""
        assigned = self._function.assigned
        for role in (role for role in self.roles if role not in ("param", "grad")):
            if role in self.returned and role not in assigned:
                self._function.refuse(f"`{role}` is returned, but never assigned: is it misspelt?")
            if role in assigned and role not in self.returned:
                self._function.refuse(f"the state `{role}` is assigned and not stored; add it to the return")
        for name in self.reports:
            if name not in (assigned if self._opening is None else assigned | self._opening.assigned):
                self._function.refuse(f"reports has `{name}`, which the rule never assigns")

    def _check_opening(self, opening: Function) -> None:
        for name, kind in opening.kinds.items():
            if self._function.kinds.get(name) != kind:
                why = f"its opening, {opening.name}, takes `{name}: {kind}`; add it to the arguments of the rule"
                self._function.refuse(why)
        others = opening.assigned & {*self._function.kinds} - {"grad"}
        if others or ast.unparse(opening.result) != "grad":
            opening.refuse("an opening changes the gradient alone, and ends with `return grad`")

    def _check_scalars(self) -> None:
        """Refuses scalars that would not be the same on a device."""
        try:
            tracing.check(self._scalars, [name for name in self.scalar_names if name not in PARAM_SCALARS])
        except tracing.NotOnBothSides as error:
            name, line = getattr(self._scalars, "__name__", "scalars"), tracing.line_in(self._scalars, error)
            self._function.refuse(f"its scalars, {name}, {line}: {error}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.opening is None or self._opening is None:
            return self.update(*args, **kwargs)
        given = {**dict(zip(self._function.kinds, args, strict=False)), **kwargs}
        grad = self.opening(**{name: given[name] for name in self._opening.kinds})
        return self.update(**{**given, "grad": grad})

    def __repr__(self) -> str:
        return f"<rule {self.name}: roles {', '.join(self.roles)}>"

    @cached_property
    def hyper_parameters(self) -> tuple[str, ...]:
        """The arguments of ``scalars`` without ``step``."""
        return tuple(n for n in inspect.signature(self._scalars).parameters if n != "step")

    @cached_property
    def choices(self) -> frozenset[str]:
        """The hyper-parameters that are strings, each with all of its values known."""
        return frozenset(tracing.choices(self._scalars))

    @cached_property
    def optional_states(self) -> tuple[str, ...]:
        """The states that some flags leave out."""
        always = [{*self.specialize(dict.fromkeys(self.flags, on)).states} for on in (False, True)]
        return tuple(role for role in self.roles[2:] if not all(role in states for states in always))

    def scalars(self, step: Any, **options: Any) -> Mapping[str, Any]:
        """``step``: a number, whose powers are then those of ``counts.py``, or anything else that has powers."""
        return self._scalars(step=Count(step) if isinstance(step, (int, float)) else step, **options)

    def scalars_of(self, keys: Sequence[tuple[tuple[Any, ...], float]]) -> tuple[list[Mapping[str, Any]], list[int]]:
        """The scalars of each distinct (hyper-parameters, step) among the keys, and for each key their index.

        They are computed one at a time with Python's floats: the bits of numpy's powers depend on the processor.
        """
        order = {key: k for k, key in enumerate(dict.fromkeys(keys))}
        names = self.hyper_parameters
        scalars = [self.scalars(step=step, **dict(zip(names, options, strict=True))) for options, step in order]
        return scalars, [order[key] for key in keys]

    def scalar_program(self, strings: tuple[tuple[str, str], ...]) -> ScalarProgram:
        """The scalars as a list of operations, for these values of the options that are strings."""
        if strings not in self._scalar_programs:
            wanted = [name for name in self.scalar_names if name not in PARAM_SCALARS]
            self._scalar_programs[strings] = scalar_program(self._scalars, self.hyper_parameters, wanted, dict(strings))
        return self._scalar_programs[strings]

    def lowered(self, flags: Mapping[str, bool], every_branch: bool = False) -> tuple[Lowering, list[ast.stmt]]:
        """The statements of the opening and of the rule, as straight-line code."""
        lowering = Lowering(self._function, flags, every_branch=every_branch)
        if self._opening is None:
            return lowering, list(lowering.statements(self._function.body))
        asked = {name: value for name, value in flags.items() if name in self._opening.kinds}
        opening = Lowering(self._opening, asked, lowering, every_branch=every_branch)
        body = list(opening.statements(self._opening.body))
        lowering.conditions.update(opening.conditions)
        body += lowering.statements(self._function.body)
        lowering.assigned |= opening.assigned  # not before: as in Python, the rule sees nothing of it but its result
        return lowering, body

    def specialize(
        self,
        flags: Mapping[str, bool],
        param: Tensor | None = None,
        deferred: Collection[str] = (),
        measures_norms: bool = False,
    ) -> SpecializedRule:
        """The rule with its flags decided; a flag that is left out is False. ``param``: a parameter, for the flags that
        come from it. ``deferred``: roles that are stored in the last visit of the elements only (see ``stages.py``).
        ``measures_norms``: it also reports norms of gradient, update and weights (see ``norms.py``)."""
        from_param = {} if param is None else {name: ask(param) for name, ask in PARAM_FLAGS.items()}
        decided = {name: bool({**flags, **from_param}.get(name)) for name in self.flags}
        key = tuple(decided.values()), frozenset(deferred), measures_norms
        if key not in self._specializations:
            specialized = _specialize(self, decided, key[1], measures_norms)
            for shared in specialized.shared:
                if self._shared_at.setdefault(shared.name, shared.position) != shared.position:
                    why = f"{specialized.title}: {shared.name} comes in another round here than under other flags"
                    self._function.refuse(why)
            self._specializations[key] = specialized
        return self._specializations[key]


def rule(
    *without_scalars: Any, scalars: Callable[..., Mapping[str, Any]] | None = None, reports: Sequence[str] = (),
    opening: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Rule]:  # fmt: skip
    """Makes a rule of a function: the page "Your optimizer in an afternoon" (docs/rules.md) says what it may contain.

    Args:
        scalars: the function that computes what is the same for all elements, from the step and the options
        reports: values of the rule that ``optimizer.report(name)`` reads after a step
        opening: what the rule begins with: a function of ``grad`` and of other arguments of the rule that returns the
            ``grad`` which the rule sees, such as ``fusedadam.ops.maximized_and_clipped``
    """
    if without_scalars or scalars is None:
        raise TypeError("a rule needs its scalars; write @rule(scalars=...) above it")
    if not callable(scalars):
        raise TypeError(f"scalars={scalars!r} is a {type(scalars).__name__}; it must be a function that returns a dict")
    return lambda update: Rule(update, scalars, reports, opening)


def _real_numbers(param: Tensor) -> int:
    """How many there are in a parameter: two in a complex number."""
    return param.numel() * (2 if param.is_complex() else 1)


def _with_step(scalars: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
    """Scalars that do not depend on the step may leave it out of their arguments."""
    signature = inspect.signature(scalars)
    if any(name == "step" or given.kind is given.VAR_KEYWORD for name, given in signature.parameters.items()):
        return scalars

    @functools.wraps(scalars)
    def call(step: Any, **options: Any) -> Mapping[str, Any]:
        return scalars(**options)

    step = inspect.Parameter("step", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = signature.replace(parameters=[step, *signature.parameters.values()])  # type: ignore[attr-defined]
    return call


def _specialize(
    owner: Rule, flags: dict[str, bool], deferred: Collection[str], measures_norms: bool
) -> SpecializedRule:
    lowering, body = owner.lowered(flags)
    outputs = [r for r in owner.roles if r in owner.returned and r in lowering.assigned]
    lowering.expect(False, owner._function.result, [ast.Name(name) for name in (*outputs, *owner.reports)])
    reports = owner.reports
    if measures_norms:
        body, reports = with_norms(lowering, body), (*reports, *REPORTS.values())
    staged = split_into_stages(lowering, body, outputs, reports, deferred)
    read = {name for stage in staged.stages for name in stage.reads if name in owner.roles}
    asked = {name for stage in staged.stages for name in (*stage.scalars, *stage.reads)}
    return SpecializedRule(
        **vars(staged),
        rule=owner,
        flags=tuple(flags.items()),
        roles=tuple(r for r in owner.roles if r in read or r in outputs),
        outputs=tuple(outputs),
        scalars=tuple(s for s in owner.scalar_names if s in asked),
    )
