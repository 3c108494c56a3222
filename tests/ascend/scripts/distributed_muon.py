"""Muon on matrices that two spawned processes share, by rows and by columns."""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_npu  # noqa: F401
from torch.distributed.tensor import Shard, distribute_tensor
from torch_npu.optim import _DistributedMuon

SHAPES = [(6, 4), (5, 7), (4, 6), (1, 3)]
PROCESSES, STEPS = 2, 3
OPTIONS = {"lr": 0.05, "weight_decay": 0.01, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(rank, store, out):
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    mesh = dist.init_device_mesh("npu", (PROCESSES,))
    ways = [[Shard(k % 2)] for k in range(len(SHAPES))]
    params = [torch.nn.Parameter(distribute_tensor(v.npu(), mesh, w)) for v, w in zip(draw(0), ways, strict=True)]
    optimizer = _DistributedMuon(params, **OPTIONS, process_group=mesh.get_group())
    for step in range(STEPS):
        for param, grad, way in zip(params, draw(1 + step), ways, strict=True):
            param.grad = distribute_tensor(grad.npu(), mesh, way)
        optimizer.step()
    wholes = [param.full_tensor().cpu().tolist() for param in params]
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"params": wholes, "states": sorted(optimizer.state[params[0]])}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (f"{folder}/store", f"{folder}/out"), PROCESSES)
        with open(f"{folder}/out") as file:
            sys.stdout.write(file.read())
