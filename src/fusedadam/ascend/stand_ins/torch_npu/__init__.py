"""The part of torch_npu that fusedadam provides: its optimizers, their operators and devices, on a GPU or a CPU."""

import sys
from typing import Any

import torch

import fusedadam
from fusedadam.ascend import install, missing, npu, npu_apply_adam, npu_apply_adam_w, npu_bert_apply_adam

install()  # needed in a child process, which inherits sys.path but not the installation
sys.modules |= {"torch_npu.npu": npu, "torch_npu.npu.amp": npu.amp}

from . import optim  # noqa: E402

__all__ = ["npu", "npu_apply_adam", "npu_apply_adam_w", "npu_bert_apply_adam", "optim"]
__version__ = f"{torch.__version__.split('+')[0]}+fusedadam.{fusedadam.__version__}"


def __getattr__(name: str) -> Any:
    raise AttributeError(missing.sentence(f"torch_npu.{name}"))
