"""The optimizers, their valid options, and options for which they must raise.

Numba compiles a kernel for each combination of flags and dtypes, so there both come from short lists in which every
flag occurs. The eager backend compiles nothing, and gets all combinations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import fusedadam
from tests.fuzz.tensors import DTYPES, LAYOUTS, SHAPES
from tests.support import LR_OF_ONE_DIMENSION

Flags = Mapping[str, Any]
Change = tuple[str, Any]
NAN = math.nan


@dataclass(frozen=True, eq=False)
class Family:
    """One optimizer. ``compiled`` are the flags that Numba is asked for, ``flags`` all of them by name."""

    name: str
    compiled: Sequence[Flags]
    flags: Mapping[str, Sequence[Any]]
    changes: Sequence[Change]
    refused: Sequence[Change]

    @property
    def make(self) -> Any:
        return getattr(fusedadam, self.name)

    def rows(self, backend: str) -> list[Flags]:
        """Every choice of flags on this backend, each with all of its flags."""
        every = [dict(zip(self.flags, row, strict=True)) for row in itertools.product(*self.flags.values())]
        neutral = {name: choices[0] for name, choices in self.flags.items()}
        return every if backend == "eager" else [{**neutral, **row} for row in self.compiled]


CLIP = (None, 0.5, math.inf)
CHANGES = [("lr", 0.02), ("lr", 0.0), ("weight_decay", 0.0), ("weight_decay", 0.2)]
ADAM_CHANGES = [*CHANGES, ("betas", (0.8, 0.95)), ("betas", [0.0, 0.5]), ("betas", (0.9, 0.0)), ("eps", 1e-3)]
REFUSED = [("lr", "0.1"), ("lr", -1.0), ("lr", NAN), ("lr", None), ("weight_decay", -0.1)]
ADAM_REFUSED = [*REFUSED, ("max_grad_norm", -1), ("eps", -1e-8), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9))]
ADAM_REFUSED += [("betas", (0.9, NAN))]
THREE_BETAS = [("betas", (0.8, 0.7, 0.95)), ("betas", [0.0, 0.5, 0.9]), ("betas", (0.9, 0.0, 0.0))]
THREE_REFUSED = [("betas", (0.9, 0.9)), ("betas", (0.9, 0.9, 1.0)), ("betas", (0.9, NAN, 0.9))]
ADAM_FLAGS = {"amsgrad": (False, True), "maximize": (False, True), "max_grad_norm": CLIP}

FAMILIES = [
    Family(
        "AdamW",
        compiled=[
            {},
            {"amsgrad": True, "max_grad_norm": 0.5},
            {"maximize": True, "max_grad_norm": math.inf},
            {"amsgrad": True, "maximize": True},
        ],
        flags=ADAM_FLAGS,
        changes=ADAM_CHANGES,
        refused=ADAM_REFUSED,
    ),
    Family(
        "Adam",
        compiled=[{}, {"amsgrad": True, "maximize": True, "max_grad_norm": 0.5}],
        flags=ADAM_FLAGS,
        changes=ADAM_CHANGES,
        refused=ADAM_REFUSED,
    ),
    Family(
        "EmaAdamW",
        compiled=[{}, {"decoupled": False}, {"max_grad_norm": 0.5}],
        flags={"decoupled": (True, False), "max_grad_norm": CLIP},
        changes=[
            *ADAM_CHANGES,
            ("ema_decay", 0.9),
            ("ema_decay", 1.0),
            ("ema_warmup", False),
            ("ema_warmup", True),
            ("bias_correction", False),
        ],
        refused=[*ADAM_REFUSED, ("ema_decay", 1.5), ("ema_decay", "0.9")],
    ),
    Family(
        "AdamP",
        compiled=[{}, {"nesterov": True, "max_grad_norm": 0.5}, {"maximize": True}],
        flags={"nesterov": (False, True), "maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*ADAM_CHANGES, ("delta", 0.5), ("delta", 0.0), ("wd_ratio", 0.5)],
        refused=[*ADAM_REFUSED, ("delta", -0.1), ("wd_ratio", NAN)],
    ),
    Family(
        "BertAdam",
        compiled=[
            {"max_grad_norm": None},
            {"max_grad_norm": 0.5},
            {"max_grad_norm": 0.5, "clip": "group"},
            {"max_grad_norm": 0.5, "clip": "all", "maximize": True},
        ],
        flags={
            "max_grad_norm": (0.5, None, -1, math.inf),
            "clip": ("parameter", "group", "all"),
            "maximize": (False, True),
        },
        changes=[
            *CHANGES,
            ("b1", 0.5),
            ("b2", 0.9),
            ("e", 1e-3),
            ("t_total", 10),
            ("t_total", -1),
            ("warmup", 0.3),
            ("warmup", -1),
            ("schedule", "warmup_cosine"),
            ("schedule", "warmup_poly"),
            ("schedule", "warmup_constant"),
        ],
        refused=[*REFUSED, ("max_grad_norm", -2), ("b1", 1.0), ("b2", NAN), ("e", -1.0), ("schedule", "linear")],
    ),
    Family(
        "SGD",
        compiled=[{"momentum": 0.9}, {"maximize": True, "max_grad_norm": 0.5}],
        flags={"momentum": (0.9, 0.0), "nesterov": (False, True), "maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*CHANGES, ("dampening", 0.5), ("dampening", -1.0), ("dampening", 0.0)],
        refused=[*REFUSED, ("momentum", -0.1), ("momentum", None), ("dampening", NAN)],
    ),
    Family(
        "RMSprop",
        compiled=[{"momentum": 0.9}, {"maximize": True, "max_grad_norm": 0.5}],
        flags={"momentum": (0.9, 0.0), "maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*CHANGES, ("alpha", 0.5), ("alpha", 0.0), ("eps", 1e-3)],
        refused=[*REFUSED, ("alpha", -0.1), ("eps", -1e-8), ("momentum", NAN)],
    ),
    Family(
        "Adadelta",
        compiled=[{}, {"maximize": True, "max_grad_norm": 0.5}],
        flags={"maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*CHANGES, ("rho", 0.5), ("rho", 0.0), ("rho", 1.0), ("eps", 1e-3)],
        refused=[*REFUSED, ("rho", 1.5), ("rho", NAN), ("eps", -1e-8)],
    ),
    Family(
        "Lion",
        compiled=[{}, {"maximize": True, "max_grad_norm": 0.5}],
        flags={"maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*CHANGES, ("betas", (0.8, 0.95)), ("betas", [0.0, 0.5]), ("betas", (0.9, 0.0))],
        refused=[*REFUSED, ("max_grad_norm", -1), ("betas", (0.9, 1.0)), ("betas", (0.9,))],
    ),
    Family(
        "RAdam",
        compiled=[{}, {"decoupled_weight_decay": True, "maximize": True, "max_grad_norm": 0.5}],
        flags={"decoupled_weight_decay": (False, True), "maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*ADAM_CHANGES, ("betas", (0.9, 0.7))],  # rectified from the seventh step on
        refused=ADAM_REFUSED,
    ),
    Family(
        "NAdam",
        compiled=[{}, {"decoupled_weight_decay": True, "maximize": True, "max_grad_norm": 0.5}],
        flags={"decoupled_weight_decay": (False, True), "maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*ADAM_CHANGES, ("momentum_decay", 0.0), ("momentum_decay", 0.5)],
        refused=[*ADAM_REFUSED, ("momentum_decay", -0.1)],
    ),
    Family(
        "Adafactor",
        compiled=[{}, {"eps": (1e-3, 1e-2), "maximize": True, "max_grad_norm": 0.5}],
        flags={"eps": ((None, 1e-3), (1e-3, 1e-2)), "maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*CHANGES, ("beta2_decay", -0.5), ("beta2_decay", 0.0), ("d", 2.0)],
        refused=[*REFUSED, ("beta2_decay", 0.1), ("d", 0.5), ("eps", 1e-3), ("eps", (None, None)), ("eps", (NAN, 0))],
    ),
    Family(
        "Adan",
        compiled=[{}, {"no_prox": True, "maximize": True, "max_grad_norm": 0.5}],
        flags={"no_prox": (False, True), "maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*CHANGES, *THREE_BETAS, ("eps", 1e-3)],
        refused=[*REFUSED, *THREE_REFUSED, ("max_grad_norm", -1), ("eps", -1e-8)],
    ),
    Family(
        "AdEMAMix",
        compiled=[{}, {"maximize": True, "max_grad_norm": 0.5}],
        flags={"maximize": (False, True), "max_grad_norm": CLIP},
        changes=[*CHANGES, *THREE_BETAS, ("eps", 1e-3), ("alpha", 0.0), ("alpha", 8.0), ("alpha_warmup", 5)],
        refused=[*REFUSED, *THREE_REFUSED, ("eps", -1e-8), ("alpha", -1.0), ("alpha_warmup", 0)],
    ),
]

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
