"""Who is calling: torch and Lightning call an optimizer for several reasons, which only the call stack tells apart.

Each probe names the function that it looks for, and the versions in which it was found there. If a later version
renames it, the probe answers False, and the tests of ZeRO, distributed checkpoints and Lightning fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator


def zero_creates_optimizer() -> bool:
    """Whether ZeroRedundancyOptimizer is creating its local optimizer, which gets only some of the parameters.

    ``ZeroRedundancyOptimizer._init_local_optimizer``; torch 2.6 to 2.15.
    """
    return ("torch.distributed.optim.zero_redundancy_optimizer", "_init_local_optimizer") in _callers()


def checkpoint_creates_states() -> bool:
    """Whether torch.distributed.checkpoint calls ``step()`` with gradients of zero, so that states come into being.

    It means no step: nothing is counted, and no average moves. ``_init_optim_state``; torch 2.6 to 2.15.
    """
    return ("torch.distributed.checkpoint.state_dict", "_init_optim_state") in _callers()


def lightning_asks_about_unscaling() -> bool:
    """Whether Lightning reads ``_step_supports_amp_scaling``, in order to decide whether it may clip.

    ``_optimizer_handles_unscaling``, in ``lightning_fabric.plugins.precision.amp`` of pytorch-lightning 2.6, and in
    ``lightning.fabric.plugins.precision.amp`` where the same code is installed as ``lightning``.
    """
    module, function = next(caller for caller in _callers() if not caller[0].startswith("fusedadam."))
    return module.startswith(("lightning_fabric.", "lightning.")) and function == "_optimizer_handles_unscaling"


def _callers() -> Iterator[tuple[str, str]]:
    """The module and the function of each frame on the stack, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
