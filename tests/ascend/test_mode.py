"""While installed, "npu" is a device in every torch function that takes one, in every thread."""

import concurrent.futures
import io
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fusedadam import ascend
from tests.support import forget_default_device

X = torch.arange(4.0)


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
        forget_default_device()


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


@pytest.mark.filterwarnings("ignore:.*no accelerator is found")
def test_pinned_memory(kind):
    pinned = kind != "cpu"
    for tensor in (X.pin_memory(), X.pin_memory("npu"), torch.zeros(4, pin_memory=True).copy_(X)):
        assert torch.equal(tensor, X)
        assert tensor.is_pinned() == tensor.is_pinned("npu") == pinned
    (batch,) = DataLoader(X, batch_size=4, pin_memory=True, pin_memory_device="npu")
    assert torch.equal(batch, X)
    assert batch.is_pinned() == pinned


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
