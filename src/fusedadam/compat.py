"""What differs between the versions of torch, Triton and numpy that are supported, in one place.

Each entry asks for the feature, not for the version number (but for contract/around_step.py, where asking is itself the
bug), and says which version makes it obsolete: once that is
the oldest one supported, the entry goes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Makes a DTensor of a tensor that every process has whole: each takes its shard, and nothing is sent.

    Obsolete with torch 2.8, whose ``distribute_tensor`` has ``src_data_rank``.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    whole = DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements)


def tensor_descriptor() -> Any:
    """Triton's class of tensor descriptors, or None.

    Obsolete with Triton 3.4, which has it.
    """
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:
        return None
    return TensorDescriptor


def launch_arguments(compiled: Any, names: Sequence[str]) -> list[int]:
    """Which arguments of a Triton kernel its compiled form takes when it is launched.

    Obsolete with Triton 3.3, where it takes all of them, constants too.
    """
    signature = compiled.src.signature  # by name, or by position
    return [k for k, name in enumerate(names) if name in signature or k in signature]


@functools.cache
def checkpoints_share_host_memory() -> bool:
    """Whether asynchronous checkpoints write tensors on the host from where they are, while training goes on.

    Obsolete with torch 2.8, whose stager copies them.
    """
    return not (Path(torch.__file__).parent / "distributed/checkpoint/_state_dict_stager.py").exists()


@functools.cache
def mend_interpreter() -> None:
    """Lets Triton's interpreter use a value as the bound of a loop: it converts arrays of one element to integers,
    which numpy refuses from 2.4 on.

    Obsolete with Triton 3.9, which drops the dimensions first.
    """
    try:
        int(np.zeros(1))
    except TypeError:
        import triton.runtime.interpreter as interpreter

        patch = interpreter._patch_lang_tensor

        def patch_and_mend(tensor: Any, *scope: Any) -> None:
            patch(tensor, *scope)
            tensor.__index__ = lambda self: int(self.handle.data.item())

        interpreter._patch_lang_tensor = patch_and_mend
