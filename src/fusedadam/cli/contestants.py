"""Which optimizers are measured: ours, and for each the peers that compute the same.

Peers are only looked up here. They are imported where they are measured, in processes of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedadam.cli.optimizer_names import optimizer_class, optimizers
from fusedadam.cli.peers import BertAdamLoop, LambLoop, TorchAdamWWithEma, Yardstick
from fusedadam.contract import storage

OURS = "fusedadam"
# Ours with ``storage=``, by what the parameters are in: where a preset changes nothing, or is refused, it is left out.
PRESETS = {f"{OURS}-{preset}": preset for preset in storage.PRESETS}
PRESETS_BY_DTYPE = {
    "bfloat16": ("exact", "16bit", "8bit"), "float32": ("16bit", "8bit"), "float16": ("16bit", "8bit"), "float64": (),
}  # fmt: skip
COMPILES = "compiles for minutes, so only on request (--peers all, or by name)"
Params = list[torch.nn.Parameter]

# Explicit, because defaults differ between packages.
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
OPTIONS: dict[str, Mapping[str, Any]] = {
    "AdamW": ADAM,
    "Adam": {**ADAM, "weight_decay": 0.0},
    "EmaAdamW": ADAM,
    "AdamP": ADAM,
    "BertAdam": {"lr": 1e-3, "weight_decay": 1e-2, "max_grad_norm": 1.0, "warmup": 0.1, "t_total": 100_000},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4},
    "RMSprop": {"lr": 1e-3, "alpha": 0.99, "eps": 1e-8, "weight_decay": 1e-4},
    "RMSpropTF": {"lr": 1e-3, "alpha": 0.9, "eps": 1e-10, "weight_decay": 1e-5, "momentum": 0.9},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 1e-4},
    "Lamb": {**ADAM, "eps": 1e-6},
    "RAdam": ADAM,
    "NAdam": {**ADAM, "momentum_decay": 4e-3},
    "Adafactor": {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 1e-2},
    "Adan": {**ADAM, "betas": (0.98, 0.92, 0.99)},
    "AdEMAMix": {**ADAM, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 1e-1},
    "ScheduleFreeAdamW": {**ADAM, "lr": 2.5e-3, "warmup_steps": 100},
}


@dataclass(frozen=True)
class Peer:
    """Another implementation. ``make(params, **options)`` returns an object with ``step()``."""

    name: str
    make: Callable[..., Any]
    package: str | None = None  # what must be installed
    gpu_only: bool = False
    compiles: bool = False  # for minutes, before the first step: measured only on request

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


class Compiled:
    """torch's own optimizer with its step compiled by torch.compile."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.step = torch.compile(lambda: optimizer.step(), fullgraph=False)


def _from(module: str, name: str, **fixed: Any) -> Callable[..., Any]:
    """``name`` of a module that is imported by the first call."""
    return lambda params, **options: getattr(importlib.import_module(module), name)(params, **options, **fixed)


def _deepspeed(params: Params, decoupled: bool, **options: Any) -> Any:
    adam = importlib.import_module("deepspeed.ops.adam")
    if params[0].device.type == "cpu":
        return adam.DeepSpeedCPUAdam(params, adamw_mode=decoupled, **options)
    return adam.FusedAdam(params, adam_w_mode=decoupled, **options)


def _adams(name: str) -> list[Peer]:
    """The peers of AdamW and Adam."""
    torchs, decoupled = getattr(torch.optim, name), name == "AdamW"
    plain: dict[str, Any] = {"quantize": False, "master_weight_bits": None}
    return [
        Peer("torch-fused", lambda params, **o: torchs(params, fused=True, **o)),
        Peer("torch-foreach", lambda params, **o: torchs(params, foreach=True, **o)),
        Peer("torch-compiled", lambda params, **o: Compiled(torchs(params, **o)), compiles=True),
        Peer("optimi", _from("optimi", name), "optimi"),
        Peer("flashoptim", _from("flashoptim", f"Flash{name}", **plain), "flashoptim", gpu_only=True),
        Peer("flashoptim-8bit", _from("flashoptim", f"Flash{name}"), "flashoptim", gpu_only=True),
        Peer("apex", _from("apex.optimizers", "FusedAdam", adam_w_mode=decoupled), "apex", gpu_only=True),
        Peer("bitsandbytes", _from("bitsandbytes.optim", name), "bitsandbytes", gpu_only=True),
        Peer("bitsandbytes-8bit", _from("bitsandbytes.optim", f"{name}8bit"), "bitsandbytes", gpu_only=True),
        Peer("torchao-8bit", _from("torchao.optim", f"{name}8bit"), "torchao", compiles=True),
        Peer("deepspeed", lambda params, **o: _deepspeed(params, decoupled, **o), "deepspeed", compiles=True),
    ]


def _schedule_free(params: Params, **options: Any) -> Any:
    """The authors'. It begins in eval mode."""
    optimizer = _from("schedulefree", "AdamWScheduleFree")(params, **options)
    optimizer.train()
    return optimizer


def _torchs(name: str, *implementations: str) -> list[Peer]:
    """torch's own, the fastest first."""
    torchs = getattr(torch.optim, name)
    return [
        Peer(f"torch-{how}", lambda params, how=how, **o: torchs(params, **{how: True}, **o)) for how in implementations
    ]


# The first peer of each is what people would use without us.
PEERS: dict[str, list[Peer]] = {
    "AdamW": _adams("AdamW"),
    "Adam": _adams("Adam"),
    "EmaAdamW": [Peer("torch-fused+ema", TorchAdamWWithEma)],
    "AdamP": [
        Peer("adamp", _from("adamp", "AdamP"), "adamp"),
        Peer("pytorch_optimizer", _from("pytorch_optimizer", "AdamP"), "pytorch_optimizer"),
    ],
    "BertAdam": [Peer("loop", BertAdamLoop)],
    "SGD": _torchs("SGD", "fused", "foreach"),
    "RMSprop": _torchs("RMSprop", "foreach"),
    "RMSpropTF": [Peer("timm", _from("timm.optim", "RMSpropTF"), "timm")],
    "Adadelta": _torchs("Adadelta", "foreach"),
    "Lamb": [
        Peer("loop", LambLoop),
        Peer("apex", _from("apex.optimizers", "FusedLAMB", max_grad_norm=0.0, use_nvlamb=True), "apex", gpu_only=True),
    ],
    "RAdam": _torchs("RAdam", "foreach"),
    "NAdam": _torchs("NAdam", "foreach"),
    "Adafactor": _torchs("Adafactor", "foreach"),
    "Adan": [
        Peer("adan", _from("adan", "Adan"), "adan"),
        Peer("timm", _from("timm.optim", "Adan"), "timm"),
    ],
    "AdEMAMix": [
        Peer("pytorch_optimizer", _from("pytorch_optimizer", "AdEMAMix"), "pytorch_optimizer"),
        Peer("bitsandbytes", _from("bitsandbytes.optim", "AdEMAMix"), "bitsandbytes", gpu_only=True),
    ],
    "Lion": [
        Peer("timm", _from("timm.optim", "Lion"), "timm"),
        Peer("lion_pytorch", _from("lion_pytorch", "Lion"), "lion_pytorch"),
        Peer("bitsandbytes", _from("bitsandbytes.optim", "Lion"), "bitsandbytes", gpu_only=True),
    ],
    "ScheduleFreeAdamW": [Peer("schedulefree", _schedule_free, "schedulefree")],
}
# Nobody else has an optimizer of the user's own: a known one beside it shows how fast this machine is.
YARDSTICK = Peer("torch-adamw", Yardstick)
PEER_NAMES = list(dict.fromkeys(peer.name for peers in (*PEERS.values(), [YARDSTICK]) for peer in peers))


def peers_of(optimizer: str) -> list[Peer]:
    return PEERS.get(optimizer, []) if optimizer in optimizers() else [YARDSTICK]


def first_peer(optimizer: str) -> str | None:
    return next((peer.name for peer in PEERS[optimizer] if peer.installed), None)


def make(optimizer: str, by: str, params: Params, options: Mapping[str, Any] | None = None) -> Any:
    """An optimizer of that kind: ours, with a preset of ``storage=`` or without, a peer's, or ``module:name``."""
    options = OPTIONS.get(optimizer, {}) if options is None else options
    if by == OURS or by in PRESETS:  # in a group, since the arguments of another author's class may lack storage
        group = {"params": params, "storage": PRESETS.get(by)}
        return optimizer_class(optimizer)([group], **options)
    if ":" in by:
        return _from(*by.split(":", 1))(params, **options)
    return next(peer for peer in peers_of(optimizer) if peer.name == by).make(params, **options)


def presets(optimizer: str, dtype: str, asked: bool) -> list[str]:
    """Ours with ``storage=``: every preset for AdamW, for others "8bit" where someone has ``asked`` for them."""
    wanted = PRESETS.values() if optimizer == "AdamW" else ("8bit",) if asked else ()
    return [by for by, preset in PRESETS.items() if preset in wanted and preset in PRESETS_BY_DTYPE[dtype]]


@dataclass(frozen=True)
class Absent:
    """A peer that is not measured, and why."""

    optimizer: str
    by: str
    why: str


def choose(optimizer: str, device: str, wanted: Sequence[str] | None) -> tuple[list[str], list[Absent]]:
    """The peers to measure, and those that are left out. ``wanted`` None: all that are quickly ready."""
    chosen, absent = [], []
    for peer in peers_of(optimizer):
        asked = wanted is not None and (peer.name in wanted or "all" in wanted)
        if wanted is not None and not asked:
            continue
        if not peer.installed:
            absent.append(Absent(optimizer, peer.name, "not installed"))
        elif peer.gpu_only and device == "cpu":
            absent.append(Absent(optimizer, peer.name, "runs on a GPU only"))
        elif peer.compiles and not asked:
            absent.append(Absent(optimizer, peer.name, COMPILES))
        else:
            chosen.append(peer.name)
    return chosen, absent
