"""Triton's kernels are tested on whatever there is: a GPU for real, else its interpreter on the CPU.

The interpreter must be asked for before triton is first imported, and constructing any torch optimizer imports it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Some virtual machines announce AMX and do not have it: torch's bfloat16 products then die with SIGILL
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.pop("COLUMNS", None)  # reports would be folded to this width

import pytest
from hypothesis import HealthCheck, settings

from fusedadam.contract import precision

precision._told.append("the tests train bfloat16 parameters on purpose")  # tests/contract/test_precision.py

# The same examples in every run; `make test-all` draws its own. However slow the machine, neither fails for that.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("the same every time", settings.get_profile("random"), derandomize=True)
settings.load_profile("the same every time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
