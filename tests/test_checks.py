"""Bad input is refused with torch's type of error, by name, and afterwards everything is bit for bit as it was."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedadam
from fusedadam import backends, functional

CLASSES = [fusedadam.AdamW, fusedadam.Adam, fusedadam.EmaAdamW]
ADAM = [fusedadam.AdamW, fusedadam.Adam]
EMA = [fusedadam.EmaAdamW]
ALLOWED = r"must|use |leave|exclude|convert|first|not support|needs a|pass a|give"  # how a message says what is allowed

KINDS = [("0.1", TypeError), (None, TypeError), (True, TypeError), ([0.1], TypeError), (1j, TypeError)]
VALUES = [(-1.0, ValueError), (math.nan, ValueError), (math.inf, ValueError), (torch.ones(2), ValueError)]
PAIRS = [(None, TypeError), (0.9, TypeError), ("ab", TypeError), (True, TypeError), ((0.9,), ValueError)]
PAIRS += [((), ValueError), ((0.9, 0.99, 0.999), ValueError), ((1.0, 0.9), ValueError), ((0.9, 1.0), ValueError)]
PAIRS += [((-0.1, 0.9), ValueError), ((0.9, math.nan), ValueError), (("0.9", 0.9), TypeError), ((0.9, None), TypeError)]
FLAGS = [(None, TypeError), ("yes", TypeError), (0.5, TypeError)]
DTYPES = [("float31", TypeError), (32, TypeError), (torch.int8, ValueError), (torch.complex64, ValueError)]
TORCH_FLAGS = [("yes", TypeError), (0.5, TypeError)]
REFUSED = (
    [(CLASSES, name, case) for name in ("lr", "eps", "weight_decay") for case in KINDS + VALUES]
    + [(CLASSES, "betas", case) for case in PAIRS]
    + [(EMA, "ema_decay", case) for case in [*KINDS, *VALUES, (1.001, ValueError)]]
    + [(EMA, name, case) for name in ("ema_warmup", "decoupled", "bias_correction") for case in FLAGS]
    + [(ADAM, name, case) for name in ("amsgrad", "maximize") for case in FLAGS]
    + [(CLASSES, name, case) for name in ("foreach", "fused") for case in TORCH_FLAGS]
    + [(CLASSES, "differentiable", case) for case in [*FLAGS, (True, RuntimeError)]]
    + [(CLASSES, "capturable", case) for case in FLAGS]
    + [(CLASSES, "state_dtype", case) for case in DTYPES]
    + [(EMA, "ema_dtype", case) for case in DTYPES]
    + [([fusedadam.BertAdam], "clip", ("norm", ValueError))]
    + [(CLASSES, "backend", case) for case in [("cuda", ValueError), ("", ValueError), ("Numba", ValueError)]]
)
OPTIONS = [
    pytest.param(cls, name, value, error, id=f"{cls.__name__}-{name}={value!r}")
    for classes, name, (value, error) in REFUSED
    for cls in classes
]


def readable(value):
    return getattr(value, "__name__", None) or repr(value)


def leaf(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.arange(1.0, 1 + math.prod(shape)).reshape(shape).to(dtype))


def bits(value):
    """What a tensor holds and where, to the bit; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type == "meta":
        return value
    held = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return value.data_ptr(), value.dtype, value.shape, value.stride(), value._version, bytes(held.tolist())


def everything(optimizer):
    """All that an error must leave alone: parameters, gradients, states and options."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = {id(p): {k: bits(v) for k, v in state.items()} for p, state in optimizer.state.items()}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [(bits(p), bits(p.grad)) for p in params], states, copy.deepcopy(options)


def refused(error, name, attempt, value=None):
    with pytest.raises(error, match=ALLOWED) as caught:
        attempt()
    assert name in str(caught.value)
    if isinstance(value, (str, float, tuple)):
        assert any(repr(v) in str(caught.value) for v in (value, *(value if isinstance(value, tuple) else ())))


@pytest.mark.parametrize(("cls", "name", "value", "error"), OPTIONS)
def test_a_bad_option_is_refused_through_every_door_and_leaves_no_trace(cls, name, value, error):
    first, second, third = leaf(2), leaf(3), leaf(4)
    refused(error, name, lambda: cls([first], **{name: value}), value)
    groups = [{"params": [first]}, {"params": [second], name: value}]
    before = [dict(group) for group in groups]
    refused(error, name, lambda: cls(groups), value)
    optimizer = cls([third])
    known = everything(optimizer)
    refused(error, name, lambda: optimizer.add_param_group(groups[1]), value)
    assert everything(optimizer) == known
    for group, old in zip(groups, before, strict=True):
        assert list(group) == list(old)
        assert all(group[key] is old[key] for key in old)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_bad_default_is_refused_even_where_every_group_has_its_own(cls):
    """torch checks the defaults themselves; a later add_param_group would fall back on them."""
    refused(ValueError, "lr", lambda: cls([{"params": [leaf(2)], "lr": 0.1}], lr=-1.0))


@settings(max_examples=50, deadline=None)
@given(st.floats(), st.sampled_from(CLASSES), st.sampled_from(["lr", "eps", "weight_decay", "betas"]))
def test_exactly_the_finite_numbers_in_range_are_accepted(number, cls, name):
    in_range = 0 <= number < (1 if name == "betas" else math.inf)
    attempt = lambda: cls([leaf(2)], **{name: (number, 0.5) if name == "betas" else number})  # noqa: E731
    if in_range:
        attempt()
    else:
        refused(ValueError, name, attempt)


@pytest.mark.parametrize("cls", CLASSES)
def test_foreach_and_fused_exclude_each_other(cls):
    refused(RuntimeError, "foreach", lambda: cls([leaf(2)], foreach=True, fused=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_a_backend_that_cannot_serve_raises_and_says_what_can(cls, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused(RuntimeError, "backend='triton'", lambda: cls([leaf(2)], backend="triton"))
    roles = [torch.ones(2) for _ in range(4)]
    refused(RuntimeError, "backend='triton'", lambda: functional.adamw_(*roles, step=1, backend="triton"))
    monkeypatch.setattr(backends, "_installed", lambda name: name == "eager")
    with pytest.raises(RuntimeError, match=r"backend='numba'.*pip install numba"):
        cls([leaf(2)], backend="numba")


PARAMETERS = {
    "integer": (lambda: torch.arange(3), RuntimeError, "dtype"),
    "bool": (lambda: torch.tensor([True]), RuntimeError, "dtype"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), RuntimeError, "dtype"),
    "float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), RuntimeError, "dtype"),
    "meta": (lambda: torch.nn.Parameter(torch.ones(2, device="meta")), RuntimeError, "meta"),
    "sparse": (lambda: torch.nn.Parameter(torch.ones(2).to_sparse()), RuntimeError, "sparse"),
    "expanded": (lambda: torch.ones(1).expand(3).requires_grad_(), RuntimeError, "share memory"),
    "overlapping": (lambda: torch.ones(4).as_strided((3, 2), (1, 1)).requires_grad_(), RuntimeError, "share memory"),
    "non-leaf": (lambda: leaf(2) * 2, ValueError, "non-leaf"),
    "not a tensor": (lambda: 1.0, TypeError, "Tensors"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantiz.*")
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_parameter_that_cannot_be_updated_is_refused(cls, kind):
    make, error, word = PARAMETERS[kind]
    bad, good = make(), leaf(2)
    group = {"params": [good, bad]}
    for attempt in (lambda: cls([good, bad]), lambda: cls([group])):
        with pytest.raises(error, match=word):
            attempt()
    optimizer = cls([leaf(3)])
    known = everything(optimizer)
    with pytest.raises(error, match=word):
        optimizer.add_param_group(group)
    assert everything(optimizer) == known
    assert list(group) == ["params"]
    assert len(group["params"]) == 2
    assert group["params"][1] is bad


@pytest.mark.parametrize("cls", CLASSES)
def test_parameter_lists_are_refused_as_in_torch(cls):
    shared = leaf(2)
    with pytest.raises(ValueError, match="empty parameter list"):
        cls([])
    with pytest.raises(TypeError, match="iterable"):
        cls(shared)
    with pytest.raises(TypeError, match="ordered collections"):
        cls([{"params": {shared}}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        cls([{"params": [shared]}, {"params": [shared]}])


@pytest.mark.parametrize("cls", CLASSES)
def test_a_parameter_listed_twice_in_a_group_is_refused(cls):
    """torch warns that this will be an error. Two entries once made two sets of states, one freed under the kernel."""
    param = leaf(3)
    groups = [{"params": [param, param], "lr": 0.1}]
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(ValueError, match="twice"):
        cls(groups)
    assert groups == [{"params": [param, param], "lr": 0.1}]


def sparse_grad(optimizer, param):
    param.grad = param.detach().to_sparse()


def wrong_shape_of_state(optimizer, param):
    optimizer.state[param]["exp_avg_sq"] = torch.zeros(7)


def integer_state(optimizer, param):
    optimizer.state[param]["exp_avg"] = torch.zeros(param.shape, dtype=torch.int64)


def state_that_is_no_tensor(optimizer, param):
    optimizer.state[param]["exp_avg"] = [0.0]


def step_that_is_no_number(optimizer, param):
    optimizer.state[param]["step"] = torch.zeros(2)


def expanded_param(optimizer, param):
    old, param.data = param.data, torch.ones(64)[:1].expand(2, 3)
    return old


def param_of_another_shape(optimizer, param):
    old, param.grad, param.data = (param.data, param.grad), None, torch.ones(64)[:4]
    param.grad = torch.ones(64)[:4]
    return old


def lr_that_is_no_number(optimizer, param):
    optimizer.param_groups[0]["lr"] = None


def one_beta(optimizer, param):
    optimizer.param_groups[0]["betas"] = (0.9,)


BREAKS = {
    sparse_grad: "sparse",
    wrong_shape_of_state: "exp_avg_sq",
    integer_state: "exp_avg",
    state_that_is_no_tensor: "exp_avg",
    step_that_is_no_number: ".",
    expanded_param: "share memory",
    param_of_another_shape: "exp_avg",
    lr_that_is_no_number: ".",
    one_beta: ".",
}


@pytest.mark.parametrize("backend", ["numba", "eager"])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("done", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("damage", BREAKS, ids=lambda f: f.__name__)
def test_a_step_that_fails_has_done_nothing_however_often_it_is_tried(cls, damage, done, backend):
    """A refused step once left its comparison with the last good one behind, and the next try ran on a stale table."""
    if damage is param_of_another_shape and not done:
        pytest.skip("there is no state yet that it could differ from")
    params = [leaf(4), leaf(2, 3), leaf(5)]
    optimizer = cls(params, lr=0.1, backend=backend)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(done):
        optimizer.step()
    kept = damage(optimizer, params[1])  # what was replaced lives on: a step that is not refused spoils nobody's memory
    before = everything(optimizer)
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError), match=BREAKS[damage]):
            optimizer.step()
        assert everything(optimizer) == before
    del kept


COMMON = ("param", "grad", "exp_avg", "exp_avg_sq")
ROLES = {
    functional.adamw_: (*COMMON, "max_exp_avg_sq"),
    functional.ema_adam_: (*COMMON, "ema"),
}
OPERATORS = pytest.mark.parametrize("operator", ROLES, ids=lambda f: f.__name__)
NUMBERS = ("lr", "eps", "weight_decay", "beta1", "beta2")


def operands(operator, many=False):
    make = lambda: torch.ones(2, 3)  # noqa: E731
    extra = {"amsgrad": True} if operator is functional.adamw_ else {}
    return {role: [make(), make()] if many else make() for role in ROLES[operator]} | {"step": 1} | extra


def refused_untouched(error, name, operator, arguments):
    tensors = [t for v in arguments.values() for t in (v if isinstance(v, list) else [v])]
    before = [bits(t) for t in tensors]
    refused(error, name, lambda: operator(**arguments))
    assert all(new is old or new == old for new, old in zip(map(bits, tensors), before, strict=True))


TENSORS = {
    "shape": (lambda: torch.ones(3, 2), RuntimeError),
    "dtype": (lambda: torch.ones(2, 3, dtype=torch.int32), RuntimeError),
    "sparse": (lambda: torch.ones(2, 3).to_sparse(), RuntimeError),
    "meta": (lambda: torch.ones(2, 3, device="meta"), RuntimeError),
    "expanded": (lambda: torch.ones(3).expand(2, 3), RuntimeError),
    "a list": (lambda: [torch.ones(2, 3)], ValueError),
    "a number": (lambda: 1.0, TypeError),
    "None": (lambda: None, (TypeError, ValueError)),
}


@OPERATORS
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("kind", TENSORS)
def test_operators_refuse_tensors_that_do_not_fit(operator, place, kind):
    role, (make, error) = ROLES[operator][place], TENSORS[kind]
    if kind == "expanded" and role == "grad":
        return  # it is only read
    name = {("shape", "param"): "shape", ("a list", "param"): "param"}.get((kind, role), role)
    refused_untouched(error, name, operator, operands(operator) | {role: make()})


@OPERATORS
@pytest.mark.parametrize("place", range(5))
def test_operators_refuse_lists_that_do_not_fit(operator, place):
    role = ROLES[operator][place]
    name = "list" if role == "param" else role
    refused_untouched(ValueError, name, operator, operands(operator, many=True) | {role: [torch.ones(2, 3)]})
    bad = [torch.ones(2, 3), torch.ones(2, 3).to_sparse()]
    refused_untouched(RuntimeError, f"{role}[1]", operator, operands(operator, many=True) | {role: bad})


def overlapping(kind):
    block = torch.ones(5, 3)
    return {"same": (block[:2], block[:2]), "partly": (block[:2], block[1:3])}[kind]


@OPERATORS
@pytest.mark.parametrize("kind", ["same", "partly"])
@pytest.mark.parametrize("place", range(1, 5))
def test_operators_refuse_memory_that_two_roles_share(operator, kind, place):
    """Comparing where tensors begin is not enough."""
    role, (first, second) = ROLES[operator][place], overlapping(kind)
    refused_untouched(RuntimeError, role, operator, operands(operator) | {"param": first, role: second})


@OPERATORS
@pytest.mark.parametrize("kind", ["same", "partly"])
@pytest.mark.parametrize("place", [0, 2, 3, 4])
def test_operators_refuse_a_list_whose_tensors_share_memory(operator, kind, place):
    role = ROLES[operator][place]
    refused_untouched(RuntimeError, role, operator, operands(operator, many=True) | {role: list(overlapping(kind))})


@OPERATORS
def test_operators_take_neighbours_in_one_buffer_and_a_gradient_used_twice(operator):
    block, grad = torch.ones(8, 2, 3), torch.ones(2, 3)
    arguments = operands(operator, many=True) | {"grad": [grad, grad]}
    written = [role for role in ROLES[operator] if role != "grad"]
    operator(**arguments | {role: [block[2 * k], block[2 * k + 1]] for k, role in enumerate(written)})


STEPS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("1", TypeError), (None, TypeError)]
STEPS += [(torch.tensor(0), ValueError), (torch.tensor([-3]), ValueError), (torch.tensor(1.0), TypeError)]
STEPS += [(torch.tensor([1, 2]), TypeError), (torch.tensor(True), TypeError), (torch.tensor([]), TypeError)]


@OPERATORS
@pytest.mark.parametrize(("step", "error"), STEPS, ids=readable)
def test_operators_refuse_a_bad_step(operator, step, error):
    refused_untouched(error, "step", operator, operands(operator) | {"step": step})
    refused_untouched(error, "step", operator, operands(operator, many=True) | {"step": [1, step]})


@OPERATORS
def test_operators_refuse_too_few_or_too_many_steps(operator):
    for steps in ([], [1], [1, 2, 3]):
        refused_untouched(ValueError, "step", operator, operands(operator, many=True) | {"step": steps})


@OPERATORS
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(("value", "error"), KINDS + VALUES, ids=readable)
def test_operators_refuse_a_bad_number(operator, name, value, error):
    refused_untouched(error, name, operator, operands(operator) | {name: value})


EMA_OTHERS = [("mode", v, ValueError) for v in (2, -1)] + [("bias_correction", v, e) for v, e in FLAGS]
EMA_OTHERS += [("ema_decay", v, e) for v, e in [*KINDS, *VALUES, (1.001, ValueError)]]
ADAMW_OTHERS = [(name, v, e) for name in ("amsgrad", "maximize") for v, e in FLAGS]
OTHERS = [(functional.ema_adam_, *row) for row in [*EMA_OTHERS, ("backend", "cuda", ValueError)]]
OTHERS += [(functional.adamw_, *row) for row in [*ADAMW_OTHERS, ("backend", "cuda", ValueError)]]


@pytest.mark.parametrize(("operator", "name", "value", "error"), OTHERS, ids=readable)
def test_operators_refuse_their_own_bad_options(operator, name, value, error):
    refused_untouched(error, name, operator, operands(operator) | {name: value})


def test_adamw_with_amsgrad_needs_the_running_maximum():
    arguments = operands(functional.adamw_)
    del arguments["max_exp_avg_sq"]
    refused_untouched(ValueError, "max_exp_avg_sq", functional.adamw_, arguments)
