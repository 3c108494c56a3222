"""``offload=True`` on a GPU: the bits of a run without it, nothing half-written, and memory that outlives its kernels.

tests/contract/test_offload.py has what needs no GPU.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings

import pytest
import torch

import fusedadam
from fusedadam import Adafactor, AdamP, AdamW, EmaAdamW, Muon, ScheduleFreeAdamW, step_in_backward
from fusedadam.catalog import CATALOG
from fusedadam.cli.doctor.bus import bandwidth
from fusedadam.contract.stepper import Stepper
from fusedadam.contract.storage import PRESETS
from fusedadam.tensors import host_memory
from fusedadam.tensors.host_memory import slab_of
from tests.contract.common import EVERY_FIRST, assert_same, params_of
from tests.support import BF16, F32

pytestmark = pytest.mark.gpu
SHAPES = [(256, 192), (64, 32, 3, 3), (96,), (130, 5)]
LONG = 200_000_000  # cycles, a tenth of a second
EVERY = [
    pytest.param(make, storage, id=f"{name}-{storage}")
    for name, make in EVERY_FIRST.items() for storage in (None, *PRESETS)
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_states_too(monkeypatch):
    monkeypatch.setattr(host_memory, "SMALLEST", 1)


def leaves(dtype=F32, shapes=SHAPES):
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator, device="cuda").to(dtype).requires_grad_())
        for s in shapes
    ]


def train(optimizer, steps, start=0, sleep=0):
    for step in range(start, start + steps):
        generator = torch.Generator("cuda").manual_seed(100 + step)
        for p in params_of(optimizer):
            p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)
        if sleep:
            torch.cuda._sleep(sleep)
        optimizer.step()
    return optimizer


def made(make, storage=None, offload=True, params=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = leaves(BF16 if storage else F32) if params is None else params
        return make(params, storage=storage, offload=offload, **options)


def contents(optimizer):
    """On the host, with what every stream has written."""
    torch.cuda.synchronize()
    params = params_of(optimizer)
    return (
        [p.detach().cpu() for p in params],
        [{name: torch.as_tensor(v).cpu() for name, v in optimizer.state[p].items()} for p in params],
    )


def assert_alike(one, other):
    assert_same(contents(one), contents(other))


def hosted(optimizer):
    return [v for p in params_of(optimizer) for v in optimizer.state[p].values() if slab_of(v) is not None]


@pytest.mark.parametrize(("make", "storage"), EVERY)
def test_the_same_bits_as_without(make, storage):
    optimizer = train(made(make, storage), 4)
    states = hosted(optimizer)
    assert states
    assert all(state.is_pinned() for state in states)
    assert_alike(optimizer, train(made(make, storage, False), 4))


@pytest.mark.parametrize("options", [{"capturable": True}, {"max_grad_norm": 0.1}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("make", [AdamW, fusedadam.AdamP, fusedadam.BertAdam])
def test_with_other_options(make, options):
    assert_alike(train(made(make, "8bit", **options), 4), train(made(make, "8bit", False, **options), 4))


@pytest.mark.parametrize("storage", [None, "8bit"])
def test_captured_steps(storage):
    captured, plain = made(AdamW, storage, capturable=True), made(AdamW, storage, False)
    train(captured, 1)
    train(plain, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(3):
        torch.cuda._sleep(LONG // 10)
        graph.replay()
        plain.step()
    captured.wait()
    ours = [v.clone() for v in hosted(captured)]
    torch.cuda.synchronize()
    assert all(map(torch.equal, ours, hosted(captured)))
    assert_alike(captured, plain)


def test_a_grad_scaler():
    offloaded, plain = made(AdamW), made(AdamW, None, False)
    for optimizer in (offloaded, plain):
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        scaler.scale(torch.ones((), device="cuda"))
        for step in range(4):
            for p in params_of(optimizer):
                p.grad = torch.full_like(p, float("inf") if step == 1 else 4.0 * step)
            scaler.step(optimizer)
            scaler.update()
    assert_alike(offloaded, plain)


def test_a_step_does_not_wait_for_the_device():
    optimizer = train(made(AdamW, "8bit"), 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(optimizer, 3, sleep=LONG)
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS_OUT = {
    "saved": lambda o: saved(o.state_dict())["state"],
    "deepcopy": lambda o: copy.deepcopy(o).state_dict()["state"],
    "pickle": lambda o: pickle.loads(pickle.dumps(o)).state_dict()["state"],
    "wait": lambda o: waited(o),
    "load_state_dict": lambda o: loaded(o),
}


def waited(optimizer):
    optimizer.wait()
    states = [optimizer.state[p] for p in params_of(optimizer)]
    return {k: {name: value.clone() for name, value in state.items()} for k, state in enumerate(states)}


def loaded(optimizer):
    other = made(EmaAdamW, params=[torch.nn.Parameter(p.detach().clone()) for p in params_of(optimizer)])
    other.load_state_dict(torch.optim.Optimizer.state_dict(optimizer))  # which does not wait
    return other.state_dict()["state"]


@pytest.mark.parametrize("way", WAYS_OUT.values(), ids=WAYS_OUT.keys())
def test_nothing_half_written_is_read(way):
    params = leaves(F32, [(2048, 2048), (300, 7)])
    optimizer = train(made(EmaAdamW, params=params), 2)
    expected = train(made(EmaAdamW, None, False, params=leaves(F32, [(2048, 2048), (300, 7)])), 3)
    expected = contents(expected)[1]
    torch.cuda.synchronize()
    train(optimizer, 1, start=2, sleep=LONG)
    found = way(optimizer)
    for k, state in enumerate(expected):
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(found[k][name]).cpu(), value), name


def test_averages_as_weights_are_whole():
    for make in (EmaAdamW, ScheduleFreeAdamW):
        offloaded, plain = (made(make, "exact", offload) for offload in (True, False))
        with contextlib.ExitStack() as averaged:
            for optimizer in (offloaded, plain):
                train(optimizer, 3, sleep=LONG // 4)
                trained = [param.clone() for group in optimizer.param_groups for param in group["params"]]
                if make is EmaAdamW:
                    averaged.enter_context(optimizer.ema_weights())
                else:
                    optimizer.eval()
                params = [param for group in optimizer.param_groups for param in group["params"]]
                assert not all(map(torch.equal, trained, params))
            assert_alike(offloaded, plain)


@pytest.mark.parametrize("side", [False, True], ids=["current stream", "another stream"])
def test_memory_outlives_its_kernels(side):
    """An optimizer that is deleted right after a step, and memory of the same size that is asked for at once."""
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    params, earlier = leaves(F32, [(1024, 1024)]), {*map(id, host_memory._slabs)}
    with torch.cuda.stream(stream):
        optimizer = train(made(AdamW, params=params), 2)
        slabs = [slab for slab in host_memory._slabs if id(slab) not in earlier]
        sizes = [slab.end - slab.begin for slab in slabs]
        torch.cuda.synchronize()
        train(optimizer, 1, start=2, sleep=LONG)
    del optimizer
    gc.collect()
    assert slabs
    assert all(slab.memory is None for slab in slabs)
    others = [torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(7) for size in sizes for _ in range(2)]
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)


def test_host_memory_is_given_back():
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None:
        pytest.skip("this version of torch does not count page-locked memory")
    gc.collect()
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    before = stats()["allocated_bytes.current"]
    optimizer = train(made(AdamW, params=leaves(F32, [(4096, 1024)])), 2)
    states = 2 * 4 * 4096 * 1024
    assert states <= stats()["allocated_bytes.current"] - before <= 1.5 * states
    del optimizer
    gc.collect()
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    assert stats()["allocated_bytes.current"] <= before


def test_the_device_keeps_none_of_it(monkeypatch):
    monkeypatch.undo()  # small states stay
    params = leaves(BF16, [(4096, 2048), (2048,)])
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = made(AdamW, "8bit", params=params)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20
    assert torch.cuda.max_memory_allocated() - before < 1.6 * params[0].numel()  # one state at a time
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.parametrize("storage", [None, "8bit"])
def test_in_backward(storage, monkeypatch):
    run = Stepper.run

    def late(stepper, *arguments):
        torch.cuda._sleep(LONG // 10)  # on the stream beside the model
        return run(stepper, *arguments)

    monkeypatch.setattr(Stepper, "run", late)
    models = [torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))).cuda() for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    if storage:
        models = [model.bfloat16() for model in models]
    optimizers = [
        step_in_backward(model, lambda p, offload=offload: AdamW(p, storage=storage, offload=offload))
        for model, offload in zip(models, (True, False), strict=True)
    ]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()))
            model(x).square().mean().backward()
            joined = [param.detach().clone() for param in model.parameters()]  # the current stream has waited
            optimizer.step()
            torch.cuda.synchronize()
            assert all(map(torch.equal, joined, model.parameters()))
    assert hosted(optimizers[0])
    assert_alike(*optimizers)


def test_complex_parameters_in_backward():
    """Their gradients are often conjugated lazily."""
    found = []
    for offload in (True, False):
        torch.manual_seed(0)
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))]).cuda()
        optimizer = step_in_backward(model, lambda p, offload=offload: AdamW(p, offload=offload))
        for _ in range(3):
            (model[0] @ model[0].mH).abs().square().mean().backward()
            optimizer.step()
        found.append(optimizer)
    assert_alike(*found)


@pytest.mark.parametrize("make", [AdamP, Muon, Adafactor], ids=lambda make: make.__name__)
def test_layouts_that_kernels_walk_row_by_row(make):
    def leaves_():
        torch.manual_seed(0)
        weights = torch.randn(96, 64).t(), torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last)
        return [torch.nn.Parameter(weight.cuda()) for weight in weights]

    assert_alike(*(train(made(make, None, offload, params=leaves_()), 3) for offload in (True, False)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_states_of_another_device_than_the_current_one():
    def weights(device):
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(128, 64).to(device))]

    optimizers = [made(AdamW, None, offload, params=weights("cuda:1")) for offload in (True, False)]
    for optimizer in optimizers:
        for _ in range(2):
            for param in params_of(optimizer):
                param.grad = param.detach().clone()
            optimizer.step()
    assert_alike(*optimizers)


def test_a_state_that_someone_replaced_is_copied_in():
    optimizer, plain = (train(made(AdamW, None, offload), 2) for offload in (True, False))
    optimizer.wait()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()  # pageable, at another address
        state["exp_avg_sq"] = state["exp_avg_sq"].cuda()
    assert_alike(train(optimizer, 2, start=2), train(plain, 2, start=2))
    assert all(slab_of(s["exp_avg"]) and slab_of(s["exp_avg_sq"]) for s in optimizer.state.values())


def test_changed_between_steps():
    optimizer, plain = made(AdamW, "8bit"), made(AdamW, "8bit", False)
    for step, offload in enumerate((True, False, True)):
        optimizer.param_groups[0]["offload"] = offload
        train(optimizer, 1, start=step, sleep=LONG // 4)
        train(plain, 1, start=step)
        assert bool(hosted(optimizer)) is offload
    assert_alike(optimizer, plain)


def test_every_optimizer_is_here():
    assert len(EVERY) == 4 * len(CATALOG)


def test_doctor_measures_the_bus():
    bus = bandwidth(torch.device("cuda", 0), 16)
    assert 1 < bus.both <= 1.2 * max(bus.to_device, bus.from_device)


def test_the_eager_backend_is_refused():
    with pytest.raises(ValueError, match="backend='eager' copies"):
        AdamW(leaves(), offload=True, backend="eager")
