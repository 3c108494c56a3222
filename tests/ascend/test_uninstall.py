"""Uninstalling restores torch in every situation, and an installation that fails leaves nothing behind."""

import importlib
import io
import sys
import threading

import pytest
import torch
import torch.distributed.device_mesh
import torch.jit
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import DataLoader

from fusedadam import ascend
from fusedadam.ascend import mode
from tests.support import forget_default_device

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OWNERS = (
    torch, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.UntypedStorage, torch.TypedStorage, torch.storage,
    torch.cuda, torch.jit, torch.amp, torch.amp.GradScaler, torch.autocast, torch.random, torch.serialization,
    torch.autograd, torch.autograd.graph, torch.utils.data, DataLoader, torch.optim.Optimizer, torch.distributed,
    torch.distributed.distributed_c10d, torch.distributed.device_mesh, torch.distributed.device_mesh.DeviceMesh,
    torch.nn.parallel, torch.nn.parallel.DistributedDataParallel, sys.modules["torch.nn.parallel.data_parallel"],
    torch.nn.DataParallel, threading, threading.Thread,
)  # fmt: skip
OURS = ("torch_npu", "mindspeed", "torch.npu")
ABSENT = object()


def everything():
    """Whatever installing might change, by name."""
    things = {(owner.__name__, name): thing for owner in OWNERS for name, thing in vars(owner).items()}
    things.pop(("Tensor", "__slotnames__"), None)  # put there by pickle, sooner or later
    things |= {("sys.modules", name): module for name, module in sys.modules.items() if name.startswith(OURS)}
    lists = {
        "sys.path": sys.path,
        "sys.meta_path": sys.meta_path,
        "registry": torch.serialization._package_registry,
        "stack of modes": _get_current_function_mode_stack(),
    }
    things |= {(name, k): thing for name, these in lists.items() for k, thing in enumerate(these)}
    return things | {("sys", "profile"): sys.getprofile()}


def changes(before):
    now = everything()
    return [name for name in {**before, **now} if before.get(name, ABSENT) is not now.get(name, ABSENT)]


@pytest.fixture(autouse=True)
def before():
    """Taken before each test; after it all is as it was then."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda")  # so that torch.cuda has begun, and changes no more
    profile, before = sys.getprofile(), everything()
    yield before
    ascend.uninstall()
    left = changes(before)
    sys.setprofile(profile)
    assert left == []


def use():
    """Some of everything."""
    importlib.import_module("torch_npu.npu.amp").autocast()
    for module in ("torch_npu.optim", "mindspeed.ops.npu_apply_fused_adamw_v2", "torch.npu.amp"):
        importlib.import_module(module)
    torch.nn.Linear(2, 2, device="npu").npu()(torch.ones(2, device="npu"))
    torch.Generator("npu")
    torch.ones(1, device="npu").record_stream(torch.npu.Stream())
    torch.Stream(device="npu").record_event(torch.Event(device="npu"))
    thread = threading.Thread(target=lambda: torch.ones(1, device="npu"))
    thread.start()
    thread.join()


def assert_unknown():
    for refused in (lambda: torch.ones(1, device="npu"), lambda: torch.ones(1).to("npu"), lambda: torch.device("npu")):
        with pytest.raises(RuntimeError, match="npu"):
            refused()
    for absent in (lambda: torch.npu, lambda: torch.ones(1).npu(), lambda: torch.nn.Linear(1, 1).npu()):
        with pytest.raises(AttributeError, match="npu"):
            absent()
    for name in ("torch_npu", "mindspeed", "torch.npu"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
            importlib.import_module(name)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_is_as_it_was(before, kind):
    for _ in range(2):  # once more works as well
        ascend.install(kind)
        assert len(changes(before)) > 20, "or this test would see nothing"
        use()
        ascend.uninstall()
        assert changes(before) == []
    ascend.uninstall()
    assert changes(before) == []
    assert_unknown()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_is_as_it_was_after_transfer_to_npu(before, kind):
    ascend.install(kind)
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    use()
    torch.ones(1).cuda()
    if kind == "cpu":
        assert ("torch.cuda", "synchronize") in changes(before)
    ascend.uninstall()
    assert changes(before) == []
    ascend.install("cpu")
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(1, device="cuda")  # cuda meant npu then, not now


def in_a_thread(function):
    failed = []

    def run():
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failed == []


def test_leaving_a_block_uninstalls_also_by_an_error(before):
    with pytest.raises(ZeroDivisionError), ascend.install("cpu"):
        use() or 1 / 0
    assert changes(before) == []


def test_an_inner_block_leaves_the_outer_installed(before):
    with ascend.install("cpu"):
        with ascend.install(), ascend.install("cpu"):
            use()
        use()
    assert changes(before) == []


def test_another_thread_uninstalls(before):
    """A mode belongs to a thread, so in ours it can go only with our next call of torch."""
    ascend.install("cpu")
    in_a_thread(ascend.uninstall)
    assert changes(before) == [("stack of modes", 0)]
    torch.ones(1)
    assert changes(before) == []
    assert_unknown()


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_installed_again_after_another_thread_has_uninstalled(before, calls):
    """A mode that was to go must not take its successor with it."""
    ascend.install("cpu")
    in_a_thread(ascend.uninstall)
    for _ in range(calls):
        torch.ones(1)
    ascend.install("cpu")
    for _ in range(3):
        assert torch.ones(1, device="npu").is_npu
    ascend.uninstall()
    assert changes(before) == []


def test_another_thread_uninstalls_while_ours_is_profiled():
    seen = []
    ascend.install("cpu")
    in_a_thread(ascend.uninstall)
    mine = lambda frame, event, argument: seen.append(event)  # noqa: E731
    sys.setprofile(mine)
    try:
        torch.ones(1)
        len("anything that is called")
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert _get_current_function_mode_stack() == []
    assert seen


def test_an_error_in_the_call_with_which_the_mode_goes(before):
    ascend.install("cpu")
    in_a_thread(ascend.uninstall)
    with pytest.raises(RuntimeError, match="npu"):
        torch.ones(1, device="npu")
    assert changes(before) == []


def test_a_thread_that_goes_on_while_another_uninstalls():
    ready, go, found = threading.Event(), threading.Event(), []

    def work():
        torch.ones(1, device="npu")
        ready.set()
        go.wait()
        torch.ones(1)
        found.append((_get_current_function_mode_stack(), sys.getprofile()))

    ascend.install("cpu")
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    ascend.uninstall()
    go.set()
    thread.join()
    assert found == [([], None)]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "another thread"])
def test_modes_of_others_stay_in_their_order(elsewhere):
    first, second, third = (type(name, (BaseTorchFunctionMode,), {})() for name in ("First", "Second", "Third"))
    with first:
        ascend.install("cpu")
        with second, third:
            if elsewhere:
                in_a_thread(ascend.uninstall)
                torch.ones(1)
            else:
                ascend.uninstall()
            assert _get_current_function_mode_stack() == [first, second, third]
            torch.ones(1)
        assert _get_current_function_mode_stack() == [first]


def test_a_default_device_that_was_set_while_installed_stays():
    ascend.install("cpu")
    torch.set_default_device("npu")
    ascend.uninstall()
    try:
        assert torch.get_default_device().type == torch.ones(1).device.type == "cpu"
        assert len(_get_current_function_mode_stack()) == 1, "torch's own"
    finally:
        forget_default_device()


def load_to_npu():
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    torch.load(file, map_location="npu")


WRAPPED = {
    "load": (torch, "load", load_to_npu),
    "autocast": (torch.autocast, "__init__", lambda: torch.autocast("npu")),
    "fork_rng": (torch.random, "fork_rng", lambda: torch.random.fork_rng(device_type="npu").__enter__()),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_somebody_wrapped_around_ours_stays_and_does_nothing(name):
    owner, attribute, call = WRAPPED[name]
    real = getattr(owner, attribute)
    ascend.install("cpu")
    ours, called = getattr(owner, attribute), []
    assert ours is not real

    def theirs(*args, **kwargs):
        called.append(args)
        return ours(*args, **kwargs)

    setattr(owner, attribute, theirs)
    try:
        call()
        ascend.uninstall()
        assert getattr(owner, attribute) is theirs
        with pytest.raises(RuntimeError, match="npu"):
            call()
        assert len(called) == 2
    finally:
        setattr(owner, attribute, real)


def test_hccl_is_hccl_afterwards(monkeypatch):
    given = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: given.append(backend))
    ascend.install("cpu")
    ours = torch.distributed.init_process_group
    ours("hccl")
    ascend.uninstall()
    ours("hccl")
    torch.distributed.init_process_group(backend="hccl")
    monkeypatch.undo()
    assert given == ["gloo", "hccl", "hccl"]


def test_threads_that_are_started_through_ours_afterwards_are_plain():
    real = threading.Thread.start
    ascend.install("cpu")
    ours, stacks = threading.Thread.start, []
    assert ours is not real
    ascend.uninstall()
    thread = threading.Thread(target=lambda: stacks.append(_get_current_function_mode_stack()))
    ours(thread)
    thread.join()
    assert stacks == [[]]


def test_what_a_script_kept_does_not_bring_npu_back(before):
    ascend.install("cpu")
    torch_npu = importlib.import_module("torch_npu")
    generator, stream, event, moved = torch.Generator, torch.Stream, torch.Event, torch.Tensor.npu
    ascend.uninstall()
    assert torch_npu.optim.NpuFusedAdamW is ascend.NpuFusedAdamW
    for kept in (
        lambda: generator("npu"), lambda: stream("npu"), lambda: event("npu"), lambda: moved(torch.ones(1)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="npu"):
            kept()
    assert changes(before) == []


@pytest.mark.parametrize("device", ["nonsense", "cuda:0", "cpu:0", "npu"])
@pytest.mark.parametrize("source", ["device", "FUSEDADAM_DEVICE"])
def test_a_device_that_cannot_be_had_is_refused(before, monkeypatch, device, source):
    if source != "device":
        monkeypatch.setenv(source, device)
    with pytest.raises(ValueError, match=f"{source}='{device}'"):
        ascend.install(*([device] if source == "device" else []))
    assert changes(before) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(before):
    with pytest.raises(ValueError, match=r"device='cuda' is not available .*; use 'cpu' or leave it out"):
        ascend.install("cuda")
    assert changes(before) == []


def test_an_error_half_way_undoes_what_was_done(before, monkeypatch):
    def fail():
        assert len(changes(before)) > 20
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(mode, "enter", fail)
        with pytest.raises(MemoryError):
            ascend.install("cpu")
    assert changes(before) == []


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A package that is really there, as far as anybody can tell."""

    def make(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("real = True\n")
        monkeypatch.syspath_prepend(tmp_path)
        return name

    yield make
    for name in ("torch_npu", "mindspeed"):
        sys.modules.pop(name, None)
    monkeypatch.undo()


@pytest.mark.parametrize("imported", [False, True])
def test_the_real_torch_npu_is_left_alone(real, imported):
    name = real("torch_npu")
    if imported:
        importlib.import_module(name)
    before = everything()
    warn_once = sys.modules["fusedadam.ascend.install"]._warn_of_real_torch_npu
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="torch_npu is installed, so .* does nothing") as warned:
        installation, _ = ascend.install(), ascend.install()
    assert [w.filename for w in warned] == [__file__]
    with installation:
        assert changes(before) == []
    assert importlib.import_module(name).real
    ascend.uninstall()
    assert importlib.import_module(name).real


def test_the_real_mindspeed_comes_before_ours(real):
    real("mindspeed")
    with ascend.install("cpu"):
        importlib.import_module("torch_npu")
        theirs = importlib.import_module("mindspeed")
        assert theirs.real
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'mindspeed\.ops'"):
            importlib.import_module("mindspeed.ops")
    assert sys.modules["mindspeed"] is theirs
    assert "torch_npu" not in sys.modules
