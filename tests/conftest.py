"""Triton's kernels are tested on whatever there is: a GPU for real, else its interpreter on the CPU.

The interpreter must be asked for before triton is first imported, and constructing any torch optimizer imports it.
"""

import os
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Some virtual machines announce AMX and do not have it: torch's bfloat16 products then die with SIGILL
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.pop("COLUMNS", None)  # reports would be folded to this width

import pytest
from hypothesis import HealthCheck, settings

from fusedadam.contract import advice

advice._told.add("bfloat16")  # the tests train such parameters on purpose, but for tests/contract/test_precision.py

# The same examples in every run; `make test-all` draws its own. However slow the machine, neither fails for that.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("the same every time", settings.get_profile("random"), derandomize=True)
settings.load_profile("the same every time")


# Whole programs and other packages: `make test-more` runs them, and so does CI.
MORE = {
    "ascend/test_run.py", "cli/bench/test_command.py", "cli/demo/test_command.py", "cli/test_benchmarks.py",
    "cli/test_own_package.py", "cli/test_streams.py", "cli/verify/test_command.py", "distributed/test_restart.py",
    "distributed/test_scale.py", "test_adding_an_optimizer.py", "test_examples.py", "test_packaging.py", "test_site.py",
    "trainers",
}  # fmt: skip
# Rooms whose files take longest: they begin first, so that no worker is left alone with one of them at the end.
LONG = ("distributed", "codegen", "faults", "engine", "backends", "cli", "ascend", "fuzz", "contract")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if not MORE.isdisjoint(map(str, [path := item.path.relative_to(here), *path.parents])):
            item.add_marker("more")
    order = {room: k for k, room in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.relative_to(here).parts[0], len(LONG)))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes a file at a time, or a group: tests of a file share kernels, and thousands of single tests keep
    xdist itself busy."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # ours is the order
    return ByFile(config, log)
