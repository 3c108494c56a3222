"""What is launched directly, and what is left to Triton's own launcher."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from fusedadam.backends.triton import direct
from fusedadam.tensors.cuda_driver import Kernel

CUDA = torch.device("cuda", 0)


class Driver:
    def __init__(self, sizes):
        self.sizes, self.launched = sizes, []

    def parameter_sizes(self, function):
        return self.sizes

    def launch(self, kernel: Kernel, device):
        self.launched.append((list(kernel.words), kernel.grid, kernel.threads, kernel.shared, device))


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
    return direct.launcher(CUDA, kernel, (3, 1, 1), arguments), driver


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_arguments_and_memory_that_triton_adds(monkeypatch, scratch):
    kernel = compiled(["*i64", "i32", "i64", "constexpr"])
    launch, driver = launcher(monkeypatch, kernel, [8, 4, 8, *[8] * scratch])
    launch()
    launch({0: 50, 2: 70})
    launch()
    assert driver.launched == [
        ([5, 6, 7, *[0] * scratch], (3, 1, 1), 128, 0, 0),
        ([50, 6, 70, *[0] * scratch], (3, 1, 1), 128, 0, 0),
        ([5, 6, 7, *[0] * scratch], (3, 1, 1), 128, 0, 0),
    ]


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
        (compiled(["*i64", "fp32", "i64", "constexpr"]), [8, 4, 8]),  # another type
        (compiled(["*i64", "i32", "i64", "constexpr"], global_scratch_size=64), [8, 4, 8, 8]),
        (compiled(["*i64", "i32", "i64", "constexpr"], num_ctas=2), [8, 4, 8]),
        (compiled(["*i64", "i32", "i64", "constexpr"], launch_pdl=True), [8, 4, 8]),
        (compiled(["*i64", "i32", "i64", "constexpr"], launch_cooperative_grid=True), [8, 4, 8]),
    ],
)
def test_what_is_unknown_is_left_to_triton(monkeypatch, kernel, sizes):
    assert launcher(monkeypatch, kernel, sizes)[0] is None


def test_other_devices_have_no_driver():
    assert direct.launcher(torch.device("xpu", 0), compiled(["*i64"] * 4), (1, 1, 1), (1, 2, 3, 4)) is None


def test_hooks_are_seen(monkeypatch):
    assert not direct.has_hooks()
    owner = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
    monkeypatch.setattr(owner, "launch_enter_hook", lambda metadata: None)
    assert direct.has_hooks()
