"""What a step costs if a model is sharded over many devices: `python benchmarks/scale.py` prints the tables of
docs/scale-costs.md and, for Muon, of docs/scale.md.

Nothing is measured, everything is counted: the optimizers make the plans that they would run, in torch's fake process
group, of which this is the only process. Messages of sums depend on how many rows parameters have, not on how long
these are, so plans are made with short rows; bytes of state follow from the true shapes. Muon sends the matrices
themselves: its plans are made with all sides of all matrices, and with the memory that it may take, divided by the same
number.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusedadam
from fusedadam.contract.base import FusedOptimizer
from fusedadam.engine import products
from fusedadam.engine.exchange import operations
from fusedadam.rules.newton_schulz import DEFAULT

COLUMNS = 8  # of the short rows
TENSOR_PARALLEL = 8
KINDS = ("column", "row", "none")
WORDS = 128256  # of Llama 3
HOP = 5e-6  # seconds for a few bytes from one device to another: assumed, not measured
WORLDS = (8, 1000, 100_000)
CHOICES: dict[str, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    "AdamW, Adam, EmaAdamW": (fusedadam.EmaAdamW, {}),
    "these with `max_grad_norm=1`": (fusedadam.AdamW, {"max_grad_norm": 1.0}),
    "BertAdam": (fusedadam.BertAdam, {}),
    "AdamP": (fusedadam.AdamP, {}),
    "AdamP, `max_grad_norm=1`": (fusedadam.AdamP, {"max_grad_norm": 1.0}),
}


class Weight(NamedTuple):
    """``kind``: how tensor parallel shards it, by "column" (whole rows, Shard(0)), "row" (Shard(1)) or not at all."""

    shape: tuple[int, ...]
    kind: str


def llama_8b() -> list[Weight]:
    """The shapes of Llama 3 8B: 8.03 billion in 291 tensors."""
    width, inner, heads = 4096, 14336, 1024
    columns = [(width, width), (heads, width), (heads, width), (inner, width), (inner, width)]
    layer = [Weight(shape, "column") for shape in columns]
    layer += [Weight((width, width), "row"), Weight((width, inner), "row"), *(2 * [Weight((width,), "none")])]
    ends = [Weight((WORDS, width), "column"), Weight((WORDS, width), "column"), Weight((width,), "none")]
    return 32 * layer + ends


def hidden(weights: Sequence[Weight]) -> list[Weight]:
    """The matrices of the layers, which Muon takes: not the embedding and the head."""
    return [weight for weight in weights if len(weight.shape) == 2 and weight.shape[0] != WORDS]


def llama_70b() -> list[Weight]:
    """The matrices of the layers of Llama 3 70B, which Muon takes: 68.5 billion in 560."""
    width, inner, heads = 8192, 28672, 1024
    columns = [(width, width), (heads, width), (heads, width), (inner, width), (inner, width)]
    layer = [*(Weight(shape, "column") for shape in columns), Weight((width, width), "row")]
    return 80 * [*layer, Weight((width, inner), "row")]


def mixture() -> list[Weight]:
    """The matrices of the layers of Qwen3 30B-A3B, a mixture of 128 experts: 29.9 billion, 29 of them in stacks."""
    width, inner, experts = 2048, 768, 128
    attention = [Weight((4096, width), "column"), *2 * [Weight((512, width), "column")], Weight((width, 4096), "row")]
    stacks = [*2 * [Weight((experts, inner, width), "column")], Weight((experts, width, inner), "column")]
    return 48 * [*attention, *stacks]


class Matrices(NamedTuple):
    """``divisor`` of all sides but the first of a stack, which leaves them as divisible by 64 as they are."""

    name: str
    weights: list[Weight]
    divisor: int


class Layout(NamedTuple):
    """A way to shard a model: the mesh of ``devices``, and the placements of each kind of weight."""

    name: str
    mesh: tuple[int, ...]
    placements: dict[str, Sequence[Any]]


def layouts(devices: int) -> list[Layout]:
    whole, rows = Replicate(), Shard(0)
    found = [Layout("FSDP2", (devices,), {kind: [rows] for kind in KINDS})]
    if devices == TENSOR_PARALLEL:
        return [*found, Layout("TP", (devices,), {"column": [rows], "row": [Shard(1)], "none": [whole]})]
    mesh = (devices // TENSOR_PARALLEL, TENSOR_PARALLEL)
    found += [Layout("HSDP", mesh, {kind: [whole, rows] for kind in KINDS})]
    dealt = _StridedShard(0, split_factor=TENSOR_PARALLEL)  # as FSDP2 shards what tensor parallel has sharded
    return [
        *found,
        Layout("FSDP2 x TP", mesh, {"column": [dealt, rows], "row": [rows, Shard(1)], "none": [rows, whole]}),
    ]


@contextmanager
def world(devices: int, rank: int = 0) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=devices)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_shape(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Size:
    return _local_shape(shape, mesh, tuple(placements), dist.get_rank())


@functools.cache  # torch is slow for large meshes
def _local_shape(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...], _rank: int) -> torch.Size:
    return torch.Size(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


def divided(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Any], dtype: torch.dtype = torch.float32
) -> torch.nn.Parameter:
    here, like = torch.ones(local_shape(shape, mesh, placements), dtype=dtype), torch.empty(shape, device="meta")
    return torch.nn.Parameter(
        DTensor.from_local(here, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    )


class Cost(NamedTuple):
    """Of a step, for each process."""

    messages: list[int]  # bytes of each all-reduce
    row_values: int  # bytes that are kept for values by row


def cost(make: type[FusedOptimizer], options: dict[str, Any], params: Sequence[Tensor]) -> Cost:
    optimizer = make(params, **options)
    _init_optim_state(optimizer)  # torch's way to create states: a plan is made, and no step taken
    plan = optimizer._stepper.last_plan
    assert plan is not None
    values = [buffer for launch in plan.launches for buffer in launch.table.row_buffers]
    return Cost([one.bytes for one in plan.launches.reductions], sum(buffer.nbytes for buffer in values))


class Exchanged(NamedTuple):
    """In a step of Muon: of each process, the bytes that it sends and the multiplications that it does for others."""

    sent: Any
    operations: Any
    largest: int  # operations of a matrix
    collectives: int


def exchanged(model: Matrices, mesh: DeviceMesh, placements: Mapping[str, Sequence[Any]]) -> Exchanged:
    small = [(*w.shape[:-2], *(side // model.divisor for side in w.shape[-2:])) for w in model.weights]
    params = [divided(s, mesh, placements[w.kind], torch.bfloat16) for s, w in zip(small, model.weights, strict=True)]
    limit = products.SMALLEST_LIMIT // model.divisor**2
    with (
        warnings.catch_warnings(),  # of bfloat16
        mock.patch.object(products, "SMALLEST_LIMIT", limit),
        mock.patch.object(products, "product_dtype", return_value=torch.float16),  # as on GPUs
    ):
        warnings.simplefilter("ignore")
        optimizer = fusedadam.Muon(params)
        _init_optim_state(optimizer)
        assert optimizer._stepper.last_plan is not None
        batches = optimizer._stepper.last_plan.launches.batches
    exchanges = [batch.exchange for batch in batches if batch.exchange is not None]
    costs = [operations(exchange.shape, len(DEFAULT.coefficients)) for exchange in exchanges]
    owners = [exchange.owner_of.ravel() for exchange in exchanges]
    loads = sum(cost * np.bincount(own, minlength=mesh.size()) for cost, own in zip(costs, owners, strict=True))
    sent = model.divisor**2 * sum(exchange.bytes_sent() for exchange in exchanges)
    return Exchanged(sent, loads, max(costs), 2 * len(exchanges))


def bytes_of_state(make: type[FusedOptimizer], dtype: torch.dtype, **options: Any) -> int:
    """For each element."""
    param = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = make([param], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return sum(state.element_size() for name, state in optimizer.state[param].items() if name != "step")


def share(weights: Sequence[Weight], layout: Layout, mesh: DeviceMesh) -> int:
    """Elements on the first process, which has the most."""
    return sum(local_shape(w.shape, mesh, layout.placements[w.kind]).numel() for w in weights)


def pieces(weights: Sequence[Weight], devices: int) -> int:
    """Shards of all weights under FSDP2, without empty ones."""
    return sum(math.ceil(w.shape[0] / math.ceil(w.shape[0] / devices)) for w in weights)


def show(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (headers, *rows))
    print(first, "|" + "---|" * len(headers), *others, "", sep="\n")


def readable(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g} B"


def print_states() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    rows = []
    for name, make, own in (
        ("AdamW, Adam, AdamP, BertAdam", fusedadam.AdamW, {}),
        ("AdamW, Adam with `amsgrad`", fusedadam.AdamW, {"amsgrad": True}),
        ("EmaAdamW", fusedadam.EmaAdamW, {}),
    ):
        mixed = {"state_dtype": f32, **({"ema_dtype": f32} if make is fusedadam.EmaAdamW else {})}
        counts = [bytes_of_state(make, dtype, **own) for dtype in (f32, bf16)]
        counts += [bytes_of_state(make, bf16, **own, **mixed), bytes_of_state(make, f32, **own, state_dtype=bf16)]
        rows.append([name, *map(str, counts)])
    show(["bytes of state an element", "fp32", "bf16", "bf16, states fp32", "fp32, `state_dtype` bf16"], rows)


def print_costs() -> None:
    weights = llama_8b()
    total = sum(math.prod(w.shape) for w in weights)
    short = [w.shape[:1] + (COLUMNS,) * (len(w.shape) - 1) for w in weights]
    per_element = bytes_of_state(fusedadam.AdamW, torch.float32)
    shares, messages = [], {name: {} for name in CHOICES}
    for devices in WORLDS:
        with world(devices):
            for layout in layouts(devices):
                mesh = init_device_mesh("cpu", layout.mesh)
                params = [divided(s, mesh, layout.placements[w.kind]) for s, w in zip(short, weights, strict=True)]
                costs = {name: cost(*choice, params) for name, choice in CHOICES.items()}
                for name, own in costs.items():
                    known = messages[name].setdefault(layout.name.replace("HSDP", "FSDP2"), own.messages)
                    assert own.messages == known, "messages depend on the number of devices"
                mine, dividing = share(weights, layout, mesh), TENSOR_PARALLEL if layout.name == "HSDP" else devices
                cells = f"{mine:,}", f"{mine * dividing / total:.3g}", readable(per_element * mine)
                where = f"{layout.name}, {' x '.join(f'{n:,}' for n in layout.mesh)}"
                shares.append([where, *cells, readable(costs["AdamP"].row_values)])
    print(f"{total:,} parameters in {len(weights)} tensors\n")
    headers = ["the first device has", "elements", "times an even share", "AdamW's state, fp32"]
    show([*headers, "AdamP's values by row"], shares)
    rows = []
    for name, own in messages.items():
        rows.append([name, *(" + ".join(f"{size:,}" for size in sizes) or "none" for sizes in own.values())])
    show(["bytes of each all-reduce in a step", "FSDP2, HSDP", "TP, 8", "FSDP2 x TP, 8"], rows)
    headers = ["devices", "hops: tree", "ring", f"at {HOP * 1e6:g} us: tree", "ring", "pieces in a checkpoint"]
    show(headers, [_of_world(weights, devices) for devices in WORLDS])


def _of_world(weights: Sequence[Weight], devices: int) -> list[str]:
    tree, ring = 2 * math.ceil(math.log2(devices)), 2 * (devices - 1)
    times = [f"{1e3 * HOP * hops:.2f} ms" for hops in (tree, ring)]
    return [f"{devices:,}", f"{tree}", f"{ring:,}", *times, f"{3 * pieces(weights, devices):,}"]


def print_muon() -> None:
    rows = []
    models = [Matrices("Llama 3 8B", hidden(llama_8b()), 16), Matrices("Llama 3 70B", llama_70b(), 16)]
    for model in (*models, Matrices("Qwen3 30B-A3B", mixture(), 8)):
        for devices in (8, 64):
            with world(devices):
                for layout in layouts(devices):
                    mesh = init_device_mesh("cpu", layout.mesh)
                    found = exchanged(model, mesh, layout.placements)
                    even = found.operations.sum() / devices
                    sent = [readable(bytes_) for bytes_ in (found.sent.mean(), found.sent.max())]
                    most = f"{found.operations.max() / even:.3f}", f"{found.largest / even:.3f}"
                    where = f"{model.name}, {layout.name}, {' x '.join(map(str, layout.mesh))}"
                    rows.append([where, *sent, "none", *most, str(found.collectives)])
    headers = [
        "a device sends in a step",
        "on average",
        "at most",
        "with AdamW",
        "operations of the busiest / even share",
    ]
    show([*headers, "largest matrix / even share", "all-to-alls"], rows)


if __name__ == "__main__":
    print_states()
    print_costs()
    print_muon()
