"""Each probe answers True below the function that it names, and False elsewhere.

That torch and Lightning still have these functions is tested where they are used: tests/distributed, tests/trainers.
"""

from __future__ import annotations

import importlib

import pytest

from fusedadam.contract import wrappers

ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
CHECKPOINT = "torch.distributed.checkpoint.state_dict"
UNSCALING = "_optimizer_handles_unscaling"


def called_from(module, function, probe):
    """Calls the probe from a function of that name in a module of that name."""
    space = {"__name__": module, "probe": probe}
    exec(f"def {function}():\n    return probe()", space)
    return space[function]()


@pytest.mark.parametrize(
    ("probe", "module", "function"),
    [
        (wrappers.zero_creates_optimizer, ZERO, "_init_local_optimizer"),
        (wrappers.checkpoint_creates_states, CHECKPOINT, "_init_optim_state"),
        (wrappers.lightning_asks_about_unscaling, "lightning_fabric.plugins.precision.amp", UNSCALING),
        (wrappers.lightning_asks_about_unscaling, "lightning.fabric.plugins.precision.amp", UNSCALING),
    ],
)
def test_a_probe_knows_its_function(probe, module, function):
    assert not probe()
    assert called_from(module, function, probe)
    assert not called_from(module, "another", probe)
    assert not called_from("another", function, probe)


def test_torch_has_the_functions():
    assert hasattr(importlib.import_module(ZERO).ZeroRedundancyOptimizer, "_init_local_optimizer")
    assert hasattr(importlib.import_module(CHECKPOINT), "_init_optim_state")
