"""Imported once by the server from which worlds are forked: everything that is slow to import or prepare.

No other thread may run while processes are forked, so torch gets only one.
"""

import os

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whether there is a GPU is asked without beginning to use it

import pytest  # noqa: F401
import torch
import torch._dynamo
import torch._inductor
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel
import torch.profiler

import fusedadam

torch.set_num_threads(1)
param = torch.nn.Parameter(torch.ones(2, 2))
param.grad = torch.ones(2, 2)
fusedadam.AdamP([param]).step()
