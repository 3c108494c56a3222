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

# What peers compute. Rounding to nearest is biased: an update of less than half a unit is lost.
PLAIN = "weights and states in the parameters' dtype, rounded to nearest"
KAHAN = f"{PLAIN}; for 16-bit weights also what rounding lost (Kahan)"
WIDE = "float32 states; weights rounded to nearest"
BLOCKS = "states in blocks, wide in tensors below 4,096 elements; states and weights rounded to nearest"
WRITTEN_HERE = "fusedadam.cli.peers"  # for comparison, where no package has one; imported by name, when it is used


@dataclass(frozen=True, eq=False)
class Peer:
    """Another implementation, which is imported when it is made: ``path`` is ``module:name``."""

    name: str
    path: str
    fixed: Options = field(default_factory=dict)  # options that it always gets
    package: str = ""  # that must be installed, if it is not the path's first part
    gpu_only: bool = False
    compiles: bool = False  # for minutes, in the first step: measured only on request
    low_memory: bool = False  # compared with ours with ``storage="8bit"``
    note: str = PLAIN  # how it rounds, which weights it has, where its states are

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
        Peer("optimi", f"optimi:{name}", note=KAHAN),
        Peer("flashoptim", f"flashoptim:Flash{name}", plain, gpu_only=True),
        Peer("flashoptim-8bit", f"flashoptim:Flash{name}", gpu_only=True, low_memory=True,
             note="8-bit states; bfloat16 weights, if there are any, with 8 more bits; both rounded to nearest"),
        Peer("apex", "apex.optimizers:FusedAdam", {"adam_w_mode": decoupled}, gpu_only=True, note=WIDE),
        *bitsandbytes(name),
        Peer("bitsandbytes-paged-8bit", f"bitsandbytes.optim:Paged{name}8bit", low_memory=True,
             note="as bitsandbytes-8bit; on a GPU large states are in managed memory, which torch does not count"),
        _torchao("8bit", f"{name}8bit", f"8-bit {BLOCKS}"),
        _torchao("8bit-stochastic", f"{name}8bit", "as torchao-8bit, but bfloat16 weights rounded stochastically",
                 bf16_stochastic_round=True),
        _torchao("4bit", f"{name}4bit", f"4-bit {BLOCKS}"),
        _torchao("fp8", f"{name}Fp8", f"float8_e4m3fn {BLOCKS}"),
        Peer("deepspeed", f"{WRITTEN_HERE}:deepspeed_adam", {"decoupled": decoupled}, "deepspeed", compiles=True,
             note="on a CPU float32 states, on a GPU states in the parameters' dtype; weights rounded to nearest"),
    )  # fmt: skip


def adamws() -> tuple[Peer, ...]:
    """The peers of AdamW: those that Adam has, too, and others."""
    return (
        *adams("AdamW"),
        Peer("torchao-offload", f"{WRITTEN_HERE}:torchao_offload", {}, "torchao", gpu_only=True, low_memory=True,
             note="torch's fused AdamW on the CPU, with weights and states in pinned memory, rounded to nearest; "
             "gradients are copied there before the step, untimed"),
        Peer("heavyball", "heavyball:AdamW", compiles=True,
             note="float32 states; weights, if bfloat16, rounded stochastically; step() sets gradients to None"),
    )  # fmt: skip


def bitsandbytes(name: str) -> tuple[Peer, ...]:
    """With 32 and with 8 bits."""
    return (
        Peer("bitsandbytes", f"bitsandbytes.optim:{name}32bit", note=WIDE),
        Peer("bitsandbytes-8bit", f"bitsandbytes.optim:{name}8bit", low_memory=True, note=f"8-bit {BLOCKS}"),
    )


def _torchao(name: str, cls: str, note: str, **fixed: Any) -> Peer:
    return Peer(f"torchao-{name}", f"torchao.optim:{cls}", fixed, compiles=True, low_memory=True, note=note)
