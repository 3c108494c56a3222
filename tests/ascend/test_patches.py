"""Parts of torch that the mode does not see also take "npu": loading, autocast, process groups, backward."""

import importlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fusedadam import ascend
from tests.distributed.world import FSDP2_RUNS_ON_CPU, NEEDS_FSDP2_ON_CPU, destroy_process_group

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

X = torch.arange(4.0)


def test_npu_without_a_device_and_by_number(kind):
    own = nn.Linear(2, 2)
    assert own.npu() is own
    for tensor in (X.npu(), X.npu(0), own.weight, nn.Linear(2, 2).npu(0).weight):
        assert tensor.device.type == kind
    assert X.untyped_storage().npu().device.type == kind
    assert torch.empty(1, device="meta").is_npu is False


@pytest.fixture
def from_an_npu(monkeypatch):
    """A checkpoint, in the memory of a machine that had this NPU."""

    def saved(location):
        with monkeypatch.context() as there:
            there.setattr(torch.serialization, "location_tag", lambda storage: location)
            file = io.BytesIO()
            torch.save({"x": X}, file)
        return file

    return saved


def load(file, *args, **options):
    file.seek(0)
    return torch.load(file, *args, **options)["x"]


def test_what_was_saved_on_an_npu_is_loaded(from_an_npu):
    first, second = from_an_npu("npu:0"), from_an_npu("npu:1")
    with pytest.raises(RuntimeError, match="tagged with npu:0"):
        load(first)
    with ascend.install("cpu"):
        seen = []
        for options in ({}, {"weights_only": False}, {"mmap": False}):
            assert torch.equal(load(first, **options), X)
        assert torch.equal(load(first, lambda storage, location: seen.append(location) or storage), X)
        assert seen == ["npu:0"]
        for file in (first, second):
            for location in ("cpu", "npu", torch.device("npu:0")):
                assert torch.equal(load(file, location), X)
        assert load(first, {"npu:0": "cpu"}).device.type == "cpu"
        assert load(first, {"npu:0": "meta"}).device.type == "meta"
        with pytest.raises(RuntimeError, match="'npu:1' does not exist"):
            load(second)
    with pytest.raises(RuntimeError, match="tagged with npu:0"):
        load(first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_brings_what_was_saved_on_the_second_npu_to_the_first(kind, from_an_npu):
    second = from_an_npu("npu:1")
    with ascend.install(kind):
        assert load(second, {"npu:1": "npu:0"}).device.type == kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_module_is_loaded_to_the_npu(kind, tmp_path):
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "traced.pt")
    with ascend.install(kind):
        assert torch.jit.load(tmp_path / "traced.pt", map_location="npu").weight.device.type == kind


def test_autocast_is_to_float16_unless_told_otherwise(kind):
    a = torch.ones(2, 2, device="npu")
    for expected, context in [
        (torch.float16, torch.autocast("npu")),
        (torch.float16, torch.autocast(device_type="npu")),
        (torch.float16, torch.amp.autocast("npu", None)),
        (torch.bfloat16, torch.autocast("npu", torch.bfloat16)),
        (torch.bfloat16, torch.autocast("npu", dtype=torch.bfloat16)),
        (torch.float32, torch.autocast("npu", enabled=False)),
    ]:
        with context:
            assert (a @ a).dtype == expected
    with torch.autocast("cpu"):
        assert (X.reshape(2, 2) @ X.reshape(2, 2)).dtype == torch.bfloat16, "a CPU's own default"
    assert torch.autocast("npu")(lambda: (a @ a).dtype)() == torch.float16


def test_torchs_own_scaler_takes_npu(kind):
    for scaler in (torch.amp.GradScaler("npu", init_scale=4.0), torch.amp.GradScaler(device="npu", init_scale=4.0)):
        assert scaler.is_enabled()
        assert scaler.scale(torch.ones(1, device="npu")).item() == 4.0


def test_generators(kind):
    for generator in (torch.Generator("npu"), torch.Generator(device="npu:0"), torch.Generator(torch.device("npu"))):
        assert generator.device.type == kind
        assert isinstance(generator, torch.Generator)
        draws = [torch.rand(3, generator=generator.manual_seed(seed), device="npu") for seed in (1, 1, 2)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert torch.Generator().device.type == "cpu"
    assert torch.Generator().manual_seed(7).initial_seed() == 7


@pytest.mark.parametrize("options", [{}, {"devices": [0]}], ids=str)
def test_the_state_of_a_random_generator_is_kept_aside(kind, options):
    torch.manual_seed(0)
    expected = torch.rand(3), torch.rand(3, device="npu")
    torch.manual_seed(0)
    with torch.random.fork_rng(**options, device_type="npu"):
        torch.rand(5), torch.rand(5, device="npu")
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand(3, device="npu"), expected[1])


@pytest.fixture
def process_group(tmp_path):
    def begin(backend, init=dist.init_process_group):
        init(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    yield begin
    if dist.is_initialized():
        destroy_process_group()


def test_processes_talk_without_hccl(kind, process_group):
    expected = "gloo" if kind == "cpu" else "nccl"
    process_group("hccl")
    assert dist.get_backend() == expected
    total = torch.ones(2, device="npu")
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]
    assert dist.get_backend(dist.new_group([0], backend="hccl")) == expected
    for init in (dist.init_device_mesh, device_mesh.init_device_mesh):
        assert init("npu", (1,)).device_type == kind
        assert init(device_type="npu", mesh_shape=(1, 1), mesh_dim_names=("a", "b")).device_type == kind


def wrapped(model, *args, **options):
    """What training scripts wrap a model in; its output, after a backward pass."""
    output = nn.parallel.DistributedDataParallel(model.npu(), *args, **options)(torch.ones(2, 3, device="npu"))
    output.sum().backward()
    return output


IDS = {
    "a number": lambda: {"device_ids": [0]},
    "and the output's": lambda: {"device_ids": [0], "output_device": 0},
    "a name": lambda: {"device_ids": ["npu:0"], "output_device": "npu:0"},
    "a device": lambda: {"device_ids": [torch.device("npu", 0)], "output_device": torch.device("npu:0")},
    "the current device": lambda: {"device_ids": [torch.npu.current_device()]},
    "none": lambda: {"device_ids": None},
}


def test_models_are_wrapped_for_one_of_several_processes(kind, process_group):
    process_group(
        "hccl", lambda *args, **options: dist.init_process_group(*args, **options, device_id=torch.device("npu:0"))
    )
    assert dist.is_hccl_available()
    dist.barrier(device_ids=[0])
    for options in IDS.values():
        assert wrapped(nn.Linear(3, 3), **options()).device.type == kind
    assert wrapped(nn.Linear(3, 3), [0], 0).device.type == kind
    dist.new_group([0], backend="hccl", device_id=torch.device("npu:0"))
    if kind == "cpu":
        with pytest.raises(RuntimeError, match="'npu:1' does not exist"):
            wrapped(nn.Linear(3, 3), device_ids=[1])


def test_models_are_sharded_on_a_mesh_of_npus(kind, process_group):
    if kind == "cpu" and not FSDP2_RUNS_ON_CPU:
        pytest.skip(NEEDS_FSDP2_ON_CPU.kwargs["reason"])
    process_group("hccl")
    x = torch.ones(2, 3, device="npu")
    for mesh in (dist.init_device_mesh("npu", (1,)), dist.DeviceMesh("npu", [0]), device_mesh.DeviceMesh("npu", [0])):
        assert mesh.device_type == kind
        fully_shard(model := nn.Linear(3, 3).npu(), mesh=mesh)
        model(x).sum().backward()
        assert model.weight.grad.to_local().device.type == kind


@pytest.mark.parametrize("options", [{}, {"device_ids": [0]}, {"device_ids": ["npu:0"], "output_device": 0}], ids=str)
def test_models_are_wrapped_for_several_devices_of_one_process(kind, options):
    output = nn.DataParallel(nn.Linear(3, 3).npu(), **options)(torch.ones(2, 3, device="npu"))
    output.sum().backward()
    assert output.device.type == kind


@pytest.mark.parametrize("backend", ["npu:hccl", "cpu:gloo,npu:hccl"])
def test_processes_talk_with_a_backend_for_each_device(kind, process_group, backend):
    process_group(backend)
    for device in ("npu", *(["cpu"] if "cpu" in backend else [])):
        total = torch.ones(2, device=device)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]


class Scaled(torch.autograd.Function):
    """Both ways with a tensor of its own, made on the NPU."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.tensor(2.0, device="npu")

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.tensor(2.0, device="npu")


def twice(x):
    return x * torch.full((3,), 2.0, device="npu")


def hooked(x):
    x.register_hook(lambda grad: grad.to("npu") * torch.tensor(2.0, device="npu"))
    return x * 1


BACKWARD = {
    "function": (Scaled.apply, lambda y, x: y.backward()),
    "function, autograd.backward": (Scaled.apply, lambda y, x: torch.autograd.backward(y)),
    "function, autograd.grad": (Scaled.apply, lambda y, x: setattr(x, "grad", torch.autograd.grad(y, x)[0])),
    "checkpoint": (lambda x: checkpoint(twice, x, use_reentrant=False), lambda y, x: y.backward()),
    "checkpoint, reentrant": (lambda x: checkpoint(twice, x, use_reentrant=True), lambda y, x: y.backward()),
    "hook": (hooked, lambda y, x: y.backward()),
    "from a loss on the CPU": (lambda x: Scaled.apply(x).cpu(), lambda y, x: y.backward()),
    "from a gradient that is given": (Scaled.apply, lambda y, x: y.backward(torch.ones((), device="npu"))),
}


@pytest.mark.parametrize("way", BACKWARD)
def test_npu_is_known_during_the_backward_pass(kind, way):
    """While torch handles a call it has taken the mode off, and a backward pass calls functions of the script's."""
    through, backward = BACKWARD[way]
    x = torch.ones(3, device="npu", requires_grad=True)
    backward(through(x).sum(), x)
    assert torch.equal(x.grad.cpu(), torch.full((3,), 2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_means_npu_after_transfer_to_npu(kind):
    with ascend.install(kind):
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        model = nn.Linear(2, 2).cuda()
        for tensor in (X.cuda(), X.to("cuda:0"), torch.ones(1, device="cuda"), model.weight, X.cuda(0)):
            assert tensor.device.type == kind
        assert X.cuda() is not X
        with torch.autocast("cuda"):
            assert (model.weight @ model.weight).dtype == torch.float16
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        torch.cuda.manual_seed_all(3)
        first = torch.rand(3, device="cuda")
        torch.cuda.manual_seed_all(3)
        assert torch.equal(torch.rand(3, device="cuda"), first)
        assert torch.cuda.current_device() == 0
        X.cuda().record_stream(torch.cuda.current_stream())
        X.cuda().record_stream(torch.cuda.Stream())
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        assert torch.cuda.mem_get_info()[0] > 0
        assert torch.cuda.memory_reserved() > 0
        assert torch.cuda.get_device_name() == torch.npu.get_device_name()
        assert torch.equal(torch.einsum("cuda->cuda", torch.ones(1, 2, 3, 4)), torch.ones(1, 2, 3, 4))
    if kind == "cpu" and not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            X.cuda()
