"""While installed, "npu" is a device wherever torch takes one. `test_uninstall.py` has what remains: nothing."""

import concurrent.futures
import importlib
import io
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fusedadam import ascend

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
X = torch.arange(4.0)


@pytest.fixture(params=KINDS)
def kind(request):
    """Installed, and what "npu" means."""
    with ascend.install(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "torch_npu": "npu optim __version__",
        "torch_npu.optim": "NpuFusedAdamW NpuFusedAdamP NpuFusedBertAdam",
        "torch_npu.npu": "is_available Stream amp",
        "torch_npu.npu.amp": "autocast GradScaler",
        "torch_npu.contrib": "",
        "torch_npu.contrib.transfer_to_npu": "",
        "torch.npu": "is_available Stream amp",
        "torch.npu.amp": "autocast GradScaler",
        "mindspeed.ops.npu_apply_fused_adamw_v2": "npu_apply_fused_adamw_v2",
        "mindspeed.ops.npu_apply_fused_ema_adamw": "npu_apply_fused_ema_adamw",
        "mindspeed.core.optimizer.fused_ema_adamw.fused_ema_adamw": "FusedEmaAdamW",
    }.items(),
)
def test_modules_are_there_with_their_names(kind, module, names):
    imported = importlib.import_module(module)
    for name in names.split():
        thing = getattr(imported, name)
        assert thing is getattr(ascend, name, thing)


def test_one_module_under_all_its_names(kind):
    import torch_npu
    import torch_npu.npu.amp
    from torch.npu import amp

    assert torch_npu.npu is torch.npu
    assert torch_npu.npu.amp is amp


def mapped(location, **options):
    file = io.BytesIO()
    torch.save({"x": X}, file)
    file.seek(0)
    return torch.load(file, map_location=location, **options)["x"]


def by_default(device):
    torch.set_default_device(device)
    try:
        return torch.arange(4.0)
    finally:
        torch.set_default_device(None)


def within(device):
    with torch.device(device):
        return torch.arange(4.0)


def filled(module):
    """A module's parameter, which was made empty or at random."""
    return module.weight.data.flatten().copy_(X)


TAKING_A_DEVICE = {
    "to": lambda device: X.to(device),
    "to, by name": lambda device: X.to(device=device),
    "to, with dtype": lambda device: X.double().to(device, torch.float32),
    "to, all at once": lambda device: X.to(device, torch.float32, False, True),
    "to, of a subclass": lambda device: X.as_subclass(type("Own", (torch.Tensor,), {})).to(device),
    "npu": lambda device: X.npu(device),
    "npu, by name": lambda device: X.npu(device=device, non_blocking=True),
    "factory": lambda device: torch.arange(4.0, device=device),
    "tensor": lambda device: torch.tensor([0.0, 1.0, 2.0, 3.0], device=device),
    "as_tensor": lambda device: torch.as_tensor(X.numpy(), device=device),
    "like": lambda device: torch.zeros_like(X, device=device) + X.to(device),
    "new": lambda device: X.new_tensor([0, 1, 2, 3], device=device),
    "random": lambda device: torch.rand(4, device=device).copy_(X),
    "module": lambda device: filled(nn.Linear(4, 1, device=device)),
    "module.to": lambda device: filled(nn.Linear(4, 1).to(device)),
    "module.to, by name": lambda device: filled(nn.Linear(4, 1).to(device=device, dtype=torch.float32)),
    "module.npu": lambda device: filled(nn.Linear(4, 1).npu(device)),
    "module.to_empty": lambda device: filled(nn.Linear(4, 1, device="meta").to_empty(device=device)),
    "load": mapped,
    "load, not only weights": lambda device: mapped(device, weights_only=False),
    "load, by a function": lambda device: mapped(lambda storage, location: storage.npu(device)),
    "load, by a table": lambda device: mapped({"cpu": str(device)}),
    "set_default_device": by_default,
    "with device": within,
    "vmap": lambda device: torch.vmap(lambda x: x.to(device))(X),
    "trace": lambda device: torch.jit.trace(lambda x: x.to(device), X)(X),
}


@pytest.mark.parametrize("place", TAKING_A_DEVICE)
def test_npu_is_a_device_wherever_torch_takes_one(kind, place):
    for device in ("npu", "npu:0", torch.device("npu"), torch.device("npu", 0), torch.device(type="npu", index=0)):
        result = TAKING_A_DEVICE[place](device)
        assert result.device.type == kind, device
        assert result.is_npu
        assert torch.equal(result.detach().cpu(), X), device


def test_npu_without_a_device_and_by_number(kind):
    own = nn.Linear(2, 2)
    assert own.npu() is own
    for tensor in (X.npu(), X.npu(0), own.weight, nn.Linear(2, 2).npu(0).weight):
        assert tensor.device.type == kind
    assert X.untyped_storage().npu().device.type == kind
    assert torch.empty(1, device="meta").is_npu is False


def test_a_number_is_a_device_as_on_any_accelerator(kind):
    own = nn.Linear(2, 2)
    assert own.to(0) is own
    for tensor in (X.to(0), X.to(device=0), X.to(0, torch.float64), torch.zeros(3, device=0), own.weight):
        assert tensor.device.type == kind
    assert torch.device(0).type == torch.device("cuda" if kind == "cuda" else "cpu").type
    assert X.to(0) is not X
    assert torch.equal(torch.full((3,), 7).roll(1), torch.tensor([7, 7, 7])), "other numbers are numbers"


MOVES = {
    "npu": lambda x: x.npu(),
    "npu, by name": lambda x: x.npu("npu:0"),
    "to": lambda x: x.to("npu"),
    "to, by name": lambda x: x.to(device="npu:0"),
    "to, with dtype": lambda x: x.to("npu", torch.float32),
    "to, by number": lambda x: x.to(0),
    "to, non_blocking": lambda x: x.to("npu", non_blocking=True),
}


@pytest.mark.parametrize("move", MOVES)
def test_what_went_to_the_npu_is_a_copy_that_gradients_come_back_from(kind, move):
    """A script that changes it in place, and keeps the original for later, must not find that changed on a CPU."""
    original = torch.ones(3, requires_grad=True)
    moved = MOVES[move](original)
    with torch.no_grad():
        moved.add_(1)
    assert torch.equal(original, torch.ones(3))
    (moved * 3).sum().backward()
    assert torch.equal(original.grad, torch.full((3,), 3.0))


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


@pytest.mark.filterwarnings("ignore:.*no accelerator is found")
def test_pinned_memory(kind):
    pinned = kind != "cpu"
    for tensor in (X.pin_memory(), X.pin_memory("npu"), torch.zeros(4, pin_memory=True).copy_(X)):
        assert torch.equal(tensor, X)
        assert tensor.is_pinned() == tensor.is_pinned("npu") == pinned
    (batch,) = DataLoader(X, batch_size=4, pin_memory=True, pin_memory_device="npu")
    assert torch.equal(batch, X)
    assert batch.is_pinned() == pinned


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
        dist.destroy_process_group()


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


def test_npu_is_known_to_functions_that_torch_compiles(kind):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.npu() + torch.ones(4, device="npu") + x.to("npu:0"), backend="eager")
    for _ in range(2):
        result = compiled(X)
        assert result.device.type == kind
        assert torch.equal(result.cpu(), 2 * X + 1)
    torch.compiler.reset()


def test_strings_that_are_no_devices_are_left_alone(kind):
    with pytest.raises(RuntimeError, match="npu"):
        torch.linalg.norm(X.reshape(2, 2), "npu")  # a kind of norm, if there were such
    x = torch.rand(2, 3, 4)
    assert torch.equal(torch.einsum("npu", x), x)
    assert torch.equal(torch.einsum("npu->un", x), x.sum(1).T)
    assert torch.device("cpu").type == "cpu"
    with pytest.raises(RuntimeError, match="npux"):
        X.to("npux")


def test_a_second_npu_does_not_exist_on_a_cpu():
    with ascend.install("cpu"):
        for use in (
            lambda: X.npu(1), lambda: X.to("npu:1"), lambda: torch.ones(1, device="npu:1"), lambda: mapped("npu:1"),
            lambda: nn.Linear(1, 1).npu(1), lambda: torch.device("npu:1"), lambda: torch.device("npu", 1),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="'npu:1' does not exist: the only device is the CPU"):
                use()


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


def ask(found):
    """In whatever thread this runs: is npu known here?"""
    try:
        found.append(torch.ones(1, device="npu").device.type)
    except RuntimeError:
        found.append("unknown")


class Asking(threading.Thread):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def run(self):
        ask(self.found)


def in_a_pool(found):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, [found] * 3))


def in_thread(thread):
    thread.start()
    thread.join()
    assert "run" not in vars(thread), "what was put there is gone"


def from_a_thread(found):
    in_thread(threading.Thread(target=lambda: in_thread(Asking(found))))


@pytest.mark.parametrize(
    ("begin", "times"),
    [
        (lambda found: in_thread(threading.Thread(target=ask, args=(found,))), 1),
        (lambda found: in_thread(Asking(found)), 1),
        (lambda found: in_thread(threading.Timer(0.001, ask, [found])), 1),
        (in_a_pool, 3),
        (from_a_thread, 1),
    ],
    ids=["Thread", "subclass", "Timer", "pool", "thread of a thread"],
)
def test_threads_that_begin_while_installed_know_npu(kind, begin, times):
    found = []
    begin(found)
    assert found == [kind] * times


def test_a_thread_that_was_running_already_joins_by_installing():
    installed, found = threading.Event(), []

    def work():
        installed.wait()
        ask(found)
        ascend.install()
        ask(found)
        with ascend.install():
            ask(found)
        ask(found)

    thread = threading.Thread(target=work)
    thread.start()
    with ascend.install("cpu"):
        installed.set()
        thread.join()
        assert found == ["unknown", "cpu", "cpu", "cpu"]
        ask(found)
    assert found[-1] == "cpu", "the thread that had installed still knows"


def test_installing_again_is_fine_unless_it_asks_for_another_device(kind):
    other = "cuda" if kind == "cpu" else "cpu"
    assert kind in repr(ascend.install(kind))
    assert kind in repr(ascend.install())
    with pytest.raises(RuntimeError, match=f"device='{other}', but \"npu\" already means {kind}"):
        ascend.install(other)
    assert X.npu().device.type == kind


def test_the_environment_chooses_and_an_argument_overrules_it(monkeypatch):
    monkeypatch.setenv("FUSEDADAM_DEVICE", "meta")
    with ascend.install():
        assert torch.ones(1, device="npu").device.type == "meta"
    with ascend.install("cpu"):
        assert torch.ones(1, device="npu").device.type == "cpu"
    monkeypatch.setenv("FUSEDADAM_DEVICE", "")
    with ascend.install() as chosen:
        assert chosen.kind == ("cuda" if torch.cuda.is_available() else "cpu")
