"""The Numba backend: a rule compiled for this CPU, at the speed of memory.

words.py    the words, loads and stores, for Numba
kernel.py   the kernel's source
pool.py     the threads it runs on
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fusedadam import generated
from fusedadam.backends.numba import kernel, pool
from fusedadam.launch_table import LaunchTable, Roles
from fusedadam.rule import Special

CHUNK = 32768
SHARE_FROM = 65536  # elements; below, waking a thread takes longer than the work
BATCHES = 16  # in which a thread takes its chunks, if all are equally fast


def prepare(table: LaunchTable) -> Callable[[Sequence[Roles]], None]:
    special, storage = table.special, table.storage
    plain = _compile(special, tuple(storage.items()), table.compute, scaled=False)
    tensor, index = table.chunks(CHUNK)
    worth_sharing = int(table.sizes.sum()) >= SHARE_FROM

    def run(_: Sequence[Roles]) -> None:
        if table.found_inf is not None and table.found_inf.item() != 0:
            return
        compiled, scale = plain, 1.0
        if table.grad_scale is not None:
            compiled = _compile(special, tuple(storage.items()), table.compute, scaled=True)
            scale = table.grad_scale.item()
        threads = torch.get_num_threads() if worth_sharing else 1
        batch = 1 + len(tensor) // (threads * BATCHES)
        taken = np.zeros(1, dtype=np.int64)  # chunks that some thread has taken; its address is shared by all of them

        def work() -> None:
            compiled(table.addresses, table.sizes, tensor, index, CHUNK, table.rows, scale, taken.ctypes.data, batch)

        pool.share(work, threads)

    return run


@functools.cache
def _compile(special: Special, storage: tuple[tuple[str, str], ...], compute: str, scaled: bool) -> Callable[..., None]:
    text = kernel.source(special, dict(storage), compute, scaled)
    run: Callable[..., None] = generated.load(f"numba_{special.rule.name}", text, made_for()).run
    return run


@functools.cache
def made_for() -> str:
    """Whatever else decides what is compiled: versions, processor, and the source of the words."""
    import inspect

    import llvmlite
    import llvmlite.binding as llvm
    import numba

    from fusedadam.backends.numba import words

    processor = f"{llvm.get_process_triple()} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    versions = f"{sys.version} numba {numba.__version__} llvmlite {llvmlite.__version__}"
    return f"{versions} {processor}\n{inspect.getsource(words)}"
