"""Nothing is kept alive, nothing grows, and threads and processes do not disturb each other."""

import gc
import hashlib
import os
import select
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

import fusedadam

CLASSES = pytest.mark.parametrize("cls", [fusedadam.AdamW, fusedadam.Adam, fusedadam.EmaAdamW])
BACKENDS = pytest.mark.parametrize("backend", ["numba", "eager"])
SMALL = [(64, 3), (7,), ()]
LARGE = [(70_001,), (300, 401), (5,), (131_072,)]  # enough for several threads to share, with uneven borders


def leaves(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_grads(params, step):
    """Cheap, different in every step, and made without torch's own threads, which do not survive a fork."""
    for p in params:
        p.grad = torch.from_numpy(np.array(p.detach().numpy() * (1 + step), dtype=np.float32))


def train(optimizer, steps):
    for k in range(steps):
        set_grads(optimizer.param_groups[0]["params"], k)
        optimizer.step()


def digest(optimizer):
    params = optimizer.param_groups[0]["params"]
    everything = [t for p in params for t in (p, *optimizer.state[p].values())]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in everything)).hexdigest()


def optimizers(cls, count=2):
    return [cls(leaves(LARGE, seed=k), lr=0.1) for k in range(count)]


@pytest.fixture
def threads():
    """Puts back the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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


@CLASSES
@BACKENDS
def test_replaced_parameters_and_states_are_not_kept_alive(cls, backend):
    params = leaves(SMALL)
    optimizer = cls(params, backend=backend)
    train(optimizer, 2)
    held = [t for p in params for t in (p, *optimizer.state[p].values())]
    watched = [StorageWeakRef(t.untyped_storage()) for t in held]
    for p in params:
        p.data = p.data.clone()
    for state in optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items()})
    del held, state
    train(optimizer, 1)
    assert all(ref.expired() for ref in watched)


@CLASSES
@BACKENDS
def test_a_dropped_optimizer_takes_everything_with_it(cls, backend):
    params = leaves(SMALL)
    optimizer = cls(params, backend=backend)
    train(optimizer, 2)
    held = [t for p in params for t in (p, p.grad, *optimizer.state[p].values())]
    watched = [StorageWeakRef(t.untyped_storage()) for t in held]
    del held, params, optimizer
    gc.collect()
    assert all(ref.expired() for ref in watched)


def moving(params, step):
    """New gradients at new addresses."""
    for p in params:
        p.grad = torch.full_like(p, step + 1.0)


def now_and_then(params, step):
    """Other parameters in every step, so that the tables are built anew."""
    for k, p in enumerate(params):
        p.grad = torch.full_like(p, step + 1.0) if (step + k) % 3 else None


QUICK = [(fusedadam.AdamW, now_and_then), (fusedadam.Adam, moving), (fusedadam.EmaAdamW, now_and_then)]
OTHERS = [(fusedadam.AdamW, moving), (fusedadam.Adam, now_and_then), (fusedadam.EmaAdamW, moving)]


@pytest.mark.parametrize(
    ("cls", "gradients"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in OTHERS)],
    ids=lambda x: x.__name__,
)
def test_objects_and_memory_are_flat_over_many_steps(cls, gradients):
    """Caches keyed by id() or by address grow with every gradient that is set to None."""
    params = leaves([(16,)] * 10)
    optimizer = cls(params)

    def steps(count):
        kept = []  # a gradient of the step before is alive, so that addresses do change
        for k in range(count):
            gradients(params, k)
            optimizer.step()
            kept = [p.grad for p in params]
            optimizer.zero_grad(set_to_none=True)
        del kept
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        steps(20)
        objects, traced = steps(20)
        more_objects, more_traced = steps(60)
    finally:
        tracemalloc.stop()
    assert more_objects - objects < 30
    assert more_traced - traced < 60 * 256  # torch itself keeps a few bytes now and then; a table is thousands


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


@CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_needs_under_one_percent_of_the_parameters_beyond_its_states(cls, dtype):
    params = leaves([(1024, 512), (512, 1024), (4096,)], dtype)
    size = sum(p.numel() * p.element_size() for p in params)
    assert allocated(lambda: params[0] * 2) > size / 3, "the meter sees nothing"
    optimizer = cls(params, backend="numba")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert allocated(optimizer.step) < size / 100
    for p in params:
        p.grad = torch.ones_like(p)  # at other addresses
    assert allocated(optimizer.step) < size / 100


@CLASSES
def test_any_number_of_threads_gives_the_same_bits(cls, threads):
    results = set()
    for count in (1, 2, 3, 4, 7):
        threads(count)
        (optimizer,) = optimizers(cls, 1)
        train(optimizer, 3)
        results.add(digest(optimizer))
    assert len(results) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@CLASSES
def test_a_forked_child_steps_on_with_the_same_bits(cls, threads):
    """The child has the pool's bookkeeping but none of its threads, and would wait for them for ever."""
    threads(3)
    (optimizer,) = optimizers(cls, 1)
    train(optimizer, 2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train(optimizer, 2)
            os.write(writing, digest(optimizer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 60)
    if not ready:
        os.kill(child, 9)
    answer = os.read(reading, 64).decode()
    os.waitpid(child, 0)
    os.close(reading)
    train(optimizer, 2)
    assert answer == digest(optimizer)


@CLASSES
def test_optimizers_in_several_python_threads_at_once_give_the_same_bits(cls, threads):
    threads(2)
    alone, together = optimizers(cls, 4), optimizers(cls, 4)
    for optimizer in alone:
        train(optimizer, 20)
    workers = [threading.Thread(target=train, args=(optimizer, 20)) for optimizer in together]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert list(map(digest, together)) == list(map(digest, alone))


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
