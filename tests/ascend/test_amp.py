"""torch_npu.npu.amp: autocast and GradScaler, with torch_npu's arguments."""

import importlib

import pytest
import torch


def test_a_custom_function_is_told_about_mixed_precision(kind):
    amp = importlib.import_module("torch_npu.npu.amp")

    class Twice(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            assert not torch.is_autocast_enabled("npu")
            return 2 * x

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, device="npu", dtype=torch.float16, requires_grad=True)
    with amp.autocast():
        y = Twice.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_autocast_takes_torch_npus_arguments(kind):
    autocast = importlib.import_module("torch_npu.npu.amp").autocast
    a = torch.ones(2, 2, device="npu")
    for expected, context in [
        (torch.float16, autocast()),
        (torch.float16, autocast(enabled=True)),
        (torch.bfloat16, autocast(True, torch.bfloat16)),
        (torch.bfloat16, autocast(dtype=torch.bfloat16)),
        (torch.float32, autocast(False)),
        (torch.float16, autocast(cache_enabled=False)),
    ]:
        with context:
            assert (a @ a).dtype == expected
    assert autocast()(lambda: (a @ a).dtype)() == torch.float16


class Training:
    """One parameter, and a step that takes 1 from it, if it takes any."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.param = torch.nn.Parameter(torch.zeros(2, device="npu"))
        self.optimizer = torch.optim.SGD([self.param], lr=1.0)

    def step(self, grad=1.0):
        """What the parameter and the scale are afterwards."""
        self.optimizer.zero_grad()
        self.scaler.scale((self.param * torch.tensor([1.0, grad], device="npu")).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.param[0].item(), self.scaler.get_scale()


INF = float("inf")


@pytest.fixture
def scaler(kind):
    return importlib.import_module("torch_npu.npu.amp").GradScaler


def test_a_dynamic_scale_grows_and_backs_off(scaler):
    training = Training(scaler(8.0, 4.0, 0.25, 2))
    assert [training.step(grad) for grad in (1, 1, INF, 1, INF, 1, 1)] == [
        (-1, 8), (-2, 32), (-2, 8), (-3, 8), (-3, 2), (-4, 2), (-5, 8),
    ]  # fmt: skip


def test_a_static_scale_stays_but_infinite_steps_are_skipped(scaler):
    for own in (scaler(8.0, 4.0, 0.25, 1, False), scaler(init_scale=8.0, growth_interval=1, dynamic=False)):
        training = Training(own)
        grads = (1, INF, 1, float("nan"), 1)
        assert [training.step(grad) for grad in grads] == [(-1, 8), (-1, 8), (-2, 8), (-2, 8), (-3, 8)]
        own.update(16.0)
        assert training.step() == (-4, 16)


def test_a_scaler_that_is_not_enabled(scaler):
    for own in (scaler(8.0, 2.0, 0.5, 1, True, False), scaler(dynamic=False, enabled=False)):
        assert not own.is_enabled()
        assert Training(own).step() == (-1, 1)
        assert own.state_dict() == {}


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_scaler_is_saved_and_loaded(scaler, dynamic):
    training = Training(scaler(8.0, 4.0, 0.25, 3, dynamic))
    training.step()
    training.step()
    resumed = Training(scaler())
    resumed.step()
    resumed.scaler.load_state_dict(training.scaler.state_dict())
    assert resumed.scaler.state_dict() == training.scaler.state_dict()
    for grad in (1, 1, INF, 1, 1, 1):
        assert resumed.step(grad)[1] == training.step(grad)[1]
    assert (training.scaler.get_scale() != 8) == dynamic


def test_the_states_of_torchs_scaler_and_of_torch_npus_travel_both_ways(scaler):
    torchs, theirs = torch.amp.GradScaler("npu", init_scale=4.0), scaler(16.0, dynamic=False)
    state = torchs.state_dict()
    torchs.load_state_dict(theirs.state_dict())
    assert torchs.get_scale() == 16.0
    theirs.load_state_dict(state)
    assert theirs.get_scale() == 4.0
    training = Training(theirs)
    training.step(INF)
    assert theirs.get_scale() == 4.0, "torch's state does not say, so it stays as it was: static"
