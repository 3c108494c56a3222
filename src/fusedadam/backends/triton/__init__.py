"""The Triton backend: a rule compiled for this GPU, at the speed of memory, one launch for all tensors.

words.py    the words for Triton
kernel.py   the kernel's source

Under ``TRITON_INTERPRET=1`` the same kernels run on the CPU, slowly: that is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from fusedadam import generated
from fusedadam.backends.triton import kernel, words
from fusedadam.launch_table import LaunchTable, Roles
from fusedadam.rule import Special

CHUNK, BLOCK, WARPS = 2048, 1024, 4


def prepare(table: LaunchTable) -> Callable[[Sequence[Roles]], None]:
    special, storage = table.special, tuple(table.storage.items())
    device, tensors = table.device, len(table.sizes)
    tensor, index = (torch.from_numpy(a).to(device) for a in table.chunks(CHUNK))
    sizes = torch.from_numpy(table.sizes).to(device)
    # rows first, then addresses: a step whose tensors have not moved sends the rows alone
    sent = torch.zeros(table.rows.size + table.addresses.size, dtype=torch.int64, device=device)
    rows, addresses = sent[: table.rows.size].view(torch.float64), sent[table.rows.size :]

    def send() -> None:
        words_to_send = sent.numel() if table.moved else table.rows.size
        host = torch.empty(words_to_send, dtype=torch.int64, pin_memory=device.type != "cpu")
        view = host.numpy()
        view[: table.rows.size] = table.rows.view(np.int64).ravel()
        if table.moved:
            view[table.rows.size :] = table.addresses.ravel()
        sent[:words_to_send].copy_(host, non_blocking=True)
        table.moved = False

    def launch(compiled: Any, grid: int, warm_up: bool = False) -> None:
        # a found_inf or grad_scale that is not given is never read; any tensor stands in for its address
        amp = (sent if t is None else t for t in (table.grad_scale, table.found_inf))
        arguments = (addresses, sizes, tensor, index, rows, tensors, *amp, CHUNK, BLOCK)
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        if warm_up:
            compiled.warmup(*arguments, grid=(grid,), **options)
        else:
            compiled[(grid,)](*arguments, **options)

    plain = _compile(special, storage, table.compute, scaled=False)
    if not words.INTERPRETED:
        with _current(device):
            launch(plain, 1, warm_up=True)

    def run(_: Sequence[Roles]) -> None:
        if not len(tensor):
            return
        scaled = table.grad_scale is not None or table.found_inf is not None
        compiled = _compile(special, storage, table.compute, scaled=True) if scaled else plain
        with _current(device):
            send()
            launch(compiled, len(tensor))

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
