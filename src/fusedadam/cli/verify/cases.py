"""The cases: which optimizers, with which flags, in which dtypes and storage formats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedadam.cli.optimizer_names import optimizers
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.storage import PRESETS
from fusedadam.formats import FORMAT_OF_DTYPE, names
from fusedadam.optimizers.bert_adam import CLIPS
from fusedadam.schedules import SCHEDULES

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
MIXES = ((F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32), (F32, BF16))  # parameters, states
OPTIMIZERS = optimizers()

# Norms that gradients are clipped to. Random gradients have norms of up to 180 per parameter, about 300 in all; an L2
# penalty must stay well below the gradients, or only the rounding errors of both remain.
OF_ALL, OF_SOME = 200.0, 50.0
ADAM = {"amsgrad": (False, True), "maximize": (False, True), "max_grad_norm": (None, OF_ALL)}
FLAGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "AdamW": ADAM,
    "Adam": ADAM,
    "EmaAdamW": {"decoupled": (True, False), "max_grad_norm": (None, OF_ALL)},
    "AdamP": {"nesterov": (False, True), "maximize": (False, True), "max_grad_norm": (None, OF_SOME)},
    "BertAdam": {"clip": (None, *CLIPS), "maximize": (False, True)},
    "SGD": {"momentum": (None, "plain", "nesterov"), "maximize": (False, True), "max_grad_norm": (None, OF_ALL)},
    "RMSprop": {
        "momentum": (None, 0.9), "centered": (False, True), "maximize": (False, True), "max_grad_norm": (None, OF_ALL)
    },
    "RMSpropTF": {
        "momentum": (None, 0.9), "centered": (False, True), "decoupled_decay": (False, True),
        "max_grad_norm": (None, OF_ALL),
    },
    "Adadelta": {"maximize": (False, True), "max_grad_norm": (None, OF_ALL)},
    "Lamb": {"clip": (None, "max_grad_norm", "global"), "adam": (False, True), "maximize": (False, True)},
    "RAdam": {
        "decoupled_weight_decay": (False, True), "maximize": (False, True), "max_grad_norm": (None, OF_ALL)
    },
    "NAdam": {
        "decoupled_weight_decay": (False, True), "maximize": (False, True), "max_grad_norm": (None, OF_ALL)
    },
    "Adafactor": {"eps": (None, 1e-3), "maximize": (False, True), "max_grad_norm": (None, OF_ALL)},
    "Adan": {"no_prox": (False, True), "maximize": (False, True), "max_grad_norm": (None, OF_ALL)},
    "AdEMAMix": {"maximize": (False, True), "max_grad_norm": (None, OF_ALL)},
    "Lion": {"maximize": (False, True), "max_grad_norm": (None, OF_ALL)},
    "ScheduleFreeAdamW": {"maximize": (False, True), "max_grad_norm": (None, OF_ALL)},
}  # fmt: skip
# Every flag on and off, every dtype. Kernels that sum compile much more slowly, so cases that share them use the same
# flags; `--all` takes every combination.
BY_HAND: dict[str, list[tuple[Any, ...]]] = {
    "AdamW": [
        (False, False, None, (F32, F32)), (True, False, None, (F16, F16)), (False, True, None, (BF16, F32)),
        (True, True, None, (F32, BF16)),
        (True, False, OF_ALL, (F32, F32)), (True, False, OF_ALL, (BF16, BF16)), (True, False, OF_ALL, (F64, F64)),
    ],
    "Adam": [
        (True, True, None, (F32, F32)), (False, False, None, (BF16, BF16)), (True, False, None, (F64, F64)),
        (False, True, OF_ALL, (F16, F16)), (False, True, OF_ALL, (BF16, F32)), (False, True, OF_ALL, (F32, BF16)),
    ],
    "EmaAdamW": [
        (True, None, (F32, F32)), (False, None, (F16, F16)), (True, None, (F64, F64)), (False, None, (BF16, F32)),
        (True, OF_ALL, (BF16, BF16)), (True, OF_ALL, (F32, BF16)), (False, OF_ALL, (F32, F32)),
    ],
    "AdamP": [
        (False, False, None, (F32, F32)), (False, False, None, (BF16, F32)), (False, False, None, (F32, BF16)),
        (True, False, None, (F16, F16)), (False, True, None, (F64, F64)), (True, True, OF_SOME, (BF16, BF16)),
    ],
    "BertAdam": [
        (None, True, (BF16, F32)), ("parameter", False, (F32, F32)), ("parameter", False, (F16, F16)),
        ("group", True, (BF16, BF16)), ("group", True, (F32, BF16)), ("all", False, (F64, F64)),
    ],
    "SGD": [
        (None, False, None, (F32, F32)), (None, False, None, (BF16, F32)), ("plain", True, None, (F16, F16)),
        ("plain", True, None, (F32, BF16)), ("nesterov", False, None, (BF16, BF16)),
        ("nesterov", False, OF_ALL, (F64, F64)),
    ],
    "RMSprop": [
        (None, False, False, None, (F32, F32)), (None, False, False, None, (BF16, BF16)),
        (0.9, True, True, None, (F64, F64)), (0.9, True, True, None, (BF16, F32)),
        (0.9, False, False, OF_ALL, (F16, F16)), (0.9, False, False, OF_ALL, (F32, BF16)),
    ],
    "RMSpropTF": [
        (0.9, False, False, None, (F32, F32)), (0.9, False, False, None, (F16, F16)),
        (0.9, True, True, None, (BF16, F32)), (0.9, True, True, None, (F64, F64)),
        (None, False, True, OF_ALL, (BF16, BF16)), (None, False, True, OF_ALL, (F32, BF16)),
    ],
    "Adadelta": [
        (False, None, (F32, F32)), (False, None, (BF16, F32)), (False, None, (F32, BF16)),
        (True, None, (F64, F64)), (True, OF_ALL, (BF16, BF16)), (True, OF_ALL, (F16, F16)),
    ],
    "Lamb": [
        (None, False, False, (F32, F32)), (None, False, False, (BF16, F32)), (None, False, False, (F32, BF16)),
        ("global", False, True, (BF16, BF16)), ("max_grad_norm", True, False, (F64, F64)),
        ("max_grad_norm", True, False, (F16, F16)),
    ],
    "RAdam": [
        (False, False, None, (F32, F32)), (False, False, None, (BF16, BF16)), (True, False, None, (F64, F64)),
        (True, False, None, (BF16, F32)), (True, True, OF_ALL, (F16, F16)), (True, True, OF_ALL, (F32, BF16)),
    ],
    "NAdam": [
        (False, False, None, (F32, F32)), (False, False, None, (BF16, BF16)), (True, False, None, (F64, F64)),
        (True, False, None, (BF16, F32)), (True, True, OF_ALL, (F16, F16)), (True, True, OF_ALL, (F32, BF16)),
    ],
    "Adafactor": [
        (None, False, None, (F32, F32)), (None, False, None, (BF16, F32)), (None, False, None, (F64, F64)),
        (1e-3, True, OF_ALL, (F16, F16)), (1e-3, True, OF_ALL, (BF16, BF16)), (1e-3, True, OF_ALL, (F32, BF16)),
    ],
    "Adan": [
        (False, False, None, (F32, F32)), (False, False, None, (BF16, F32)), (True, False, None, (F64, F64)),
        (True, False, None, (BF16, BF16)), (True, True, OF_ALL, (F16, F16)), (True, True, OF_ALL, (F32, BF16)),
    ],
    "AdEMAMix": [
        (False, None, (F32, F32)), (False, None, (BF16, F32)), (False, None, (F16, F16)),
        (True, None, (F32, BF16)), (True, None, (F64, F64)), (True, OF_ALL, (BF16, BF16)),
    ],
    "Lion": [
        (False, None, (F32, F32)), (False, None, (BF16, F32)), (False, None, (F16, F16)),
        (True, None, (F32, BF16)), (True, None, (F64, F64)), (True, OF_ALL, (BF16, BF16)),
    ],
    "ScheduleFreeAdamW": [
        (False, None, (F32, F32)), (False, None, (BF16, F32)), (False, None, (F16, F16)),
        (True, None, (F32, BF16)), (True, None, (F64, F64)), (True, OF_ALL, (BF16, BF16)),
    ],
}  # fmt: skip
# With ``storage=``. AdamP's kernels compile slowly: "exact" and "8bit" share some, "16bit" has its own (`--all`).
STORED: dict[str, list[tuple[Any, ...]]] = {
    "AdamW": [(False, False, None, preset) for preset in PRESETS],
    "Adam": [(True, False, None, preset) for preset in PRESETS],
    "EmaAdamW": [(True, None, preset) for preset in PRESETS],
    "AdamP": [(False, False, None, preset) for preset in ("exact", "8bit")],
    "BertAdam": [(None, False, preset) for preset in PRESETS],
    "SGD": [("plain", False, None, preset) for preset in PRESETS],
    "RMSprop": [(0.9, False, False, None, preset) for preset in PRESETS],
    "RMSpropTF": [(0.9, False, False, None, preset) for preset in PRESETS],
    "Adadelta": [(False, None, preset) for preset in PRESETS],
    "Lamb": [(None, False, False, preset) for preset in ("exact", "8bit")],
    "RAdam": [(False, False, None, preset) for preset in PRESETS],
    "NAdam": [(False, False, None, preset) for preset in PRESETS],
    "Adafactor": [(None, False, None, preset) for preset in ("exact", "8bit")],
    "Adan": [(False, False, None, preset) for preset in PRESETS],
    "AdEMAMix": [(False, None, preset) for preset in PRESETS],
    "Lion": [(False, None, preset) for preset in PRESETS],
    "ScheduleFreeAdamW": [(False, None, preset) for preset in PRESETS],
}
# What two groups of the optimizers differ in that have no betas of Adam
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({}, {}),
    "RMSprop": ({"alpha": 0.96875}, {"alpha": 0.875}),
    "RMSpropTF": ({"alpha": 0.96875}, {"alpha": 0.875, "lr_in_momentum": False}),
    "Adadelta": ({"rho": 0.875}, {"rho": 0.75}),
    "Adafactor": ({"beta2_decay": -0.5}, {"d": 2.0}),
    # exact powers: the sign of what cancels must not depend on rounding
    "Lion": ({"betas": (0.875, 0.96875)}, {"betas": (0.5, 0.75)}),
}
SCALED = ("AdamW", "BertAdam")  # gradients are scaled in the first case in float16


@dataclass(frozen=True)
class Case:
    optimizer: str
    flags: tuple[tuple[str, Any], ...]
    param: torch.dtype
    state: torch.dtype
    scaled: bool = False  # gradients are scaled, as by torch.amp.GradScaler
    storage: str | None = None  # a preset, with parameters in bfloat16

    @property
    def is_ours(self) -> bool:
        """Whether errors have the limits that this package promises for its own optimizers."""
        return self.optimizer in OPTIMIZERS

    @property
    def has_same_bits(self) -> bool:
        """Whether all backends must give the same bits."""
        return True

    @property
    def is_judged(self) -> bool:
        """By the rule in float64. What is rounded stochastically is only compared, with the eager backend's bits."""
        return self.storage in (None, "exact")

    @property
    def mix(self) -> str:
        if self.storage is not None:
            return self.storage
        return FORMAT_OF_DTYPE[self.param] + ("" if self.state == self.param else f"/{FORMAT_OF_DTYPE[self.state]}")

    @property
    def title(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        states = f", states in {names([self.state])}" if self.storage is None else ""
        scaled = ", gradients scaled" if self.scaled else ""
        return f"{self.optimizer}({said}), parameters in {names([self.param])}{states}{scaled}"

    @property
    def options(self) -> dict[str, Any]:
        options = {name: value for name, value in self.flags if value not in (None, False) or name == "decoupled"}
        if self.optimizer == "BertAdam":
            options["max_grad_norm"] = OF_SOME if "clip" in options else None
        if self.optimizer == "Lamb":
            clip = options.pop("clip", None)
            options["max_grad_norm"] = OF_ALL if clip == "max_grad_norm" else None
            options["use_global_grad_norm"] = clip == "global"
        if self.optimizer == "Adafactor" and "eps" in options:
            options["eps"] = (options["eps"], 1e-3)
        if self.optimizer == "SGD" and "momentum" in options:
            options |= {"nesterov": options["momentum"] == "nesterov", "momentum": 0.9}
        return options if self.storage is None else {**options, "storage": self.storage}

    def make(self, params: Sequence[Tensor], backend: str) -> FusedOptimizer:
        """With groups that differ in numbers only, and so share kernels."""
        own = self._groups()
        groups = [{"params": list(params[k :: len(own)]), **options} for k, options in enumerate(own)]
        dtypes = {"state_dtype": self.state} | ({"ema_dtype": self.state} if self.optimizer == "EmaAdamW" else {})
        dtypes = dtypes if self.storage is None else {}
        make: Callable[..., FusedOptimizer] = OPTIMIZERS[self.optimizer]
        return make(groups, backend=backend, **dtypes, **self.options)

    def _groups(self) -> list[dict[str, Any]]:
        # the judge computes in float64, too: exact powers keep its own rounding errors out
        beta1, beta2 = (0.875, 0.96875) if self.param == F64 else (0.9, 0.999)
        common: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
        if self.optimizer == "BertAdam":
            common |= {"b1": beta1, "b2": beta2, "e": 1e-3 if self.state == F16 else 1e-6}
            return [common, *({**common, "schedule": s, "warmup": 0.4, "t_total": 6} for s in SCHEDULES)]
        if self.optimizer in OTHERS:
            eps = 1e-3 if self.state == F16 else 1e-6
            first, second = OTHERS[self.optimizer]
            first, second = ({"eps": eps, **own} if "alpha" in own or "rho" in own else own for own in (first, second))
            return [{**common, **first}, {**common, "lr": 3e-3, "weight_decay": 0.02, **second}]
        # a second moment that underflows in float16 is 0, and only eps is left to divide by
        common |= {"betas": (beta1, beta2), "eps": 1e-3 if self.state == F16 else 1e-8}
        if self.optimizer == "EmaAdamW":
            others = {"ema_warmup": False, "bias_correction": False, "ema_decay": 0.75}
            return [{**common, "ema_decay": 0.9}, {**common, **others, "lr": 3e-3}]
        if self.optimizer == "Adan":
            common["betas"] = (beta1, 0.75, beta2)
        if self.optimizer == "AdEMAMix":
            common |= {"betas": (beta1, beta2, 0.9921875), "alpha_warmup": 4}
        other = {"bias_correction": False, "max_weight_norm": 10.0} if self.optimizer == "Lamb" else {}
        return [common, {**common, "lr": 3e-3, "weight_decay": 0.02, **other}]


def chosen(optimizers: Sequence[str], everything: bool) -> list[Case]:
    """Every flag, dtype and preset of ``storage=`` of each optimizer; ``everything``: every combination of them."""
    found = []
    for name in optimizers:
        to_scale = name in SCALED
        for *flags, (param, state) in itertools.product(*FLAGS[name].values(), MIXES) if everything else BY_HAND[name]:
            scaled = to_scale and param == F16
            to_scale = to_scale and not scaled
            found.append(Case(name, tuple(zip(FLAGS[name], flags, strict=True)), param, state, scaled))
        for *flags, preset in itertools.product(*FLAGS[name].values(), PRESETS) if everything else STORED[name]:
            found.append(Case(name, tuple(zip(FLAGS[name], flags, strict=True)), BF16, F32, storage=preset))
    return found


def together(cases: Sequence[Case]) -> list[list[Case]]:
    """Groups of cases that share kernels, one task each: the longest first, so that no process ends much later."""
    shared: dict[Any, list[Case]] = {}
    for case in cases:
        shared.setdefault((case.optimizer, case.flags, case.storage is None), []).append(case)
    return sorted(shared.values(), key=lambda task: -len(task) * (4 if task[0].optimizer == "AdamP" else 1))
