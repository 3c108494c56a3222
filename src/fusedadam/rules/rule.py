"""What a rule is: the mathematics of one optimizer, written once and compiled by every backend.

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

- The signature says what each name is. ``Value``: a role, one element as much as a whole array; ``param`` and
  ``grad`` first, then the states under their names in ``optimizer.state``. ``Scalar``: one number a parameter
  and step. ``Flag``: a choice made when the kernel is compiled.
- The body is assignments of ``+ - * /``, comparisons, numbers, the words of ``fusedadam.rules.ops`` and helper
  functions that follow these same rules; ``if`` asks flags alone (an elementwise choice is ``where``); the
  last statement returns the roles to be stored, by name. ``grad`` is never stored.
- A role that the code does not use under the given flags does not exist then: no memory, no traffic.
- ``scalars`` computes the scalars by name, in float64, from ``step`` and the hyper-parameters; everything that
  is the same for all elements of a parameter belongs there. It is made of ``+ - *``, comparisons, ``beta ** step`` and
  words (``divide`` for ``/``, ``where`` for ``if``), since a step that only the device knows is a tensor: tracing.py
  has the reasons. ``row_length`` and ``numel`` are the parameter's own; so is the flag ``matrix``: two dimensions or
  more.
- ``row_sum``, ``tensor_sum``, ``group_sum``, ``total`` and ``largest`` may stand wherever a value may:
  ``stages.py`` divides the rule where it waits for them. What is made of sums and scalars is calculated in float64.
- ``reports`` names such values, one for each parameter, that can be asked for after a step.

What breaks the contract is refused when the rule is defined, with the line and what to write instead.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor

from fusedadam.rules import tracing
from fusedadam.rules.counts import Count
from fusedadam.rules.lowering import KINDS, Function, Lowering, RuleError
from fusedadam.rules.positions import Position
from fusedadam.rules.stages import Split, split

__all__ = ["Flag", "Rule", "RuleError", "Scalar", "Special", "Value", "Values", "rule"]

Value: TypeAlias = Any
Values: TypeAlias = Any
Scalar: TypeAlias = Any
Flag: TypeAlias = bool

# Scalars and flags that are a parameter's own, whatever its group says.
OWN_SCALARS: dict[str, Callable[[Tensor], float]] = {
    "row_length": lambda param: param.numel() / max(1, param.shape[0] if param.dim() else 1),
    "numel": lambda param: param.numel(),
}
OWN_FLAGS: dict[str, Callable[[Tensor], bool]] = {"matrix": lambda param: param.dim() > 1}
Options: TypeAlias = tuple[Any, ...]  # the hyper-parameters of a group, in the order of the rule's scalars


@dataclass(frozen=True)
class Special(Split):
    """A rule with its flags decided: straight-line source for the backends that compile text, in one stage or more."""

    rule: Rule
    flags: tuple[tuple[str, bool], ...]
    roles: tuple[str, ...]  # read or written, in the order of the signature
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: tuple[str, ...]

    @property
    def title(self) -> str:
        return " ".join([self.rule.name, *(f"{name}={value}" for name, value in self.flags)])

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(r for r in self.roles if r not in ("param", "grad"))


class Rule:
    """A checked rule. Calling it runs the plain Python function, on anything the words understand."""

    def __init__(
        self, update: Callable[..., Any], scalars: Callable[..., Mapping[str, Any]], reports: Sequence[str] = ()
    ) -> None:
        self.update, self._scalars, self.reports, self.name = update, scalars, tuple(reports), update.__name__
        self.__doc__, self.__wrapped__ = update.__doc__, update
        self._function = Function(update)
        kinds = self._function.kinds
        self.roles, self.scalar_names, self.flags = (tuple(n for n, k in kinds.items() if k == kind) for kind in KINDS)
        if self.roles[:1] != ("param",) or ("grad" in self.roles and self.roles[1] != "grad"):
            self._function.fail(self._function.tree, "the first two roles must be `param: Value, grad: Value`")
        self.returned = self._function.returned_roles(self.roles)
        self._specials: dict[tuple[tuple[bool, ...], frozenset[str]], Special] = {}
        self._shared_at: dict[str, Position] = {}  # sums over several parameters: the same under all flags
        Lowering(self._function, dict.fromkeys(self.flags, False), every_branch=True).check()
        self._check_scalars()
        for choice in (False, True):  # the other choices are made when they are first asked for
            self.special(dict.fromkeys(self.flags, choice))

    def _check_scalars(self) -> None:
        """Refuses scalars that would not be the same on a device."""
        try:
            tracing.check(self._scalars, [name for name in self.scalar_names if name not in OWN_SCALARS])
        except tracing.NotOnBothSides as error:
            name = getattr(self._scalars, "__name__", "scalars")
            self._function.fail(self._function.tree, f"its scalars, {name}: {error}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.update(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<rule {self.name}: roles {', '.join(self.roles)}>"

    @cached_property
    def hyper_parameters(self) -> tuple[str, ...]:
        """What ``scalars`` asks for beside ``step``."""
        return tuple(n for n in inspect.signature(self._scalars).parameters if n != "step")

    def scalars(self, step: Any, **options: Any) -> Mapping[str, Any]:
        """``step``: a number, or step counts on a device."""
        return self._scalars(step=Count(step) if isinstance(step, (int, float)) else step, **options)

    def scalars_of(self, keys: Sequence[tuple[tuple[Any, ...], float]]) -> tuple[list[Mapping[str, Any]], list[int]]:
        """The scalars of each different (hyper-parameters, step) among the keys, and which of them each key has.

        One at a time, in Python's own float64: numpy's powers depend on the processor, and would end in other bits.
        """
        order = {key: k for k, key in enumerate(dict.fromkeys(keys))}
        names = self.hyper_parameters
        scalars = [self.scalars(step=step, **dict(zip(names, own, strict=True))) for own, step in order]
        return scalars, [order[key] for key in keys]

    def special(
        self, flags: Mapping[str, bool], param: Tensor | None = None, deferred: Collection[str] = ()
    ) -> Special:
        """``param``: whose own flags count, if it is given. ``deferred``: roles that are stored in the last visit of
        the elements only (see ``stages.py``)."""
        own = {} if param is None else {name: ask(param) for name, ask in OWN_FLAGS.items()}
        decided = {name: bool({**flags, **own}[name]) for name in self.flags}
        key = tuple(decided.values()), frozenset(deferred)
        if key not in self._specials:
            special = _specialise(self, decided, key[1])
            for shared in special.shared:
                if self._shared_at.setdefault(shared.name, shared.position) != shared.position:
                    why = f"{special.title}: {shared.name} comes in another round here than under other flags"
                    self._function.fail(self._function.tree, why)
            self._specials[key] = special
        return self._specials[key]


def rule(
    *, scalars: Callable[..., Mapping[str, Any]], reports: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Rule]:
    """Makes a rule of a function; see the module's docstring for what it may say."""
    return lambda update: Rule(update, scalars, reports)


def _specialise(owner: Rule, flags: dict[str, bool], deferred: Collection[str]) -> Special:
    lowering = Lowering(owner._function, flags)
    body: list[ast.stmt] = list(lowering.statements(owner._function.body))
    outputs = [r for r in owner.roles if r in owner.returned and r in lowering.assigned]
    parts = split(owner._function, lowering, body, owner.roles, outputs, owner.reports, deferred)
    elements = [stage for stage in parts.stages if stage.space == "element"]
    read = {name for stage in elements for name in stage.reads}
    asked = {name for stage in parts.stages for name in (*stage.scalars, *stage.reads)}
    return Special(
        **vars(parts),
        rule=owner,
        flags=tuple(flags.items()),
        roles=tuple(r for r in owner.roles if r in read or r in outputs),
        inputs=tuple(r for r in owner.roles if r in read),
        outputs=tuple(outputs),
        scalars=tuple(s for s in owner.scalar_names if s in asked),
    )
