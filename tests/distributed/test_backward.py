"""Training with real gradients, which are reduced in another order than in one process: equal up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fusedadam import compat
from tests.distributed.parts import fully_shard, mesh_of, whole
from tests.distributed.reference import OPTIMIZERS
from tests.distributed.world import on
from tests.meaning.by_hand import largest_cosine

STEPS, BATCH, LENGTH, WIDTH = 5, 6, 4, 8
DELTA = 1.5  # with which every projection occurs
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS)


class Block(nn.Module):
    """Norm, up, down, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 2)
        self.down = nn.Linear(2 * WIDTH + 2, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model() -> nn.Module:
    return nn.Sequential(Block(), nn.LayerNorm(WIDTH))


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(output: Any, x: Any) -> Any:
    return (output - torch.relu(x)).square().mean()


def make(optimizer: str, params: Any) -> Any:
    """A large eps, so that the rounding of gradients near zero is not made larger by dividing by their size."""
    own = {"e": 1e-2} if optimizer.startswith("Bert") else {"eps": 1e-2}
    return OPTIMIZERS[optimizer](params, **own, **({"delta": DELTA} if optimizer.startswith("AdamP") else {}))


def mine(step: int) -> Tensor:
    """This process's share of a batch."""
    return batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def sharded(**options: Any) -> nn.Module:
    net = model()
    for module in (net[0], net):  # type: ignore[index]
        fully_shard(module, mesh=mesh_of(dist.get_world_size()), **options)
    return net


def learn(net: nn.Module, opt: Any, x: Any) -> None:
    opt.zero_grad()
    loss_of(net(x), x).backward()
    opt.step()


def train(net: nn.Module, optimizer: str, of: Callable[[int], Any] = batch) -> tuple[list[Tensor], list[Any], Any]:
    """``of``: the batch of a step."""
    params = list(net.parameters())
    opt, projections = make(optimizer, params), []
    for step in range(STEPS):
        learn(net, opt, of(step))
        projections.append([opt.projections().get(p, "none") for p in params] if hasattr(opt, "projections") else [])
    return [whole(p) for p in params], projections, opt.grad_norm


def assert_same(mine: Any, alone: Any) -> None:
    assert mine[1] == alone[1], "projections"
    torch.testing.assert_close(mine[0], alone[0], rtol=0, atol=1e-6)
    assert (mine[2] is None) == (alone[2] is None)
    assert mine[2] is None or math.isclose(mine[2], alone[2], rel_tol=1e-5)


@on("two")
@EVERY
def test_fsdp2_on_two(optimizer):
    assert_same(train(sharded(), optimizer, mine), train(model(), optimizer))


# uneven shards: one rule of each kind, the others in the exhaustive tests
@on("three")
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=[] if name in ("AdamW", "AdamP", "BertAdam over all") else [pytest.mark.exhaustive])
        for name in OPTIMIZERS
    ],
)
def test_fsdp2_on_three(optimizer):
    assert_same(train(sharded(), optimizer, mine), train(model(), optimizer))


@on("two")
@EVERY
def test_tensor_parallel_on_two(optimizer):
    """Norms work on parts of the sequence: their gradients are sums that are still to be made."""
    net, mesh = Block(), mesh_of(2)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(net, mesh, plan)  # type: ignore[arg-type]
    trained = train(net, optimizer, lambda step: compat.distribute(batch(step), mesh, [Shard(1)]))
    assert net.norm.weight.grad.placements[0].is_partial()
    assert_same(trained, train(Block(), optimizer))


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith("AdamP")])
def test_every_projection_occurs_and_no_cosine_is_near_its_threshold(optimizer):
    """Else rounding could decide about a projection, and the tests above would be tests of luck."""
    seen = set()
    for net in (model(), Block()):
        params = [p for p in net.parameters() if p.dim() > 1]
        opt = make(optimizer, net.parameters())
        for step in range(STEPS):
            x = batch(step)
            opt.zero_grad()
            loss_of(net(x), x).backward()
            for p in params:
                for rows in (p.shape[0], 1):
                    cosine = largest_cosine(p.grad.double(), p.detach().double(), rows, 1e-2)
                    assert abs(cosine / (DELTA / math.sqrt(p.numel() / rows)) - 1) > 1e-3
            opt.step()
            seen |= {opt.projections().get(p, "none") for p in params}
    assert seen == {"channel", "layer", "none"}
