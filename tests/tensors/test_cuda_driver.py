"""CUDA's driver by its own interface, without a GPU: a library of Python functions stands for libcuda."""

import ctypes

import pytest
import torch

from fusedadam.tensors import cuda_driver
from fusedadam.tensors.cuda_driver import INVALID_CONTEXT, Driver, Kernel, driver_of, raw


class Function:
    """A function of a ctypes library."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.answer(len(self.calls), *arguments)


class Library:
    """``statuses``: of the first launches or copies, one after the other; then 0."""

    def __init__(self, statuses=(), sizes=()):
        def status(call, *_):
            return statuses[call - 1] if call <= len(statuses) else 0

        def parameter(_, function, index, offset, size):
            if index >= len(sizes):
                return 1
            size._obj.value = sizes[index]
            return 0

        def text(_, status, pointer):
            pointer._obj.value = b"a text of CUDA's"
            return 0

        self.cuLaunchKernel, self.cuMemcpyHtoDAsync_v2 = Function(status), Function(status)
        self.cuFuncGetParamInfo, self.cuGetErrorString = Function(parameter), Function(text)
        for name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxGetCurrent"):
            setattr(self, name, Function(lambda *_: 0))


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)


def kernel():
    return Kernel(7, (5, 1, 1), 128, 64, [2**40, 3, -1])


def test_only_cuda_has_it():
    assert driver_of(torch.device("cpu")) is None
    assert driver_of(torch.device("meta")) is None


def test_arguments_are_words():
    made = kernel()
    assert [ctypes.c_int64.from_address(pointer).value for pointer in made.pointers] == [2**40, 3, -1]
    made.words[1] = 11
    assert ctypes.c_int64.from_address(made.pointers[1]).value == 11
    tensor = torch.zeros(3)
    assert raw(tensor) == tensor.data_ptr()
    assert raw(5) == 5
    assert raw(-1.5) == 0xBFC00000  # as 32 bits


def test_a_tensor_map_is_an_aligned_argument():
    library = Library()
    library.cuTensorMapEncodeTiled = Function(lambda *_: 0)
    tensor = torch.zeros(4, 6, 16, dtype=torch.float16)[:, :5]
    words = Driver(library).described(tensor, [1, 32, 64], 3)
    ((address, kind, rank, begin, sizes, strides, box, steps, *rest),) = library.cuTensorMapEncodeTiled.calls
    assert address == ctypes.addressof(words)
    assert address % cuda_driver.MAP_ALIGNMENT == 0
    assert ctypes.sizeof(words) == 128
    assert (kind, rank, begin, rest) == (6, 3, tensor.data_ptr(), [0, 3, 2, 0])
    assert ([*sizes], [*strides], [*box], [*steps]) == ([16, 5, 4], [32, 192], [64, 32, 1], [1, 1, 1])
    made = Kernel(7, (5, 1, 1), 128, 64, [1, words, 3])
    for one in (made, made.copy()):
        assert one.pointers[1] == address
        assert [one.words[0], one.words[2]] == [1, 3]


def test_a_tensor_map_that_cuda_refuses():
    library = Library()
    library.cuTensorMapEncodeTiled = Function(lambda *_: 1)
    with pytest.raises(RuntimeError, match="CUDA reports error 1"):
        Driver(library).described(torch.zeros(4, 8), [4, 8], 0)


def test_launches_go_to_the_current_stream():
    library = Library()
    made = kernel()
    Driver(library).launch([made, made], 1)
    assert library.cuLaunchKernel.calls == [(7, 5, 1, 1, 128, 1, 1, 64, 101, made.pointers, None)] * 2


@pytest.mark.parametrize("act", [lambda d: d.launch([kernel()], 0), lambda d: d.copy(1, 2, 3, 0)])
def test_a_thread_that_has_not_used_the_device_gets_its_context(act):
    library = Library([INVALID_CONTEXT])
    act(Driver(library))
    assert len(library.cuLaunchKernel.calls) + len(library.cuMemcpyHtoDAsync_v2.calls) == 2
    assert len(library.cuCtxSetCurrent.calls) == 1


@pytest.mark.parametrize("statuses", [[700], [INVALID_CONTEXT, 700]])
@pytest.mark.parametrize("act", [lambda d: d.launch([kernel()], 0), lambda d: d.copy(1, 2, 3, 0)])
def test_an_error_has_its_number_and_text(act, statuses):
    with pytest.raises(RuntimeError, match=r"CUDA reports error 700 \(a text of CUDA's\).*CUDA_LAUNCH_BLOCKING=1"):
        act(Driver(Library(statuses)))


def test_the_sizes_of_parameters():
    assert Driver(Library(sizes=[8, 4, 8])).parameter_sizes(7) == [8, 4, 8]
    assert Driver(Library()).parameter_sizes(7) == []


@pytest.mark.parametrize("version", [None, "13.0"])
def test_without_the_library_or_a_function_of_it_there_is_none(monkeypatch, version):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    cuda_driver.driver.cache_clear()
    assert cuda_driver.driver() is None
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: object())
    cuda_driver.driver.cache_clear()
    assert cuda_driver.driver() is None
    cuda_driver.driver.cache_clear()
