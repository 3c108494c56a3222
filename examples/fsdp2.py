"""Trains a small transformer that is sharded with FSDP2, with any optimizer of fusedadam and with checkpoints.

    python examples/fsdp2.py                           # one process
    torchrun --nproc-per-node 2 examples/fsdp2.py      # two, on GPUs (nccl) if there are any, else on CPUs (gloo)

On many nodes, run the same two lines on each:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 16 --nproc-per-node 8 --max-restarts 3 --rdzv-id ANY_NAME --rdzv-backend c10d \
        --rdzv-endpoint FIRST_NODE:29500 examples/fsdp2.py --folder /A/FOLDER/THAT/ALL/NODES/SEE

Restarts need the variable, and on one node --standalone too: otherwise new processes may connect to the addresses of
dead ones (https://github.com/pytorch/pytorch/issues/135712).

Whenever it starts, by hand or by torchrun after a failure, it resumes from the last complete checkpoint, even with a
different number of processes. With the same number it ends with the same bits as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusedadam
from fusedadam.catalog import CATALOG

TOKENS, CONTEXT, BATCH = 64, 32, 16
PATIENCE = timedelta(seconds=60)  # how long a process waits for another one before it gives up


class Transformer(nn.Module):
    """Returns the loss of predicting each token from the tokens before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(CONTEXT, width)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(layers))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, sequences: Tensor) -> Tensor:
        x = self.tokens(sequences[:, :-1]) + self.places(torch.arange(CONTEXT, device=sequences.device))
        earlier = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=sequences.device)
        for block in self.blocks:
            x = block(x, src_mask=earlier, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), sequences[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """Sequences that count in strides. They depend only on step and rank, so a resumed run sees the same batches."""
    generator = torch.Generator().manual_seed(1_000_003 * step + dist.get_rank())
    start, stride = torch.randint(1, 9, (2, BATCH, 1), generator=generator)
    return (start + stride * torch.arange(CONTEXT + 1)) % TOKENS


class Checkpoints:
    """One folder per saved step. It is complete once it has ``.metadata``, which torch renames into place last, when
    all processes have written their shards: an interrupted save never counts."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        # saving runs beside training, so it needs its own group: their messages must not mix
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.saving: Any = None

    def save(self, step: int) -> None:
        """Copies everything now, and writes it while training continues."""
        self.finish()
        folder = self.folder / f"step-{step:08}"
        self.saving = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self.group)

    def finish(self) -> None:
        """Waits until the last save is complete, then removes the earlier ones."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None
            if dist.get_rank() == 0:
                self._remove(self._complete()[:-1])

    def resume(self) -> int:
        """Loads the last complete checkpoint, if there is one, and returns its step."""
        found: list[Path | None] = [None]
        if dist.get_rank() == 0:  # one process decides: a shared file system may look different to others
            found = self._complete()[-1:] or [None]
            self._remove([folder for folder in self.folder.glob("step-*") if folder != found[0]])
        dist.broadcast_object_list(found, group=self.group)
        if (last := found[0]) is None:
            return 0
        state = self._state()
        dcp.load(state, checkpoint_id=last, process_group=self.group)
        model, optimizer = state["model"], state["optimizer"]
        states.set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return int(last.name.removeprefix("step-"))

    def _state(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _complete(self) -> list[Path]:
        return sorted(metadata.parent for metadata in self.folder.glob("step-*/.metadata"))

    def _remove(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            (folder / ".metadata").unlink(missing_ok=True)  # first: a half-removed checkpoint must not count
            shutil.rmtree(folder)


@contextlib.contextmanager
def progress(done: int, steps: int) -> Iterator[Callable[[int, Tensor], None]]:
    """Yields a function that shows a step and its loss, on rank 0: a bar on a terminal with rich, else lines."""
    if dist.get_rank() != 0:
        yield lambda step, loss: None
    elif sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.progress import Progress

        with Progress() as bar:
            task = bar.add_task("training", total=steps, completed=done)
            yield lambda step, loss: bar.update(task, completed=step, description=f"loss {loss:.3f}")
    else:
        yield lambda step, loss: print(f"step {step} of {steps}: loss {loss:.3f}", flush=True)


@torch.no_grad()
def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """The mean loss of all processes on unseen batches, with the averaged weights if there are any."""
    averaged = optimizer.ema_weights() if isinstance(optimizer, fusedadam.EmaAdamW) else contextlib.nullcontext()
    if isinstance(optimizer, fusedadam.ScheduleFreeAdamW):
        optimizer.eval()
    with averaged:
        loss = torch.stack([model(batch(-k).to(device)) for k in range(1, 5)]).mean()
    if isinstance(optimizer, fusedadam.ScheduleFreeAdamW):
        optimizer.train()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def checksum(model: nn.Module) -> str:
    """A hash of the bits of all weights; only rank 0 has them."""
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()[:16]


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    params: Any = model.parameters()
    own: dict[str, Any] = {
        "EmaAdamW": {"ema_decay": 0.99},
        "BertAdam": {"warmup": 0.1, "t_total": options.steps},
        "Muon": {"adjust_lr_fn": "match_rms_adamw"},  # one learning rate for matrices and for the rest
    }.get(options.optimizer, {})
    if options.optimizer == "Muon":
        with contextlib.redirect_stdout(sys.stdout if dist.get_rank() == 0 else io.StringIO()):  # what it has chosen
            groups = fusedadam.param_groups(model, optimizer="muon")
        params = [{**group, "lr": options.lr} for group in groups]
    return CATALOG[options.optimizer].cls(params, lr=options.lr, max_grad_norm=1.0, **own)


def train(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)  # every process makes the whole (small) model and keeps its shard
    model = Transformer(options.width, options.layers).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = make_optimizer(model, options)
    checkpoints = Checkpoints(options.folder or Path("checkpoints", options.optimizer), model, optimizer)
    done = checkpoints.resume()
    with progress(done, options.steps) as show:
        for step in range(done + 1, options.steps + 1):
            loss = model(batch(step).to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % max(1, options.steps // 20) == 0:  # showing it waits for the device
                show(step, loss.detach())
            if step % options.save_every == 0 or step == options.steps:
                checkpoints.save(step)
    checkpoints.finish()
    loss, bits = evaluate(model, optimizer, device), checksum(model)
    if dist.get_rank() == 0:
        print(f"{options.optimizer} after {max(done, options.steps)} steps: loss {loss:.6f}, weights {bits}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=[*CATALOG], default="AdamW")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--folder", type=Path, help="visible to all processes; default: checkpoints/OPTIMIZER")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.save_every < 1:
        parser.error(f"--save-every is {options.save_every}; it must be at least 1")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # the same bits in every run
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE, **alone)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
