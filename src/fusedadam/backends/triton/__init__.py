"""The Triton backend: a rule compiled for this GPU, at the speed of memory, one launch for all tensors.

words.py    the words for Triton
kernel.py   the kernel's source

Under ``TRITON_INTERPRET=1`` the same kernels run on the CPU, slowly: that is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from fusedadam import generated
from fusedadam.backends.triton import kernel, words
from fusedadam.launch_table import LaunchTable, Roles
from fusedadam.rule import Special


class Tile(NamedTuple):
    """Elements of a chunk, elements handled at a time, and warps that handle them."""

    chunk: int
    block: int
    warps: int


# Of a few dozen tried on an H200. Kernels that move half the bytes do as much arithmetic (division and square root are
# correctly rounded), and want fewer elements a thread.
WIDE, NARROW = Tile(2048, 1024, 4), Tile(4096, 256, 2)


def prepare(table: LaunchTable) -> Callable[[Sequence[Roles]], None]:
    special, storage = table.special, tuple(table.storage.items())
    device, tensors = table.device, len(table.sizes)
    tile = NARROW if set(table.storage.values()) <= {"f16", "bf16"} else WIDE
    options = {"num_warps": tile.warps, "enable_fp_fusion": False}
    tensor, index = (torch.from_numpy(a).to(device) for a in table.chunks(tile.chunk))
    sizes = torch.from_numpy(table.sizes).to(device)
    # rows first, then addresses: a step whose tensors have not moved sends the rows alone
    sent = torch.zeros(table.rows.size + table.addresses.size, dtype=torch.int64, device=device)
    row_words = sent[: table.rows.size]
    rows, addresses = row_words.view(torch.float64), sent[table.rows.size :]

    def send() -> None:
        target = sent if table.moved else row_words
        host = torch.empty(len(target), dtype=torch.int64, pin_memory=device.type != "cpu")
        view = host.numpy()
        view[: table.rows.size] = table.rows.view(np.int64).ravel()
        if table.moved:
            view[table.rows.size :] = table.addresses.ravel()
        target.copy_(host, non_blocking=True)
        table.moved = False

    no_scale, no_inf = torch.ones(1, device=device), torch.zeros(1, device=device)

    def arguments() -> tuple[Any, ...]:
        scale = no_scale if table.grad_scale is None else table.grad_scale
        inf = no_inf if table.found_inf is None else table.found_inf
        return (addresses, sizes, tensor, index, rows, tensors, scale, inf, tile.chunk, tile.block)

    grid = (len(tensor), 1, 1)
    plain = _compile(special, storage, table.compute, scaled=False)
    if words.INTERPRETED:
        ready = plain[grid]
    else:
        # compiled now, so that a compiler's complaint comes before anything is written; and kept, so that a
        # launch need not look at its arguments anew
        with _current(device):
            ready = plain.warmup(*arguments(), grid=grid, **options)[grid]
    fixed = arguments()

    def run(_: Sequence[Roles]) -> None:
        if not len(tensor):
            return
        with _current(device):
            send()
            if table.grad_scale is None and table.found_inf is None:
                ready(*fixed)
            else:
                _compile(special, storage, table.compute, scaled=True)[grid](*arguments(), **options)

    return run


@functools.cache
def _compile(special: Special, storage: tuple[tuple[str, str], ...], compute: str, scaled: bool) -> Any:
    text = kernel.source(special, dict(storage), compute, scaled, words.INTERPRETED)
    return generated.load(f"triton_{special.rule.name}", text, made_for="").run


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors' own."""
    if device.type == "cpu":
        return nullcontext()
    module = getattr(torch, device.type)
    if device.index == module.current_device():
        return nullcontext()
    guard: AbstractContextManager[Any] = module.device(device)
    return guard
