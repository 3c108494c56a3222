"""torch's contract: whatever a script does with torch.optim it can do here, and gets the same result.

In exact arithmetic EmaAdamW moves the parameters as AdamW does, so all three classes have a twin in torch.
"""

import copy

import pytest
import torch

import fusedadam
from fusedadam.engine.changes import snapshot
from tests.contract.common import leaves, set_grads, tensors, train
from tests.support import F64, LR_OF_ONE_DIMENSION

AdamW, Adam, EmaAdamW = fusedadam.AdamW, fusedadam.Adam, fusedadam.EmaAdamW
TWIN = {AdamW: torch.optim.AdamW, Adam: torch.optim.Adam, EmaAdamW: torch.optim.AdamW}
EVERY = pytest.mark.parametrize("cls", TWIN)
WITH_FLAGS = pytest.mark.parametrize("cls", [AdamW, Adam])
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}
SHAPES = [(3, 2), (5,), ()]


class Twins:
    """The same parameters and gradients under an optimizer of ours and its twin in torch."""

    def __init__(self, cls, arrange=lambda params: params, **options):
        self.params = leaves(SHAPES, [F64]), leaves(SHAPES, [F64])
        makers = cls, TWIN[cls]
        options = OPTIONS | options
        self.both = [make(arrange(own), **options) for make, own in zip(makers, self.params, strict=True)]
        self.done = 0

    def each(self, change):
        for optimizer, params in zip(self.both, self.params, strict=True):
            change(optimizer, params)

    def step(self, count):
        for _ in range(count):
            self.each(lambda _, params: set_grads(params, self.done))
            self.each(lambda optimizer, _: optimizer.step())
            self.done += 1
        (ours, our_states), theirs = map(tensors, self.both)
        shared = [{k: v for k, v in s.items() if k != "ema_params"} for s in our_states]
        torch.testing.assert_close((ours, shared), theirs, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=["numba", "numba, looking in plain Python", "eager"])
def backend(request, monkeypatch):
    """Every way in which a step notices that a tensor is not where it was."""
    name, *plain = request.param.split(",")
    if plain:
        monkeypatch.setattr(snapshot, "prepare_loop", lambda: None)
    return name


def arranged(own):
    """Groups that differ in everything that may differ."""
    return [
        {"params": own[:1], "lr": 0.2, "eps": 1e-3},
        {"params": own[1:2], "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"params": own[2:], "lr": torch.tensor(0.01, dtype=F64)},
    ]


@EVERY
def test_groups_have_their_own_options(cls):
    twins = Twins(cls, arrange=arranged)
    assert isinstance(twins.both[0], torch.optim.Optimizer)
    twins.step(4)


@WITH_FLAGS
def test_groups_have_their_own_flags(cls):
    flags = [{"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}]
    twins = Twins(cls, arrange=lambda own: [{"params": [p], **f} for p, f in zip(own, flags, strict=True)])
    twins.step(5)


def set_option(**options):
    return lambda optimizer, params: optimizer.param_groups[0].update(options)


def grow(optimizer, params):
    params.extend(leaves([(4,)], [F64], seed=9))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.3})


CHANGES = {
    "lr": set_option(lr=0.3),
    "betas": set_option(betas=(0.1, 0.2)),
    "weight_decay": set_option(weight_decay=0.0),
    "lr, now a tensor": set_option(lr=torch.tensor([0.25] if LR_OF_ONE_DIMENSION else 0.25, dtype=F64)),
    "add_param_group": grow,
    "state.clear": lambda optimizer, params: optimizer.state.clear(),
    "step": lambda optimizer, params: optimizer.state[params[0]]["step"].fill_(100),
    "a parameter taken out": lambda optimizer, params: optimizer.param_groups[0]["params"].pop(1),
    "zeroed in place": lambda optimizer, params: optimizer.state[params[0]]["exp_avg_sq"].zero_(),
}


@EVERY
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps_count_from_the_next_one(cls, change, backend):
    twins = Twins(cls)
    twins.both[0].param_groups[0]["backend"] = backend
    twins.step(2)
    twins.each(CHANGES[change])
    twins.step(3)


@WITH_FLAGS
def test_flags_may_change_between_steps(cls):
    twins = Twins(cls, amsgrad=True)
    for flags in ({"maximize": True}, {"amsgrad": False}, {"maximize": False}, {"amsgrad": True}):
        twins.each(set_option(**flags))
        twins.step(2)


@WITH_FLAGS
def test_amsgrad_may_begin_late(cls):
    """torch fails here for want of the running maximum; it begins at zero, as on the first step."""
    twins = Twins(cls)
    twins.step(2)
    for p in twins.params[1]:
        twins.both[1].state[p]["max_exp_avg_sq"] = torch.zeros_like(p)
    twins.each(set_option(amsgrad=True))
    twins.step(3)


def replace_data(optimizer, params):
    for p in params:
        p.grad, p.data = None, p.data.clone()


def relay_data(optimizer, params):
    params[0].grad, params[0].data = None, params[0].data.t().contiguous().t()


def spread_data(optimizer, params):
    params[0].grad, params[0].data = None, torch.stack([params[0].data] * 2, dim=-1)[..., 0]


def replace_states(optimizer, params):
    for state in optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items()})


KEPT = []


def replace_state_data(*names):
    """As code does that moves states to the host and back. The old memory lives on, so a mistake spoils nothing."""

    def replace_own(optimizer, params):
        for value in (state[name] for state in optimizer.state.values() for name in names):
            KEPT.append(value.data)
            value.data = value.data.clone()

    return replace_own


def relay_states(optimizer, params):
    state = optimizer.state[params[0]]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def swap_tensors(optimizer, params):
    """As converting a model does, where torch was told to swap; it refuses if anything in C++ holds the parameter."""
    for p in params:
        p.grad = None
        torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach().clone()))


MOVES = {f.__name__: f for f in (replace_data, relay_data, spread_data, replace_states, relay_states, swap_tensors)}
MOVES |= {"data of moments": replace_state_data("exp_avg", "exp_avg_sq"), "data of steps": replace_state_data("step")}


@EVERY
@pytest.mark.parametrize("move", MOVES)
def test_tensors_that_were_moved_or_replaced_are_simply_noticed(cls, move, backend):
    twins = Twins(cls)
    twins.both[0].param_groups[0]["backend"] = backend
    twins.step(2)
    for _ in range(2):
        twins.each(MOVES[move])
        twins.step(2)


def test_a_model_may_change_its_dtype_between_steps(backend):
    """torch fails here; expected is one step by hand, in float64, from what is stored."""
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), **OPTIONS, backend=backend)
    train(optimizer, 2)
    model.half()
    params, states = copy.deepcopy(tensors(optimizer))
    train(optimizer, 1, start=2)
    (beta1, beta2), lr = OPTIONS["betas"], OPTIONS["lr"]
    for p, old, state in zip(model.parameters(), params, states, strict=True):
        m = beta1 * state["exp_avg"].double() + (1 - beta1) * p.grad.double()
        v = beta2 * state["exp_avg_sq"].double() + (1 - beta2) * p.grad.double() ** 2
        update = m / (1 - beta1**3) / ((v / (1 - beta2**3)).sqrt() + 1e-8)
        expected = old.double() * (1 - lr * OPTIONS["weight_decay"]) - lr * update
        torch.testing.assert_close(p.detach().double(), expected, rtol=2**-11, atol=1e-7)
        assert (p.dtype, optimizer.state[p]["exp_avg"].dtype) == (torch.float16, torch.float32)


def fit(optimizer_of):
    """A model that steps inside of backward, one optimizer for each parameter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    own = {p: optimizer_of([p], **OPTIONS) for p in model.parameters()}

    def step(p):
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        model(torch.ones(2, 3, dtype=F64)).square().sum().backward()
    return [p.detach() for p in own]


@EVERY
def test_it_may_step_inside_of_backward(cls):
    torch.testing.assert_close(fit(cls), fit(TWIN[cls]), rtol=1e-10, atol=1e-12)


LAYOUTS = {
    "0-d": lambda t: t[0, 0, 0, 0].clone(),
    "empty": lambda t: t[:0],
    "size 1": lambda t: t[:1, :1, :1, :1].clone(),
    "a row": lambda t: t[:1].clone(),
    "contiguous": lambda t: t.clone(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "every other column": lambda t: torch.cat([t, t], dim=1)[:, ::2],
    "in a buffer": lambda t: torch.cat([t.reshape(-1)] * 2)[1 : 1 + t.numel()].view(t.shape),
}
BACK = {n: tuple(reversed(range(n))) for n in range(5)}
GRADS = {
    "as it is": lambda g: g,
    "contiguous": lambda g: g.contiguous(),
    "reversed": lambda g: g.permute(BACK[g.dim()]).contiguous().permute(BACK[g.dim()]),
    "expanded": lambda g: g.reshape(-1)[:1].sum().expand(g.shape),
    "strided": lambda g: torch.stack([g, g], dim=-1)[..., 0],
    "negative": lambda g: torch._neg_view(g.clone()),
    "imaginary": lambda g: torch.complex(g, g + 1).conj().imag,
}


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_parameter_and_gradient_equals_torch(layout, grad, backend):
    values = torch.randn(4, 2, 3, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    results = []
    for make in (AdamW, torch.optim.AdamW):
        param = torch.nn.Parameter(LAYOUTS[layout](values))
        optimizer = make([param], **OPTIONS)
        optimizer.param_groups[0]["backend"] = backend
        for k in range(3):
            param.grad = GRADS[grad](param.detach() * (k - 0.5) + 1)
            before = param.grad.clone()
            optimizer.step()
            assert torch.equal(param.grad, before)
        results.append((param.detach(), param.stride(), optimizer.state[param]["exp_avg_sq"]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
