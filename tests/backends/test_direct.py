"""What is launched directly, and what is left to Triton's own launcher."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from fusedadam import compat
from fusedadam.backends.triton import direct
from fusedadam.tensors.cuda_driver import Kernel

CUDA = torch.device("cuda", 0)


class Driver:
    def __init__(self, sizes):
        self.sizes, self.launched = sizes, []

    def parameter_sizes(self, function):
        return self.sizes

    def launch(self, kernels: list[Kernel], device):
        self.launched += [(list(kernel.words), kernel.configuration, device) for kernel in kernels]


def compiled(signature, constants=(), **metadata):
    names = ["table", "count", "wide", "BLOCK"]
    source = SimpleNamespace(
        signature=dict(zip(names, signature, strict=True)), constants=dict.fromkeys(constants), fn=None
    )
    source.fn = SimpleNamespace(arg_names=names)
    return SimpleNamespace(src=source, function=7, metadata=SimpleNamespace(num_warps=4, shared=0, **metadata))


def launcher(monkeypatch, kernel, sizes, arguments=(5, 6, 7, 64)):
    driver = Driver(sizes)
    monkeypatch.setattr(direct, "driver_of", lambda device: driver)
    return direct.kernel(CUDA, kernel, (3, 1, 1), arguments), driver


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_arguments_and_memory_that_triton_adds(monkeypatch, scratch):
    kernel = compiled(["*i64", "i32", "i64", "constexpr"])
    launch, driver = launcher(monkeypatch, kernel, [8, 4, 8, *[8] * scratch])
    launch()
    launch({0: 50, 2: 70})
    launch()
    assert driver.launched == [
        ([5, 6, 7, *[0] * scratch], (7, 3, 1, 1, 128, 1, 1, 0), 0),
        ([50, 6, 70, *[0] * scratch], (7, 3, 1, 1, 128, 1, 1, 0), 0),
        ([5, 6, 7, *[0] * scratch], (7, 3, 1, 1, 128, 1, 1, 0), 0),
    ]


def test_floats_are_passed_in_32_bits(monkeypatch):
    launch, driver = launcher(monkeypatch, compiled(["*i64", "fp32", "i64", "constexpr"]), [8, 4, 8], (5, -1.5, 7, 64))
    launch()
    assert driver.launched[0][0] == [5, 0xBFC00000, 7]


MAP = {"block_size": [1, 2], "swizzle": 3}
MAPPED = [128, 4, 4, 8, 8, 4, 8]  # map, shape, strides; two more parameters


@pytest.mark.parametrize(
    ("sizes", "maps"), [(MAPPED, [MAP]), (MAPPED[1:], [MAP]), ([64, *MAPPED[1:]], [MAP]), (MAPPED, [])]
)
def test_a_descriptor_is_a_map_a_shape_and_strides(monkeypatch, sizes, maps):
    kernel = compiled(["tensordesc<fp16[1, 2]>", "i32", "i64", "constexpr"], tensordesc_meta=maps)
    words = (ctypes.c_uint64 * 16)()
    monkeypatch.setattr(Driver, "described", lambda self, tensor, block, swizzle: words, raising=False)
    described = SimpleNamespace(base=torch.zeros(3, 8))
    launch, driver = launcher(monkeypatch, kernel, sizes, (described, 6, 7, 64))
    assert (launch is not None) == (sizes == MAPPED and len(maps) == 1)
    if launch is not None:
        launch()
        assert driver.launched[0][0] == [0, 3, 8, 8, 1, 6, 7]
        for made in (launch.kernel, launch.kernel.copy()):
            assert made.pointers[0] == ctypes.addressof(words)
            assert made.pointers[5] == ctypes.addressof(made.words) + 40


@pytest.mark.parametrize("constant", ["count", 1, (1,)])
def test_constants_are_not_passed(monkeypatch, constant):
    """As Triton 3.2 to 3.9 name them; an integer that is 1 is one."""
    launch, driver = launcher(monkeypatch, compiled(["*i64", "i32", "i64", "constexpr"], [constant]), [8, 8])
    launch()
    assert driver.launched[0][0] == [5, 7]
    launch, driver = launcher(monkeypatch, compiled(["*i64", "constexpr", "i64", "constexpr"]), [8, 8])
    launch()
    assert driver.launched[0][0] == [5, 7]


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        (compiled(["*i64", "i32", "i64", "constexpr"]), [8, 4]),  # another number of parameters
        (compiled(["*i64", "i32", "i64", "constexpr"]), [8, 8, 8]),  # another size
        (compiled(["*i64", "i32", "i64", "constexpr"]), [8, 4, 8, 8, 8, 8]),  # more than Triton is known to add
        (compiled(["*i64", "i32", "i64", "constexpr"]), [8, 4, 8, 4]),
        (compiled(["*i64", "fp64", "i64", "constexpr"]), [8, 8, 8]),  # another type
        (compiled(["*i64", "i32", "i64", "constexpr"], global_scratch_size=64), [8, 4, 8, 8]),
        (compiled(["*i64", "i32", "i64", "constexpr"], num_ctas=2), [8, 4, 8]),
        (compiled(["*i64", "i32", "i64", "constexpr"], launch_pdl=True), [8, 4, 8]),
        (compiled(["*i64", "i32", "i64", "constexpr"], launch_cooperative_grid=True), [8, 4, 8]),
    ],
)
def test_what_is_unknown_is_left_to_triton(monkeypatch, kernel, sizes):
    assert launcher(monkeypatch, kernel, sizes)[0] is None


def test_other_devices_have_no_driver():
    assert direct.kernel(torch.device("xpu", 0), compiled(["*i64"] * 4), (1, 1, 1), (1, 2, 3, 4)) is None


def test_hooks_are_seen(monkeypatch):
    assert not direct.has_hooks()
    owner = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
    monkeypatch.setattr(owner, "launch_enter_hook", lambda metadata: None)
    assert direct.has_hooks()


class Graph:
    def __init__(self, kernels):
        self.kernels, self.words, self.fails = kernels, [list(kernel.words) for kernel in kernels], False

    def update(self, index):
        if self.fails:
            raise KeyboardInterrupt
        self.words[index] = list(self.kernels[index].words)


class GraphDriver(Driver):
    def graph(self, kernels):
        self.made = Graph(kernels)
        return self.made

    def launch_graph(self, graph, device):
        self.launched += [(words, (), device) for words in graph.words]


@pytest.fixture
def queue(monkeypatch):
    """A kernel that a step without a GradScaler launches by itself, and a queue of scaled steps that has it too."""
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    driver = GraphDriver([8, 4, 8])
    monkeypatch.setattr(direct, "driver_of", lambda device: driver)
    kernels = [
        direct.kernel(CUDA, compiled(["*i64", "i32", "i64", "constexpr"]), (1, 1, 1), (first, 6, 7, 64))
        for first in (5, 50)
    ]
    return direct.DirectQueue(kernels, [direct.Varying(0, 0, "inf")]), kernels[0], driver


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_what_a_queue_was_given_does_not_stay_in_its_kernels(queue, launches):
    """As it did: a step without a GradScaler, after steps with one, asked memory that was freed for infinities."""
    run, kernel, driver = queue
    for _ in range(launches):
        run({"inf": 500})
    assert driver.launched[-2][0] == [500, 6, 7]
    kernel()
    assert driver.launched[-1][0] == [5, 6, 7]
    kernel({2: 70})
    assert driver.launched[-1][0] == [5, 6, 70]
    run({"inf": 500})
    assert driver.launched[-2][0] == [500, 6, 7]


def test_an_interrupted_update_of_a_graph_is_made_up_for(queue):
    run, _, driver = queue
    for _ in range(3):
        run({"inf": 500})
    driver.made.fails = True
    with pytest.raises(KeyboardInterrupt):
        run({"inf": 501})
    driver.made.fails = False
    run({"inf": 501})
    assert driver.launched[-2][0] == [501, 6, 7]


@pytest.mark.parametrize(
    ("signature", "taken"),
    [
        pytest.param({"table": "*i64", "n": "i32", "BLOCK": "constexpr"}, [0, 1, 2], id="Triton 3.3"),
        pytest.param({"table": "*i64", "n": "i32"}, [0, 1], id="Triton 3.2"),
        pytest.param({0: "*i64", 1: "i32"}, [0, 1], id="by position"),
    ],
)
def test_a_launcher_is_given_the_arguments_that_it_takes(signature, taken):
    compiled = SimpleNamespace(src=SimpleNamespace(signature=signature))
    assert compat.launch_arguments(compiled, ["table", "n", "BLOCK"]) == taken
