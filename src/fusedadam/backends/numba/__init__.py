"""The Numba backend: a rule compiled for this CPU, at the speed of memory.

words.py      the words, loads and stores, for Numba
kernel.py     the kernel's source
threading.py  the threads it runs on
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fusedadam import generated
from fusedadam.backends.numba import kernel, threading
from fusedadam.launch_table import LaunchTable, Roles
from fusedadam.rule import Special

CHUNK = 32768
SHARE_FROM = 65536  # elements; below, waking a thread takes longer than the work
BATCHES = 16  # in which a thread takes its chunks, if all are equally fast


def prepare(table: LaunchTable) -> Callable[[Sequence[Roles]], None]:
    storage = tuple(table.storage.items())
    plain = _compile(table.special, storage, table.compute, scaled=False)
    tensor, index = table.chunks(CHUNK)
    worth_sharing = int(table.sizes.sum()) >= SHARE_FROM
    counter = np.zeros(1, dtype=np.int64)  # how many chunks the threads have taken
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "addresses": table.addresses,
        "sizes": table.sizes,
        "chunk_tensor": tensor,
        "chunk_index": index,
    }
    arrays |= {"rows": table.rows, "counter": counter}
    numbers = {"tensors": len(table.sizes), "chunks": len(tensor), "chunk_size": CHUNK, "batch": 1, "grad_scale": 0}
    values = {name: array.ctypes.data for name, array in arrays.items()} | numbers
    words = np.array([values[name] for name in kernel.WORDS], dtype=np.int64)
    batch_at, scale_at = kernel.WORDS.index("batch"), kernel.WORDS.index("grad_scale")

    def run(_: Sequence[Roles], _alive: object = arrays) -> None:
        if table.found_inf is not None and table.found_inf.item() != 0:
            return
        compiled = plain
        if table.grad_scale is not None:
            compiled = _compile(table.special, storage, table.compute, scaled=True)
            words.view(np.float64)[scale_at] = table.grad_scale.item()
        threads = torch.get_num_threads() if worth_sharing else 1
        words[batch_at] = 1 + len(tensor) // (threads * BATCHES)
        counter[0] = 0
        threading.share(compiled, words.ctypes.data, threads)

    return run


@functools.cache
def _compile(special: Special, storage: tuple[tuple[str, str], ...], compute: str, scaled: bool) -> int:
    text = kernel.source(special, dict(storage), compute, scaled)
    address: int = generated.load(f"numba_{special.rule.name}", text, made_for()).run.address
    return address


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
