"""Nothing is kept alive, a step needs next to no memory, and several may compile at once."""

import gc
import os
import subprocess
import sys
import tracemalloc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

import fusedadam
from tests.contract.common import MAKERS, leaves, params_of, train
from tests.support import BF16, F32

CLASSES = pytest.mark.parametrize("cls", [fusedadam.AdamW, fusedadam.Adam, fusedadam.EmaAdamW])
BACKENDS = pytest.mark.parametrize("backend", ["numba", "eager"])
SMALL = [(64, 3), (7,), ()]


def contiguous(grad):
    return grad


def spread(grad):
    return torch.stack([grad, grad], dim=-1)[..., 0]


@CLASSES
@BACKENDS
@pytest.mark.parametrize("layout", [contiguous, spread], ids=lambda f: f.__name__)
def test_a_dead_gradient_is_not_kept_alive(cls, backend, layout):
    """A launch table that holds tensors holds the gradients of the last step: as much again as the parameters."""
    params = leaves(SMALL)
    optimizer = cls(params, backend=backend)
    for k in range(3):
        for p in params:
            p.grad = layout(torch.full_like(p, k + 1.0))
        optimizer.step()
        watched = [StorageWeakRef(p.grad.untyped_storage()) for p in params]
        optimizer.zero_grad(set_to_none=True)
        assert all(ref.expired() for ref in watched)


def storages(optimizer):
    held = [t for p in params_of(optimizer) for t in (p, p.grad, *optimizer.state[p].values())]
    return [StorageWeakRef(t.untyped_storage()) for t in held]


@CLASSES
@BACKENDS
def test_what_is_replaced_is_not_kept_alive_and_a_dropped_optimizer_takes_everything_with_it(cls, backend):
    optimizer = train(cls(leaves(SMALL), backend=backend), 2)
    watched = storages(optimizer)
    for p in params_of(optimizer):
        p.data = p.data.clone()
    for state in optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items()})
    train(optimizer, 1)
    assert all(ref.expired() for ref in watched)
    watched = storages(optimizer)
    del p, state, optimizer
    gc.collect()
    assert all(ref.expired() for ref in watched)


def allocated(work):
    """All that ``work`` allocates, freed or not: in torch's allocator, and at its peak in Python and numpy."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        work()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return peak + sum(max(event.cpu_memory_usage, 0) for event in seen.events())


PLAIN = [(name, dtype) for name in ("AdamW", "Adam", "EmaAdamW") for dtype in (F32, BF16)]
SUMMING = ["AdamP clipped", "AdamP", "BertAdam", "BertAdam over all", "EmaAdamW clipped"]


@pytest.mark.parametrize(("name", "dtype"), [*PLAIN, *((name, F32) for name in SUMMING)])
def test_a_step_needs_under_one_percent_of_the_parameters_and_sixteen_bytes_a_row_for_sums(name, dtype):
    params = leaves([(1024, 512), (512, 1024), (4096,)], [dtype])
    size, rows = sum(p.nbytes for p in params), 1024 + 512
    assert allocated(lambda: params[0] * 2) > size / 3, "the meter sees nothing"
    optimizer = MAKERS[name](params, backend="numba")
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)  # at other addresses the second time
        optimizer.step()
        assert allocated(optimizer.step) < size / 100 + 16 * rows * (name in SUMMING)


FIRST_STEPS = """
import sys, threading, torch, fusedadam
barrier, results = threading.Barrier(int(sys.argv[1])), []

def first_step():
    param = torch.nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    optimizer = fusedadam.AdamW([param])
    barrier.wait()
    optimizer.step()
    results.append(param[0].item())

threads = [threading.Thread(target=first_step) for _ in range(barrier.parties)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*results)
"""


@pytest.mark.parametrize(("processes", "threads"), [(2, 1), (1, 4)], ids=["processes", "threads"])
def test_several_at_once_compile_into_an_empty_cache(processes, threads, tmp_path):
    """The kernels' modules were once to be seen by other threads before they were complete."""
    variables = {**os.environ, "FUSEDADAM_CACHE_DIR": str(tmp_path / "new"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FIRST_STEPS, str(threads)]
    running = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    ends = [process.communicate(timeout=600) for process in running]
    assert all(process.returncode == 0 for process in running), ends
    assert not any("Traceback" in errors for _, errors in ends), ends
    assert [out.split() for out, _ in ends] == [[ends[0][0].split()[0]] * threads] * processes
    assert not list((tmp_path / "new").glob("*.tmp"))
