"""The optimizers, their valid options, and options for which they must raise.

Numba compiles a kernel for each combination of flags and dtypes, so there both come from short lists in which every
flag occurs. The eager backend compiles nothing, and gets all combinations.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import strategies as st

from fusedadam.catalog import CATALOG, Entry
from tests.fuzz.tensors import DTYPES, LAYOUTS, SHAPES
from tests.support import LR_OF_ONE_DIMENSION

Flags = Mapping[str, Any]
Change = tuple[str, Any]
NAN = math.nan


# Values that options may change to, and values that are refused, for every optimizer with such an option
CHANGES: dict[str, Sequence[Any]] = {
    "lr": (0.02, 0.0),
    "weight_decay": (0.0, 0.2),
    "eps": (1e-3,),
    "ema_decay": (0.9, 1.0),
    "ema_warmup": (False, True),
    "bias_correction": (False,),
    "delta": (0.5, 0.0),
    "wd_ratio": (0.5,),
    "b1": (0.5,),
    "b2": (0.9,),
    "e": (1e-3,),
    "t_total": (10, -1),
    "warmup": (0.3, -1),
    "schedule": ("warmup_cosine", "warmup_poly", "warmup_constant"),
    "dampening": (0.5, -1.0, 0.0),
    "alpha": (0.5, 0.0),
    "rho": (0.5, 0.0, 1.0),
    "momentum_decay": (0.0, 0.5),
    "beta2_decay": (-0.5, 0.0),
    "d": (2.0,),
    "momentum": (0.5, 0.0),
    "ns_steps": (3, 0),
    "ns_coefficients": ("polar-express", (2.0, -1.5, 0.5)),
    "alpha_warmup": (5,),
    "beta3_warmup": (6,),
}
REFUSED: dict[str, Sequence[Any]] = {
    "lr": ("0.1", -1.0, NAN, None),
    "weight_decay": (-0.1,),
    "max_grad_norm": (-2,),
    "eps": (-1e-8, (None, None), (NAN, 0)),
    "ema_decay": (1.5, "0.9"),
    "delta": (-0.1,),
    "wd_ratio": (NAN,),
    "b1": (1.0,),
    "b2": (NAN,),
    "e": (-1.0,),
    "schedule": ("linear",),
    "momentum": (-0.1, None),
    "ns_steps": (-1, 100, 2.5),
    "ns_coefficients": ("newton", (1.0, 2.0)),
    "dampening": (NAN,),
    "alpha": (-0.1,),
    "rho": (1.5, NAN),
    "momentum_decay": (-0.1,),
    "beta2_decay": (0.1,),
    "d": (0.5,),
    "alpha_warmup": (0,),
    "beta3_warmup": (-1,),
}
# by how many an optimizer has; RAdam with 0.7 is rectified from the seventh step on
BETAS = {
    2: [(0.8, 0.95), [0.0, 0.5], (0.9, 0.0), (0.9, 0.7)],
    3: [(0.8, 0.7, 0.95), [0.0, 0.5, 0.9], (0.9, 0.0, 0.0)],
}
BAD_BETAS = {
    2: [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN)],
    3: [(0.9, 0.9), (0.9, 0.9, 1.0), (0.9, NAN, 0.9)],
}
CLIP = (None, 0.5, math.inf)
# A variance that is what two averages leave when they cancel has no simple bound on its error.
LEFT_OUT = ("centered",)


class Family:
    """One optimizer: ``flags`` are the options that choose between kernels, with their values."""

    def __init__(self, entry: Entry) -> None:
        self.name, self.make, self.entry = entry.name, cast("Any", entry.cls), entry
        defaults = self.make([torch.nn.Parameter(torch.zeros(1, 1))]).defaults
        self.flags: dict[str, Sequence[Any]] = {n: v for n, v in entry.choices.items() if n not in LEFT_OUT}
        if "maximize" in defaults:
            self.flags["maximize"] = (False, True)
        self.flags["max_grad_norm"] = CLIP if defaults["max_grad_norm"] is None else (0.5, *CLIP, -1)
        betas = len(defaults.get("betas", ()))
        changes, refused = {**CHANGES, "betas": BETAS.get(betas, [])}, {**REFUSED, "betas": BAD_BETAS.get(betas, [])}
        self.changes = [
            (name, value)
            for name, values in changes.items()
            if name in defaults and name not in self.flags
            for value in values
            if self.takes({name: value})
        ]
        assert len(self.changes) > 4
        self.refused = [(name, value) for name, values in refused.items() if name in defaults for value in values]

    def takes(self, options: Flags) -> bool:
        """Some options exclude each other, and a few optimizers refuse what others take."""
        try:
            self.make([torch.nn.Parameter(torch.zeros(1, 1))], **options)
        except ValueError:
            return False
        return True

    @functools.cache  # noqa: B019 - families live as long as the module
    def rows(self, backend: str) -> list[Flags]:
        """Every choice of flags on this backend, each with all of its flags. Compiled are those of other tests."""
        if backend == "eager":
            every = [dict(zip(self.flags, row, strict=True)) for row in itertools.product(*self.flags.values())]
            return [row for row in every if self.takes(row)]
        neutral = {name: choices[0] for name, choices in self.flags.items()}
        chosen = [{n: v for n, v in own.items() if n in self.flags} for own in self.entry.variants.values()]
        return [{**neutral, **own} for own in chosen]


FAMILIES = [Family(entry) for entry in CATALOG.values()]

# storage of a parameter and of its states, None for the parameter's own
COMPILED_MIXES = [("float32", None), ("bfloat16", "float32")]
MIXES = [*COMPILED_MIXES, *itertools.product(DTYPES, (None, *DTYPES))]
KEYWORDS = [{}, {"foreach": True}, {"fused": True}, {"foreach": False, "capturable": True}]
LR_KINDS = ("number", "0-d tensor", *(["1-element tensor"] if LR_OF_ONE_DIMENSION else []))


def lr_of(kind: str, value: float) -> Any:
    """Tensors are float64: what a program sets is then what it reads."""
    if kind == "number":
        return value
    return torch.tensor(value if kind == "0-d tensor" else [value], dtype=torch.float64)


@dataclass(frozen=True)
class Group:
    """What a program says about a group of parameters that it adds."""

    params: Sequence[tuple[tuple[int, ...], str]]  # shape and layout
    dtypes: tuple[str, str | None]
    options: Flags
    lr: str = "number"


def groups(family: Family) -> st.SearchStrategy[Group]:
    def of(backend: str) -> st.SearchStrategy[Group]:
        params = st.tuples(st.sampled_from(SHAPES), st.sampled_from(LAYOUTS))
        options = st.builds(
            lambda flags, keywords: {"backend": backend, **flags, **keywords},
            st.sampled_from(family.rows(backend)),
            st.sampled_from(KEYWORDS),
        )
        return st.builds(
            Group,
            params=st.lists(params, min_size=1, max_size=3),
            dtypes=st.sampled_from(MIXES if backend == "eager" else COMPILED_MIXES),
            options=options,
            lr=st.sampled_from(LR_KINDS),
        )

    return st.sampled_from(["numba", "eager"]).flatmap(of)
