"""``offload=True``: where states are, that training does not change, and that nothing half-written is read.

A CPU stands in for the device (tests/host_memory.py). What only a GPU shows is in tests/gpu/test_states_on_host.py.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch

import fusedadam
from fusedadam import AdamW, EmaAdamW, ScheduleFreeAdamW, compat, step_in_backward
from fusedadam.contract import advice
from fusedadam.contract.memory import readable
from fusedadam.contract.storage import PRESETS
from fusedadam.engine.participant import Participant
from fusedadam.tensors import host_memory
from fusedadam.tensors.host_memory import slab_of
from tests.contract.common import (
    EVERY_FIRST,
    QUICK,
    assert_same,
    assert_unchanged,
    everything,
    leaves,
    params_of,
    saved_and_loaded,
    set_grads,
    train,
)
from tests.contract.test_matrix import SHAPES
from tests.host_memory import pretended
from tests.support import BF16, F32

QUICK_CASES = {f"{name}-{storage}" for name in QUICK for storage in (None, "8bit")}
CASES = [
    pytest.param(make, storage, id=f"{name}-{storage}")
    for name, make in EVERY_FIRST.items() for storage in (None, *PRESETS)
]  # fmt: skip
EVERY = pytest.mark.parametrize(("make", "storage"), CASES)
# What surrounds a step is the base's: quick tests take what differs in its states.
SOME = pytest.mark.parametrize(
    ("make", "storage"),
    [
        pytest.param(*case.values, id=case.id, marks=[] if case.id in QUICK_CASES else pytest.mark.exhaustive)
        for case in CASES
    ],
)


@pytest.fixture
def device():
    with pretended(allows_eager=True) as found:
        yield found


@pytest.fixture
def compiled():
    with pretended() as found:
        yield found


def made(make, storage=None, offload=True, params=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # states in bfloat16, as the parameters
        params = leaves(SHAPES, [F32 if storage is None else BF16]) if params is None else params
        return make(params, storage=storage, backend="eager", offload=offload, **options)


def on_host(optimizer):
    """The names of the states there, and the states that are on the device although they are not small."""
    states = [
        (n, v) for p in params_of(optimizer) for n, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)
    ]
    there = {name for name, value in states if slab_of(value) is not None}
    large = {name for name, value in states if slab_of(value) is None and value.nbytes >= host_memory.SMALLEST}
    return there, large


@EVERY
def test_training_gives_the_same_bits_and_states_are_there(device, make, storage):
    offloaded = train(made(make, storage), 3)
    assert_same(offloaded, train(made(make, storage, False), 3))
    there, large = on_host(offloaded)
    assert there
    assert not large
    assert all(slab_of(value) is None for p in params_of(offloaded)[1:] for value in offloaded.state[p].values())


@SOME
def test_resumed_from_a_file_with_and_without(device, make, storage):
    for first, then in ((True, False), (False, True), (True, True)):
        original = train(made(make, storage, first, seed=5), 2)
        params, saved = saved_and_loaded([params_of(original), original.state_dict()])
        resumed = made(make, storage, then, params)
        resumed.load_state_dict(saved)
        assert resumed.param_groups[0]["offload"] is then
        assert bool(on_host(resumed)[0]) is then  # loaded to where they belong, and not by way of the device
        assert_same(train(resumed, 2, start=2), train(original, 2, start=2))


@SOME
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copied(device, make, storage, copied):
    original = train(made(make, storage), 2)
    before = device.waits
    again = copied(original)
    assert device.waits > before
    assert not on_host(again)[0]  # pageable: no kernel may see it
    assert_same(train(again, 2, start=2), train(original, 2, start=2))
    assert on_host(again)[0] == on_host(original)[0]
    ours, theirs = ({id(slab_of(v)) for p in params_of(o) for v in o.state[p].values()} for o in (original, again))
    assert ours & theirs == {id(None)}


@SOME
def test_changed_between_steps(device, make, storage):
    optimizer, plain = made(make, storage, False), made(make, storage, False)
    for k, offload in enumerate((True, False, True)):
        optimizer.param_groups[0]["offload"] = offload
        assert_same(train(optimizer, 1, start=k), train(plain, 1, start=k))
        there, large = on_host(optimizer)
        assert bool(there) is offload
        assert bool(large) is not offload


def test_memory_is_given_back(device):
    optimizer = train(made(AdamW), 2)
    slabs = [*host_memory._slabs]
    assert slabs
    optimizer.param_groups[0]["offload"] = False
    train(optimizer, 1)
    gc.collect()
    assert all(slab.memory is None for slab in slabs)
    optimizer.param_groups[0]["offload"] = True
    train(optimizer, 1)
    slabs = [*host_memory._slabs]
    del optimizer
    gc.collect()
    assert all(slab.memory is None for slab in slabs)


def test_the_device_has_one_new_state_at_a_time(device, monkeypatch):
    """Two of them are twice the memory that is free on a device where offloading is needed."""
    made_on_device, bring = [], Participant.brought_home

    def brought_home(participant, here, *others):
        assert all(state() is None for state in made_on_device)
        made_on_device.append(weakref.ref(here))
        return bring(participant, here, *others)

    monkeypatch.setattr(Participant, "brought_home", brought_home)
    train(made(AdamW, params=leaves([(64, 64)])), 1)
    assert len(made_on_device) == 2


def test_only_groups_that_ask_for_it(device):
    params = leaves([(64, 64), (32, 32)])
    optimizer = AdamW([{"params": params[:1], "offload": True}, {"params": params[1:]}], backend="eager")
    train(optimizer, 1)
    assert slab_of(optimizer.state[params[0]]["exp_avg"]) is not None
    assert slab_of(optimizer.state[params[1]]["exp_avg"]) is None


@pytest.mark.parametrize("replaced", ["between steps", "of another layout", "by a view of another slab"])
def test_a_state_that_someone_replaced_is_copied_in(compiled, replaced):
    """Its address must never reach a kernel: it is pageable."""
    params, others = leaves([(64, 64)]), leaves([(64, 64)])
    optimizer, plain = AdamW(params, offload=True), AdamW(others)
    train(optimizer, 2)
    train(plain, 2)
    state = optimizer.state[params[0]]
    value = state["exp_avg"].clone()
    state["exp_avg"] = value.t().contiguous().t() if replaced == "of another layout" else value
    if replaced == "by a view of another slab":
        state["exp_avg"] = host_memory.HostMemory().copy(value, value.stride(), value.device)
    train(optimizer, 2, start=2)
    train(plain, 2, start=2)
    assert slab_of(state["exp_avg"]) is not None
    assert state["exp_avg"].data_ptr() != value.data_ptr()
    assert_same(optimizer, plain)


LAYOUTS = {
    "transposed": lambda: torch.randn(96, 64).t(),
    "permuted": lambda: torch.randn(8, 32, 64).permute(1, 0, 2),
    "channels_last": lambda: torch.randn(64, 32, 3, 3).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_kernels_use_states_in_place_whatever_the_layout(compiled, make, storage, layout):
    """A copy that a launch makes of a state would be in pageable memory, out of reach of a device."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(LAYOUTS[layout]().to(F32 if storage is None else BF16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not row-major stays wide
        optimizer = make([param], storage=storage, offload=True)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()  # a launch table refuses to be made for such copies
    assert on_host(optimizer)[0]
    ((_, plan),) = optimizer._stepper.plans.values()
    copied = [name for launch in plan.launches for name, _ in launch.table.copied if name not in ("param", "grad")]
    assert not copied


def test_states_of_a_model_on_another_device_get_other_memory(compiled):
    optimizer = train(AdamW(leaves([(64, 64)]), offload=True), 2)
    (state,) = optimizer.state.values()
    slab = slab_of(state["exp_avg"])
    slab.device = torch.device("cpu", 1)  # as after model.to("cuda:1")
    optimizer._stepper.forget_plans()
    train(optimizer, 2, start=2)
    assert slab_of(state["exp_avg"]) is not slab
    assert_same(optimizer, train(AdamW(leaves([(64, 64)])), 4))


def test_memory_for_several_devices_at_once(device, monkeypatch):
    """Autograd has one thread for each device: none may lose sight of what another allocates meanwhile."""
    states, threads = [], []

    def allocate():
        states.append(host_memory.HostMemory().copy(torch.zeros(64), (1,), torch.device("cpu")))

    def asked_for_its_memory(slab):
        if slab is first and not threads:
            threads.append(threading.Thread(target=allocate))
            threads[0].start()
            threads[0].join(0.2)
        return slab._memory()

    allocate()
    first, seen = slab_of(states[0]), host_memory._slabs
    monkeypatch.setattr(host_memory.Slab, "memory", property(asked_for_its_memory))
    allocate()
    threads[0].join()
    assert len(states) == 3
    assert len(seen) == 1  # what someone looks through does not change
    assert all(slab_of(state) is not None for state in states)


def test_states_that_are_moved_in_every_step_are_said_once(device, monkeypatch):
    monkeypatch.setattr(advice, "_told", {*advice._told} - {"moved"})
    optimizer = train(made(AdamW), 1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(1, 6):
            assert len(found) == (step > 3)
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].clone()
            train(optimizer, 1, start=step)
    assert "moved out of page-locked memory 3 times" in str(found[0].message)
    assert found[0].filename == train.__code__.co_filename
    assert_same(optimizer, train(made(AdamW, offload=False), 6))


@pytest.mark.parametrize("make", [AdamW, EmaAdamW, fusedadam.AdamP], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("storage", [None, "8bit"])
def test_compiled_kernels_use_it_in_place(compiled, make, storage):
    params, others = (leaves([(64, 64), (5,)], [BF16 if storage else F32]) for _ in "ab")
    optimizer = train(make(params, offload=True, storage=storage), 2)
    state = optimizer.state[params[0]]
    addresses = {name: value.data_ptr() for name, value in state.items() if slab_of(value) is not None}
    assert addresses
    train(optimizer, 2, start=2)
    assert {name: state[name].data_ptr() for name in addresses} == addresses
    assert_same(optimizer, train(make(others, storage=storage), 4))


def test_torch_and_back(device):
    ours, theirs = made(AdamW, lr=1e-2), torch.optim.AdamW(leaves(SHAPES), lr=1e-2)
    train(ours, 2)
    theirs.load_state_dict(ours.state_dict())
    again = made(AdamW, lr=1e-2)
    again.load_state_dict(theirs.state_dict())
    assert on_host(again)[0] == {"exp_avg", "exp_avg_sq"}
    for p, q in zip(params_of(again), params_of(ours), strict=True):
        p.data.copy_(q.data)
    assert_same(train(again, 1, start=2), train(ours, 1, start=2))


READERS = {
    "state_dict": lambda o, _: o.state_dict(),
    "load_state_dict": lambda o, _: o.load_state_dict(torch.optim.Optimizer.state_dict(o)),
    "deepcopy": lambda o, _: copy.deepcopy(o),
    "pickle": lambda o, _: pickle.dumps(o),
    "widen_state_dict": lambda o, _: type(o).widen_state_dict(torch.optim.Optimizer.state_dict(o)),
    "float32_state_dict": lambda o, model: o.float32_state_dict(model),
    "load_float32_state_dict": lambda o, model: o.load_float32_state_dict(model, model.state_dict()),
    "ema_state_dict": lambda o, model: o.ema_state_dict(model),
    "ema_weights": lambda o, _: o.ema_weights().__enter__(),
    "wait": lambda o, _: o.wait(),
    "another storage": lambda o, _: (o.param_groups[0].update(storage="8bit"), o.step()),
    "no offload": lambda o, _: (o.param_groups[0].update(offload=False), o.step()),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_whatever_reads_states_waits_first(device, read):
    model = torch.nn.Linear(64, 64).bfloat16()
    optimizer = EmaAdamW(model.parameters(), storage="exact", offload=True, backend="eager")
    train(optimizer, 2)
    device.waits = 0
    train(optimizer, 1)
    assert device.waits == 0  # a step does not
    read(optimizer, model)
    assert device.waits


def test_where_asynchronous_checkpoints_share_memory_a_state_dict_is_a_copy(device, monkeypatch):
    optimizer = train(made(AdamW), 2)
    param = params_of(optimizer)[0]
    for shares in (False, True):
        monkeypatch.setattr(compat, "checkpoints_share_host_memory", lambda shares=shares: shares)
        value = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(value, optimizer.state[param]["exp_avg"])
        assert (slab_of(value) is None) is shares


def test_averages_that_take_the_place_of_weights_wait_first(device):
    optimizer = train(ScheduleFreeAdamW(leaves(SHAPES), offload=True, backend="eager"), 2)
    for switch in (optimizer.eval, optimizer.train):
        device.waits = 0
        switch()
        assert device.waits


def test_without_it_nothing_waits(device):
    optimizer = train(made(EmaAdamW, offload=False), 2)
    optimizer.state_dict()
    copy.deepcopy(optimizer)
    optimizer.wait()
    assert device.waits == 0
    assert not device.allocated


@pytest.mark.parametrize("storage", [None, "8bit"])
def test_in_backward(device, storage):
    models = [torch.nn.ParameterList(leaves(SHAPES, [BF16 if storage else F32])) for _ in range(2)]
    plain = made(AdamW, storage, False, models[0].parameters())
    early = step_in_backward(models[1], lambda params: made(AdamW, storage, True, params))
    for _ in range(3):
        for model in models:
            sum(p.float().square().sum() for p in model).backward()
        plain.step()
        plain.zero_grad()
        early.step()
    assert on_host(early)[0]
    assert len(device.allocated) == 1  # of one optimizer, not of each parameter
    assert_same(early, plain)


@pytest.mark.parametrize("storage", [None, "16bit", "8bit"])
def test_in_backward_few_programs_visit_all_chunks(compiled, storage):
    shapes = [(96, 128), (3, 4099), (5,)]  # several chunks, and rests of them
    models = [torch.nn.ParameterList(leaves(shapes, [BF16 if storage else F32])) for _ in "ab"]
    options = {"storage": storage, "lr": 1e-2, "betas": (0.9, 0.99)}
    plain = AdamW(models[0].parameters(), backend="numba", **options)
    early = step_in_backward(models[1], lambda params: AdamW(params, backend="triton", offload=True, **options))
    for _ in range(2):
        for model in models:
            sum((p.float() ** 3).sum() for p in model).backward()
        plain.step()
        plain.zero_grad()
        early.step()
    tables = [launch.table for stepper in early._in_backward.steppers.values() for launch in stepper.last_plan.launches]
    assert all(table.beside_model and table.over_the_bus for table in tables)
    assert_same(early, plain)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        pytest.param(AdamW, 3 * 8192 + 2 * 256, id="AdamW"),
        pytest.param(fusedadam.AdamP, 6 * 8192 + 4 * 256, id="AdamP"),
    ],
)
def test_the_memory_summary_shows_host_and_device_apart_and_what_crosses_the_bus(device, make, read):
    """AdamP visits the elements twice: it reads everything again, and stores it once."""
    params = leaves([(64, 128), (8,)], [BF16])
    optimizer = make(params, storage="8bit", offload=True, backend="eager")
    assert "Bus:" not in optimizer.memory_summary()
    train(optimizer, 1)
    text = optimizer.memory_summary()
    host = text[text.index("host memory, page-locked") :].split("\n\n")[0]
    assert "exp_avg_codes" in host
    assert "step" not in host
    assert "parameters" not in host
    back = 3 * 8192 + 2 * 256
    assert f"Bus: a step moves {readable(read)} to the device and {readable(back)} back" in text
    optimizer.param_groups[0]["offload"] = False
    train(optimizer, 1)
    assert "Bus:" not in optimizer.memory_summary()
    assert "page-locked" not in optimizer.memory_summary()


@pytest.mark.parametrize("value", [1, None, "cuda", 0])
def test_a_value_that_is_no_bool_is_refused(device, value):
    with pytest.raises(TypeError, match=r"offload=.* must be True or False"):
        made(AdamW, offload=value)
    optimizer = train(made(AdamW), 1)
    before = everything(optimizer)
    optimizer.param_groups[0]["offload"] = value
    with pytest.raises(TypeError, match=r"offload=.* must be True or False"):
        optimizer.step()
    optimizer.param_groups[0]["offload"] = True
    assert_unchanged(optimizer, before)


def test_on_a_cpu_it_does_nothing_and_says_so_once(monkeypatch):
    monkeypatch.setattr(advice, "_told", {*advice._told} - {"offload"})
    optimizer, other = (AdamW(leaves(), offload=True, backend="eager") for _ in "ab")
    with pytest.warns(UserWarning, match="offload=True does nothing for parameters on the CPU") as found:
        train(optimizer, 1)
    train(other, 1)
    assert len(found) == 1
    assert found[0].filename == train.__code__.co_filename
    assert not on_host(optimizer)[0]


def test_the_eager_backend_is_refused():
    with pretended():
        with pytest.raises(ValueError, match=r"offload=True .* backend='eager' copies; use backend='triton', or leave"):
            AdamW(leaves(), offload=True, backend="eager")
        optimizer = train(AdamW(leaves(), backend="eager"), 1)
        before = everything(optimizer)
        optimizer.param_groups[0]["offload"] = True
        with pytest.raises(ValueError, match="offload=True needs kernels that use host memory in place"):
            optimizer.step()
        optimizer.param_groups[0]["offload"] = False
        assert_unchanged(optimizer, before)


def test_a_device_that_does_not_map_host_memory_is_refused(monkeypatch):
    with pretended():
        monkeypatch.setattr(host_memory, "can_map_host_memory", lambda device: False)
        with pytest.raises(ValueError, match=r"offload=True needs a device .* and cpu does not; leave offload out"):
            AdamW(leaves(), offload=True)


def test_a_host_that_refuses_to_lock_changes_nothing(device, monkeypatch):
    optimizer = train(made(AdamW, offload=False), 2)
    set_grads(params_of(optimizer), 2)
    before = everything(optimizer)

    def refuse(nbytes):
        raise RuntimeError("offload=True could not page-lock")

    monkeypatch.setattr(host_memory, "allocate", refuse)
    optimizer.param_groups[0]["offload"] = True
    with pytest.raises(RuntimeError, match="could not page-lock"):
        optimizer.step()
    optimizer.param_groups[0]["offload"] = False
    assert_unchanged(optimizer, before)
    optimizer.step()


def test_copies_of_weights_follow_until_the_first_step(device):
    """Their first step may be skipped, and the weights written before the next one."""
    offloaded, plain = (made(EmaAdamW, offload=offload) for offload in (True, False))
    for optimizer in (offloaded, plain):
        set_grads(params_of(optimizer), 0)
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        with torch.no_grad():
            params_of(optimizer)[0].mul_(2)
    assert_same(train(offloaded, 2), train(plain, 2))
