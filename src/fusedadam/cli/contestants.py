"""Who is measured: every optimizer of this package, and beside each the peers that compute the same.

A peer is only looked up here; it is imported where it is measured, in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fusedadam
from fusedadam.cli.peers import AdamPLoop, BertAdamLoop, TorchAdamWWithEma
from fusedadam.optimizers.base import FusedOptimizer

OURS = "fusedadam"
COMPILES = "compiles for minutes, so only if it is asked for (--peers all, or by name)"
Params = list[torch.nn.Parameter]
Options = Mapping[str, Any]

# What all who compute the same are given; in words of their own, since not everyone's defaults are torch's.
ADAM: Options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
OPTIONS: dict[str, Options] = {
    "AdamW": ADAM,
    "Adam": {**ADAM, "weight_decay": 0.0},
    "EmaAdamW": ADAM,
    "AdamP": ADAM,
    "BertAdam": {"lr": 1e-3, "weight_decay": 1e-2, "max_grad_norm": 1.0, "warmup": 0.1, "t_total": 100_000},
}


@dataclass(frozen=True)
class Peer:
    """Another implementation. ``make(params, **options)`` gives an object with ``step()``."""

    name: str
    make: Callable[..., Any]
    package: str | None = None  # what must be installed
    gpu_only: bool = False
    compiles: bool = False  # for minutes, before the first step: measured only if it is asked for

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


class Compiled:
    """A step as torch.compile makes it of torch's own optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.step = torch.compile(lambda: optimizer.step(), fullgraph=False)


def _from(module: str, name: str, **fixed: Any) -> Callable[..., Any]:
    """``name`` of a module that is imported when it is first called."""
    return lambda params, **options: getattr(importlib.import_module(module), name)(params, **options, **fixed)


def _deepspeed(decoupled: bool) -> Callable[..., Any]:
    def make(params: Params, **options: Any) -> Any:
        adam = importlib.import_module("deepspeed.ops.adam")
        if params[0].device.type == "cpu":
            return adam.DeepSpeedCPUAdam(params, adamw_mode=decoupled, **options)
        return adam.FusedAdam(params, adam_w_mode=decoupled, **options)

    return make


def _adams(name: str) -> list[Peer]:
    """The peers of AdamW and Adam, which nearly everyone has."""
    mine = getattr(torch.optim, name)
    plain: dict[str, Any] = {"quantize": False, "master_weight_bits": None}
    return [
        Peer("torch-fused", lambda params, **o: mine(params, fused=True, **o)),
        Peer("torch-foreach", lambda params, **o: mine(params, foreach=True, **o)),
        Peer("torch-compiled", lambda params, **o: Compiled(mine(params, **o)), compiles=True),
        Peer("optimi", _from("optimi", name), "optimi"),
        Peer("flashoptim", _from("flashoptim", f"Flash{name}", **plain), "flashoptim", gpu_only=True),
        Peer("flashoptim-8bit", _from("flashoptim", f"Flash{name}"), "flashoptim", gpu_only=True),
        Peer("apex", _from("apex.optimizers", "FusedAdam", adam_w_mode=name == "AdamW"), "apex", gpu_only=True),
        Peer("bitsandbytes", _from("bitsandbytes.optim", name), "bitsandbytes"),
        Peer("bitsandbytes-8bit", _from("bitsandbytes.optim", f"{name}8bit"), "bitsandbytes"),
        Peer("torchao-8bit", _from("torchao.optim", f"{name}8bit"), "torchao", compiles=True),
        Peer("deepspeed", _deepspeed(name == "AdamW"), "deepspeed", compiles=True),
    ]


# The first one of each is the one that people would use without us.
PEERS: dict[str, list[Peer]] = {
    "AdamW": _adams("AdamW"),
    "Adam": _adams("Adam"),
    "EmaAdamW": [Peer("torch-fused+ema", TorchAdamWWithEma)],
    "AdamP": [
        Peer("adamp", _from("adamp", "AdamP"), "adamp"),
        Peer("pytorch_optimizer", _from("pytorch_optimizer", "AdamP"), "pytorch_optimizer"),
        Peer("loop", AdamPLoop),
    ],
    "BertAdam": [Peer("loop", BertAdamLoop)],
}


def optimizers() -> dict[str, type[FusedOptimizer]]:
    """All of ours, by name: those with peers first, in the order that they have here."""
    public = {name: getattr(fusedadam, name) for name in dict.fromkeys((*PEERS, *fusedadam.__all__))}
    return {n: c for n, c in public.items() if isinstance(c, type) and issubclass(c, FusedOptimizer)}


def compiles(optimizer: str, by: str) -> bool:
    return any(peer.compiles for peer in PEERS.get(optimizer, ()) if peer.name == by)


def peer_names() -> list[str]:
    return list(dict.fromkeys(peer.name for peers in PEERS.values() for peer in peers))


def make(optimizer: str, by: str, params: Params) -> Any:
    """An optimizer of that kind, by us, by a peer, or by ``module:name``."""
    options = OPTIONS.get(optimizer, {})
    if by == OURS:
        return optimizers()[optimizer](params, **options)
    if ":" in by:
        module, _, name = by.partition(":")
        return _from(module, name)(params, **options)
    (peer,) = (peer for peer in PEERS[optimizer] if peer.name == by)
    return peer.make(params, **options)


@dataclass(frozen=True)
class Absent:
    """A peer that is not measured, and why."""

    optimizer: str
    by: str
    why: str


def choose(optimizer: str, device: str, wanted: Sequence[str] | None) -> tuple[list[str], list[Absent]]:
    """Who is measured beside our ``optimizer``, and who is not. ``wanted`` None: all who are quickly ready."""
    chosen, absent = [], []
    for peer in PEERS.get(optimizer, ()):
        asked = wanted is not None and (peer.name in wanted or "all" in wanted)
        if wanted is not None and not asked:
            continue
        why = None
        if not peer.installed:
            why = "not installed"
        elif peer.gpu_only and device == "cpu":
            why = "runs on a GPU only"
        elif peer.compiles and not asked:
            why = COMPILES
        if why is None:
            chosen.append(peer.name)
        else:
            absent.append(Absent(optimizer, peer.name, why))
    return chosen, absent
