"""Slabs of page-locked memory, which states are cut from: sizes, lifetime, what is refused."""

from __future__ import annotations

import gc
import io

import pytest
import torch

from fusedadam.tensors import host_memory
from fusedadam.tensors.host_memory import HostMemory, slab_of, slabs_of
from tests.host_memory import pretended
from tests.support import BF16, F32

CPU = torch.device("cpu")


@pytest.fixture
def device():
    with pretended() as found:
        yield found


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8, torch.uint8, torch.int16, torch.complex64], ids=str)
def test_a_copy_has_values_strides_and_a_storage_of_its_own(device, dtype):
    host, state = HostMemory(), torch.arange(24).view(4, 6).to(dtype)
    copies = [host.copy(state, strides, CPU) for strides in ((6, 1), (1, 4))]
    for copy, strides in zip(copies, ((6, 1), (1, 4)), strict=True):
        assert torch.equal(copy, state)
        assert copy.dtype == dtype
        assert copy.stride() == strides
        assert copy.data_ptr() % host_memory.ALIGNMENT == copies[0].data_ptr() % host_memory.ALIGNMENT
        file = io.BytesIO()
        torch.save(copy, file)
        assert file.tell() < 4096  # and not a slab of a megabyte
    assert slab_of(copies[0]) is slab_of(copies[1]) is not None
    assert slab_of(state) is None
    assert device.allocated == [host_memory.SMALLEST_SLAB]


def test_slabs_are_powers_of_two_and_little_is_locked_in_vain(device):
    host = HostMemory()
    states = [host.copy(torch.zeros(3 * 2**18, dtype=torch.uint8), (1,), CPU) for _ in range(40)]
    assert all(size & (size - 1) == 0 for size in device.allocated)
    used = sum(state.nbytes for state in states)
    assert used <= sum(device.allocated) < 1.5 * used
    large = host.copy(torch.zeros(5 * 2**20, dtype=torch.uint8), (1,), CPU)
    assert device.allocated[-1] == 8 * 2**20
    count = len(device.allocated)
    small = [host.copy(torch.zeros(2**18, dtype=torch.uint8), (1,), CPU) for _ in range(8)]  # into what is left
    assert len(device.allocated) == count
    assert slab_of(large) in [*map(slab_of, small)] or len({*map(slab_of, small)}) > 1


def test_a_slab_is_given_back_with_its_last_state(device):
    host = HostMemory()
    states = [host.copy(torch.ones(100), (1,), CPU) for _ in range(2)]
    slab = slab_of(states[0])
    states.pop()
    gc.collect()
    assert slab.memory is not None
    kept = slabs_of(states)
    states.pop()
    gc.collect()
    assert slab.memory is not None  # by a plan, whose tables have its addresses
    kept.clear()
    gc.collect()
    assert slab.memory is None
    host_memory.wait()
    assert device.waits == 0  # for nobody
    again = host.copy(torch.ones(100), (1,), CPU)
    assert slab_of(again) not in (None, slab)
    host_memory.wait()
    assert device.waits == 1


def test_two_optimizers_have_slabs_of_their_own(device):
    one, other = (HostMemory().copy(torch.ones(100), (1,), CPU) for _ in range(2))
    assert slab_of(one) is not slab_of(other)


def test_a_host_that_refuses_to_lock_says_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match=r"could not page-lock 0\.50 GiB .*CUDA error: out of memory\); use storage"):
        host_memory.allocate(2**29)


def test_more_than_the_machine_has_is_refused_before_it_is_touched(monkeypatch):
    monkeypatch.setattr(host_memory, "lockable", lambda: 2**30)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    with pytest.raises(RuntimeError, match=r"could not page-lock 2\.00 GiB of host memory \(1\.00 GiB are left\)"):
        host_memory.allocate(2**31)


def test_the_machine_and_the_container_say_what_can_be_locked(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", "/sys/fs/cgroup/memory.max": "5000000\n",
        "/sys/fs/cgroup/memory.current": "4000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 5\nactive_file 1000000\ninactive_file 500000\n",
    }  # fmt: skip

    def read_text(path, **_):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(host_memory.Path, "read_text", read_text)
    assert host_memory.lockable() == 2_500_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert host_memory.lockable() == 8_192_000
    files.clear()
    assert host_memory.lockable() is None


def test_locking_gigabytes_says_what_it_is_doing(device, monkeypatch, capsys):
    monkeypatch.setattr(host_memory, "ANNOUNCED_FROM", 2**21)
    host = HostMemory()
    states = [host.copy(torch.zeros(2**20, dtype=torch.uint8), (1,), CPU)]
    assert not capsys.readouterr().err
    states += [host.copy(torch.zeros(2**20, dtype=torch.uint8), (1,), CPU) for _ in range(3)]
    assert capsys.readouterr().err.count("offload=True page-locks more than") == 1
