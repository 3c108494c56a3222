"""Which optimizers are measured: ours, and for each the peers that compute the same.

Peers are only looked up here. They are imported where they are measured, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedadam.catalog import CATALOG
from fusedadam.cli.optimizer_names import optimizer_class
from fusedadam.contract import storage
from fusedadam.peer import PLAIN, Peer

OURS = "fusedadam"
# Ours with ``storage=``, by what the parameters are in: where a preset changes nothing, or is refused, it is left out.
# The last one also keeps its states in host memory, which only a GPU's kernels read.
OFFLOADED = " offloaded"
PRESETS = {f"{OURS}-{preset}": preset for preset in storage.PRESETS}
PRESETS[f"{OURS}-8bit-offloaded"] = f"8bit{OFFLOADED}"
PRESETS_BY_DTYPE = {
    "bfloat16": ("exact", "16bit", "8bit"), "float32": ("16bit", "8bit"), "float16": ("16bit", "8bit"), "float64": (),
}  # fmt: skip
BYTE = f"{OURS}-8bit"  # what peers with low memory are compared with
NOTES = {
    OURS: PLAIN,
    f"{OURS}-exact": "bfloat16 weights with 16 low bits, float32 states: exactly float32",
    f"{OURS}-16bit": "bfloat16 weights with 16 low bits; bfloat16 moments, rounded stochastically",
    BYTE: "bfloat16 weights with 8 low bits; 8-bit moments in blocks of 32; both rounded stochastically",
    f"{BYTE}-offloaded": f"as {BYTE}, with low bits and moments in host memory: the bus decides its time",
}
COMPILES = "compiles for minutes, so only on request (--peers all, or by name)"
Params = list[torch.nn.Parameter]
# Nobody else has an optimizer of the user's own: a known one beside it shows how fast this machine is.
YARDSTICK = Peer("torch-adamw", "fusedadam.cli.peers:Yardstick")
PEER_NAMES = [*dict.fromkeys(peer.name for entry in CATALOG.values() for peer in entry.peers), YARDSTICK.name]


def peers_of(optimizer: str) -> tuple[Peer, ...]:
    return CATALOG[optimizer].peers if optimizer in CATALOG else (YARDSTICK,)


def note(optimizer: str, by: str) -> str:
    """How it rounds, which weights it has, where its states are; empty for a peer of the user's own."""
    return NOTES.get(by) or next((peer.note for peer in peers_of(optimizer) if peer.name == by), "")


def beside(optimizer: str, implementations: Collection[str]) -> dict[str, str]:
    """Which of ours a peer is compared with, if it is not the first one."""
    low = [peer.name for peer in peers_of(optimizer) if peer.low_memory] if BYTE in implementations else []
    return {by: BYTE for by in implementations if by in low}


def first_peer(optimizer: str) -> str | None:
    return next((peer.name for peer in peers_of(optimizer) if peer.installed), None)


def make(optimizer: str, by: str, params: Params, options: Mapping[str, Any] | None = None) -> Any:
    """An optimizer of that kind: ours, with a preset of ``storage=`` or without, a peer's, or ``module:name``."""
    usual = CATALOG[optimizer].usual if optimizer in CATALOG else {}
    options = usual if options is None else options
    if by == OURS or by in PRESETS:  # in a group, since the arguments of another author's class may lack storage
        stored, offloaded, _ = PRESETS.get(by, "").partition(OFFLOADED)
        group = {"params": params, "storage": stored or None, "offload": bool(offloaded)}
        return optimizer_class(optimizer)([group], **options)
    if ":" in by:
        return Peer(by, by).make(params, **options)
    return next(peer for peer in peers_of(optimizer) if peer.name == by).make(params, **options)


def presets(optimizer: str, dtype: str, asked: bool, device: str) -> list[str]:
    """Ours with ``storage=``: every preset for AdamW, for others "8bit" where it is ``asked`` for."""
    wanted = PRESETS_BY_DTYPE[dtype] if optimizer == "AdamW" else ("8bit",) if asked else ()
    if device == "cuda" and optimizer == "AdamW" and "8bit" in wanted:
        wanted = (f"8bit{OFFLOADED}", *wanted)
    return [
        by
        for by, preset in PRESETS.items()
        if preset in wanted and preset.partition(OFFLOADED)[0] in PRESETS_BY_DTYPE[dtype]
    ]


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
