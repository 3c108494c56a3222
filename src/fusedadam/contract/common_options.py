"""The options that optimizers have in common, declared once: their types and defaults.

    @takes(Common)
    def __init__(self, params: Params, lr: float = 1e-3, **common: Unpack[Common]) -> None: ...

Type checkers read the annotation. ``takes`` adds the defaults, and the signature that ``help()``, editors and trainers
inspect; it passes all arguments on to the base class, so that each is written once. A class that accepts one of these
options by position, as torch's does, has it in its own signature, and uses ``Ours`` or ``OursAndTorchs`` instead of
``Common``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_type_hints

import torch

from fusedadam.contract.declarations import Backend
from fusedadam.contract.storage import Storage

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    Unpack = Any  # not in Python 3.10; ``takes`` replaces the annotation

Init = TypeVar("Init", bound=Callable[..., None])


class Ours(TypedDict, total=False):
    """Options that no optimizer of torch has."""

    state_dtype: torch.dtype | str | None
    storage: Storage
    offload: bool
    seed: int
    skip_nonfinite: bool
    backend: Backend | None


class OursAndTorchs(Ours, total=False):
    """``Ours``, and the options by which torch chooses an implementation."""

    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


class Common(OursAndTorchs, total=False):
    """``OursAndTorchs``, and the options that change the gradient before the update."""

    max_grad_norm: float | None
    maximize: bool


DEFAULTS: Common = {
    "max_grad_norm": None, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
    "fused": None, "state_dtype": None, "storage": None, "offload": False, "seed": 0, "skip_nonfinite": False,
    "backend": None,
}  # fmt: skip


def _next_init(cls: type, init: Any) -> Callable[..., None]:
    """What ``super().__init__`` is in ``init``: a mixin's, or the base class's. Others that ``takes`` has made would
    pass on the same, and are left out."""
    inits = [base.__dict__["__init__"] for base in cls.__mro__ if "__init__" in base.__dict__]
    later = inits[inits.index(init) + 1 :]
    return next(each for each in later if not getattr(each, "passes_on", False))  # type: ignore[no-any-return]


def takes(common: Any) -> Callable[[Init], Init]:
    """Decorates an ``__init__`` that ends in ``**common: Unpack[T]``; ``common`` is that T. Fills in the defaults, and
    shows the whole signature. After the function, which may refuse arguments, all are passed on to the base class."""
    written, types = common.__annotations__, get_type_hints(common)
    defaults = {name: value for name, value in DEFAULTS.items() if name in types}

    def decorate(init: Init) -> Init:
        signature = inspect.signature(init)
        *own, rest = signature.parameters.values()
        shown = [
            inspect.Parameter(name, rest.KEYWORD_ONLY, default=value, annotation=written[name].__forward_arg__)
            for name, value in defaults.items()
        ]
        whole = signature.replace(parameters=[*own, *shown])

        @functools.wraps(init)
        def with_defaults(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in whole.parameters:  # the message that Python itself would give
                    cls = init.__qualname__.removesuffix(".__init__")
                    raise TypeError(f"{cls}.__init__() got an unexpected keyword argument {name!r}")
            init(self, *args, **{**defaults, **options})
            given = whole.bind(self, *args, **options)
            given.apply_defaults()
            _next_init(type(self), made)(**given.arguments)

        made: Any = with_defaults
        made.passes_on = True
        made.__signature__ = whole
        made.__annotations__ = {name: t for name, t in init.__annotations__.items() if name != rest.name} | types
        return made  # type: ignore[no-any-return]

    return decorate
