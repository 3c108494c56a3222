"""Everything else that a script may do with a torch.optim optimizer, for every optimizer here."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedadam
from tests.contract.common import (
    EVERY,
    EVERY_PLAIN,
    MAKERS,
    PLAIN,
    SHAPES,
    assert_same,
    assert_unchanged,
    copies_of,
    everything,
    leaves,
    params_of,
    set_grads,
    tensors,
    train,
)
from tests.support import BF16, F16, F32, F64

# closures and hooks


@EVERY
def test_a_closure_runs_with_gradients_though_the_caller_has_switched_them_off(make):
    optimizer, plain = make(leaves()), make(leaves())

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p**3).sum() for p in params_of(optimizer))
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(2)]
        assert not torch.is_grad_enabled()
    for loss in losses:
        assert loss.requires_grad
        torch.testing.assert_close(loss.detach(), sum((p.detach() ** 3).sum() for p in params_of(plain)))
        for p in params_of(plain):
            p.grad = 3 * p.detach() ** 2
        plain.step()
    assert_same(optimizer, plain, rtol=1e-6, atol=1e-7)


@EVERY
def test_a_closure_that_fails_changes_nothing(make):
    optimizer = train(make(leaves()), 1)
    before = everything(optimizer)

    def closure():
        raise KeyError("no batch")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("name", [None, "closure"])
def test_a_closure_may_add_a_hook_to_the_step_it_is_in(name):
    optimizer, ran = fusedadam.AdamW(leaves()), []

    def closure():
        optimizer.register_step_post_hook(lambda *_: ran.append("after"))
        return 1.0

    assert (optimizer.step(closure) if name is None else optimizer.step(**{name: closure})) == 1.0
    assert ran == ["after"]


def test_a_hook_before_a_step_may_replace_its_arguments():
    optimizer = PLAIN["AdamW"](leaves())
    handle = optimizer.register_step_pre_hook(lambda own, args, kwargs: ((own, lambda: 7.0), {}))
    assert optimizer.step() == 7.0
    handle.remove()
    assert optimizer.step() is None


def test_a_hook_after_a_load_sees_what_was_loaded_in_its_own_dtype():
    """torch has cast states to the parameter's dtype when user's hooks run; ours put them right before."""
    seen = []
    optimizer = PLAIN["AdamW"](leaves(dtypes=[BF16]))
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.extend(v.dtype for s in o.state.values() for v in s.values())
    )
    optimizer.load_state_dict(train(PLAIN["AdamW"](leaves(dtypes=[BF16]), state_dtype=F32), 1).state_dict())
    assert set(seen) == {F32}


# options, groups, gradients that are not always there

OTHER_VALUES = {
    "lr": 0.3, "betas": (0.5, 0.7), "eps": 1e-2, "weight_decay": 0.7, "amsgrad": True, "maximize": True,
    "cautious": True, "update_clipping": True, "peak_lr": 0.1,
    "max_grad_norm": 0.2, "ema_decay": 0.3, "ema_warmup": False, "decoupled": False, "bias_correction": False,
    "decoupled_weight_decay": True,
    "delta": 3.0, "wd_ratio": 0.9, "nesterov": True, "warmup": 0.9, "t_total": 7, "schedule": "warmup_cosine",
    "b1": 0.5, "b2": 0.7, "e": 1e-2, "clip": "all", "storage": "16bit", "seed": 7,
}  # fmt: skip
# for the option to make a difference soon
BESIDES = {"schedule": {"warmup": -1}, "amsgrad": {"betas": (0.9, 0.2)}, "seed": {"storage": "16bit"}}
BESIDES["decoupled_weight_decay"] = {"decoupled_weight_decay": False}
WITHOUT_RESULT = {"foreach", "fused", "capturable", "differentiable", "state_dtype", "ema_dtype", "backend"}
WITHOUT_RESULT |= {"skip_nonfinite", "offload"}  # with gradients that are finite; wherever states are
OPTIONS = [
    pytest.param(make, option, id=f"{name}-{option}")
    for name, make in PLAIN.items()
    for option in make(leaves()).defaults
    if option not in WITHOUT_RESULT
]


@pytest.mark.parametrize(("make", "option"), OPTIONS)
def test_every_option_may_change_between_steps(make, option):
    """It counts from the next step on, as if the optimizer had been made with it; and it makes a difference."""
    # eagerly: every flag would be another kernel to compile
    value, make = OTHER_VALUES[option], functools.partial(make, **BESIDES.get(option, {}), backend="eager")
    value = not make.keywords[option] if isinstance(make.keywords.get(option), bool) else value
    changed, unchanged = train(make(leaves()), 2), train(make(leaves()), 4)
    again = make(copies_of(changed), **{option: value})
    state = copy.deepcopy(changed.state_dict())
    for group in state["param_groups"]:
        group.pop(option)
        if option == "decoupled":
            del group["decoupled_weight_decay"]  # the same, for torch
    again.load_state_dict(state)
    changed.param_groups[0][option] = value
    for optimizer in (changed, again):
        train(optimizer, 2, start=2)
    assert_same([p.detach() for p in params_of(changed)], [p.detach() for p in params_of(again)])
    results = [params_of(o) + [s.get("ema_params") for s in o.state.values()] for o in (changed, unchanged)]
    assert any(a is not None and not torch.equal(a, b) for a, b in zip(*results, strict=True)), "nothing has changed"


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES)), min_size=1, max_size=7),
    st.sampled_from([*PLAIN]),
)
def test_gradients_now_and_then_are_each_parameters_own_affair(schedule, name):
    """Together in one optimizer, or each in one of its own that steps only with a gradient: the same bits."""
    together, alone = PLAIN[name](leaves()), [PLAIN[name]([p]) for p in leaves()]
    for step, present in enumerate(schedule):
        set_grads(params_of(together), step)
        for p, optimizer, there in zip(params_of(together), alone, present, strict=True):
            (own,) = params_of(optimizer)
            own.grad = p.grad.clone()
            if there:
                optimizer.step()
            else:
                p.grad = None
        together.step()
    states = [state for optimizer in alone for state in tensors(optimizer)[1]]
    assert_same(tensors(together), ([params_of(o)[0].detach() for o in alone], states))


@EVERY
def test_named_parameters_give_the_bits_of_unnamed_ones_and_keep_their_names(make):
    names = [f"layer.{k}" for k in range(len(SHAPES))]
    named, unnamed = make(list(zip(names, leaves(), strict=True))), make(leaves())
    assert_same(train(named, 3), train(unnamed, 3))
    saved = named.state_dict()
    assert saved["param_groups"][0]["param_names"] == names
    again = make(list(zip(names, leaves(), strict=True)))
    again.load_state_dict(saved)
    assert again.param_groups[0]["param_names"] == names
    again.add_param_group({"params": [("later", torch.nn.Parameter(torch.ones(2)))]})
    assert again.param_groups[1]["param_names"] == ["later"]


@EVERY
def test_its_representation_is_torchs_with_every_option(make):
    optimizer = make(leaves())
    lines = repr(optimizer).splitlines()
    assert lines[0] == f"{type(optimizer).__name__} ("
    assert lines[1] == "Parameter Group 0"
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    assert options.keys() >= optimizer.defaults.keys()
    assert lines[2:-3] == [f"    {name}: {options[name]}" for name in sorted(options)]
    assert lines[-3:] == ["Device: cpu (served by numba)", "State: none yet", ")"]
    assert "0 bytes of state" in optimizer.memory_summary()


@EVERY
def test_it_can_be_rebuilt_from_its_defaults(make):
    optimizer = make(leaves())
    again = type(optimizer)(leaves(), **optimizer.defaults)
    assert again.defaults == optimizer.defaults
    assert_same(train(again, 3), train(optimizer, 3))


@EVERY
def test_how_parameters_are_grouped_changes_no_bit(make):
    if make.keywords.get("clip") == "group":
        pytest.skip("the group is what is summed over")
    assert_same(train(make([{"params": [p]} for p in leaves()]), 3), train(make(leaves()), 3))


# parameters


@pytest.mark.parametrize("gradient", ["stays", "goes"])
def test_a_parameter_that_is_frozen_later_does_what_it_does_in_torch(gradient):
    """Whether it requires a gradient is not asked: only whether it has one."""
    results = []
    for make in (fusedadam.AdamW, torch.optim.AdamW):
        optimizer = train(make(leaves(dtypes=[F64]), lr=0.05), 2)
        frozen = params_of(optimizer)[0].requires_grad_(False)
        if gradient == "goes":
            frozen.grad = None
        optimizer.step()
        frozen.requires_grad_(True)
        results.append(train(optimizer, 1, start=2))
    assert_same(*results, rtol=1e-10, atol=1e-12)
    assert results[0].state[params_of(results[0])[0]]["step"] == (4 if gradient == "stays" else 3)


def other_layout(optimizer):
    p = params_of(optimizer)[0]
    p.grad, p.data = None, p.data.t().contiguous().t()


def share_memory(optimizer):
    for p in params_of(optimizer):
        p.grad = None
        p.data.share_memory_()
        for value in optimizer.state[p].values():
            value.share_memory_()


def into_one_buffer(optimizer):
    """As flattening does: every parameter becomes a view."""
    flat = torch.cat([p.detach().reshape(-1) for p in params_of(optimizer)])
    parts = flat.split([p.numel() for p in params_of(optimizer)])
    for p, part in zip(params_of(optimizer), parts, strict=True):
        p.grad, p.data = None, part.view(p.shape)


MOVES = [other_layout, share_memory, into_one_buffer]


@EVERY
@pytest.mark.parametrize("move", MOVES, ids=lambda f: f.__name__)
def test_parameters_that_move_between_steps_change_no_bit(make, move):
    """No address, layout or storage is taken for granted: test_base.py has more. Row sums are added in another order
    for another layout."""
    moved, still = train(make(leaves()), 2), train(make(leaves()), 5)
    for step in range(2, 5):
        move(moved)
        train(moved, 1, start=step)
    if move is other_layout:
        assert_same(moved, still, rtol=1e-6, atol=1e-7, check_stride=False)
    else:
        assert_same(moved, still)


@EVERY_PLAIN
def test_several_dtypes_in_one_group_are_as_good_as_one_group_each(make):
    dtypes, make = (BF16, F32, F16, F64), functools.partial(make, backend="eager")  # or each would be compiled
    together, alone = make(leaves(dtypes=dtypes)), make([{"params": [p]} for p in leaves(dtypes=dtypes)])
    assert_same(train(together, 4), train(alone, 4))
    for k, dtype in enumerate(dtypes):
        single = make([leaves(dtypes=dtypes)[k]])
        for step in range(4):
            others = leaves(dtypes=dtypes)
            set_grads(others, step)
            params_of(single)[0].grad = others[k].grad
            single.step()
        assert params_of(single)[0].dtype == dtype
        assert torch.equal(params_of(single)[0], params_of(together)[k])


@EVERY
@pytest.mark.parametrize("default", [BF16, F64], ids=str)
def test_the_default_dtype_is_nobodys_business(make, default):
    """Counts in it would stand still at 256 under bfloat16, and scalars lose their digits."""
    expected = train(make(leaves()), 3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        optimizer = train(make(leaves()), 2)
        fusedadam.clip_grad_norm_(params_of(optimizer), 1e9)
        train(optimizer, 1, start=2)
        assert optimizer.grad_norm is None or optimizer.grad_norm.dtype == F32
        for state in optimizer.state.values():
            state["step"].fill_(300)
        counted = copy.deepcopy(optimizer)
        train(counted, 1)
    finally:
        torch.set_default_dtype(before)
    assert all(state["step"] == 301 for state in counted.state.values())
    for state in optimizer.state.values():
        state["step"].fill_(3)
    assert_same(optimizer, expected)


@EVERY
def test_the_default_device_is_nobodys_business(make):
    """Tables and counts are made on the host, or where the parameters are: never just anywhere."""
    params, others = leaves(), leaves()
    for k in range(2):
        set_grads(params, k)
        set_grads(others, k)
        grads = [p.grad for p in params]
    plain = make(others)
    plain.step()
    with torch.device("meta"):
        optimizer = make(params)
        fusedadam.clip_grad_norm_(params, 1e9)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
    assert_same(optimizer, plain)


def inference_leaves():
    params = leaves()
    with torch.inference_mode():
        return [torch.nn.Parameter(p.clone()) for p in params]


@EVERY_PLAIN
@pytest.mark.parametrize("inside", [True, False])
def test_inference_tensors_are_updated_as_torchs_fused_step_does(make, inside):
    """They have no version to count up. torch's fused step takes them inside and outside of inference mode."""
    optimizer, plain = make(inference_leaves()), make(leaves())
    assert params_of(optimizer)[0].is_inference()
    for step in range(3):
        set_grads(params_of(plain), step)
        for p, q in zip(params_of(optimizer), params_of(plain), strict=True):
            with torch.inference_mode():
                p.grad = q.grad.clone()
        with torch.inference_mode(inside):
            optimizer.step()
        plain.step()
    assert_same(optimizer, plain)


def test_torchs_fused_step_takes_inference_tensors():
    for inside in (True, False):
        (param, *_) = inference_leaves()
        before = param.detach().clone()
        with torch.inference_mode():
            param.grad = torch.ones_like(param)
        with torch.inference_mode(inside):
            torch.optim.AdamW([param], fused=True).step()
        assert not torch.equal(param, before)


# nothing grows


def trainer(kind):
    """A step that may be repeated, with new gradients at new addresses each time: those of the last are alive."""
    model = torch.nn.Linear(4, 4, bias=kind != "in backward")  # where every parameter is a step of its own
    if kind == "in backward":
        optimizer = fusedadam.step_in_backward(model, PLAIN["AdamP"])
    else:
        optimizer = MAKERS.get(kind, MAKERS["AdamW"])(model.parameters())
    if kind == "a tensor lr":
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
    x, params, kept = torch.ones(2, 4), list(model.parameters()), []
    left_out = itertools.cycle(params)
    scale, found_inf = torch.tensor(8.0), torch.tensor(0.0)

    def step():
        if kind == "in backward":
            model(x).sum().backward()
        else:
            for p in params:
                p.grad = torch.full_like(p, 0.5)
        if kind == "other parameters in every step":  # and another plan
            next(left_out).grad = None
        kept[:] = [p.grad for p in params]
        if kind == "clip_grad_norm_":
            fusedadam.clip_grad_norm_(params, 1.0)
        if kind == "scaled":
            optimizer.grad_scale, optimizer.found_inf = scale, found_inf
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


KINDS = ["AdamP clipped", "BertAdam by group", "EmaAdamW clipped"]
KINDS += ["in backward", "clip_grad_norm_", "scaled", "a tensor lr", "other parameters in every step"]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_and_memory_are_flat_over_hundreds_of_steps(kind):
    """Nothing may be kept by address or by id: there are new ones in every step."""
    step = trainer(kind)

    def run(count):
        for _ in range(count):
            step()
        gc.collect()
        return len(gc.get_objects()), sys.getallocatedblocks()

    run(20)
    objects, blocks = run(20)
    more_objects, more_blocks = run(300)
    assert more_objects - objects < 50
    assert more_blocks - blocks < 200  # one a step would be 300


def test_a_thousand_groups_are_faster_than_torchs_fused_ones():
    """One launch for all: torch has one for each group, which once took 58 ms for 465 of them."""

    def made(make, **options):
        params = [torch.nn.Parameter(torch.ones(16)) for _ in range(1000)]
        for p in params:
            p.grad = torch.ones(16)
        return make([{"params": [p], "lr": 1e-3 * (k % 7)} for k, p in enumerate(params)], **options)

    ours, theirs = made(fusedadam.AdamW), made(torch.optim.AdamW, fused=True)
    times = {ours: [], theirs: []}
    for _ in range(6):  # of processor time, in turns: whatever else the machine does meets both
        for optimizer, taken in times.items():
            start = time.process_time()
            optimizer.step()
            taken.append(time.process_time() - start)
    assert min(times[ours][1:]) < min(times[theirs][1:])


WITHOUT_A_COMPILER = """
import shutil, sys, warnings
warnings.simplefilter("error")
assert not any(map(shutil.which, ("cc", "gcc", "clang", "c++", "ld")))
import torch, fusedadam
params = [torch.nn.Parameter(torch.ones(3, 4))]
for make in (fusedadam.AdamW, fusedadam.AdamP, fusedadam.EmaAdamW, fusedadam.BertAdam):
    optimizer = make(params)
    params[0].grad = torch.ones(3, 4)
    optimizer.step()
    assert not optimizer._stepper.last_plan.launches[0].needs_tensors, "eagerly"
print((params[0] < 1).all().item())
"""


def test_a_cpu_needs_no_compiler(tmp_path):
    """Extensions that are built at run time fail on machines without one."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER],
        env={**environment, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_a_profiler_sees_every_step():
    """Also in the middle of training: outside a profiler, steps leave no record."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = fusedadam.AdamW([param])

    def step():
        param.grad = torch.ones(3)
        optimizer.step()

    step()
    with torch.autograd.profiler.profile() as profile:
        step()
        step()
    step()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#AdamW.step"] == 2
