"""Implementations of optimizers by others, which `bench`, `demo` and benchmarks/ compare ours with.

The catalog lists them, one tuple for each optimizer. They are imported where they are measured.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Options = Mapping[str, Any]

WRITTEN_HERE = "fusedadam.cli.peers"  # for comparison, where no package has one; imported by name, when it is used


@dataclass(frozen=True, eq=False)
class Peer:
    """Another implementation, which is imported when it is made: ``path`` is ``module:name``."""

    name: str
    path: str
    fixed: Options = field(default_factory=dict)  # options that it always gets
    package: str = ""  # that must be installed, if it is not the path's first part
    gpu_only: bool = False
    compiles: bool = False  # for minutes, before the first step: measured only on request

    @property
    def installed(self) -> bool:
        package = self.package or self.path.partition(":")[0].partition(".")[0]
        return importlib.util.find_spec(package) is not None

    def make(self, params: Any, **options: Any) -> Any:
        """An object with ``step()``."""
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)(params, **options, **self.fixed)


def torchs(name: str, *implementations: str) -> tuple[Peer, ...]:
    """torch's own, the fastest first."""
    return tuple(Peer(f"torch-{how}", f"torch.optim:{name}", {how: True}) for how in implementations)


def adams(name: str) -> tuple[Peer, ...]:
    """The peers of AdamW and Adam."""
    decoupled = name == "AdamW"
    plain = {"quantize": False, "master_weight_bits": None}
    return (
        *torchs(name, "fused", "foreach"),
        Peer("torch-compiled", f"{WRITTEN_HERE}:Compiled", {"name": name}, "torch", compiles=True),
        Peer("optimi", f"optimi:{name}"),
        Peer("flashoptim", f"flashoptim:Flash{name}", plain, gpu_only=True),
        Peer("flashoptim-8bit", f"flashoptim:Flash{name}", gpu_only=True),
        Peer("apex", "apex.optimizers:FusedAdam", {"adam_w_mode": decoupled}, gpu_only=True),
        Peer("bitsandbytes", f"bitsandbytes.optim:{name}", gpu_only=True),
        Peer("bitsandbytes-8bit", f"bitsandbytes.optim:{name}8bit", gpu_only=True),
        Peer("torchao-8bit", f"torchao.optim:{name}8bit", compiles=True),
        Peer("deepspeed", f"{WRITTEN_HERE}:deepspeed_adam", {"decoupled": decoupled}, "deepspeed", compiles=True),
    )
