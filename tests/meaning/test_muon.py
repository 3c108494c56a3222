"""The formula of Muon, against one written out by hand in float64 and against torch's."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

from fusedadam import OPTIONS, SGD, FusedOptimizer, RowValue, Scalar, State, Value, Values, rule
from fusedadam.engine import products
from fusedadam.ops import orthogonalized, sqrt, sum_last, total
from fusedadam.optimizers.muon import Muon
from fusedadam.rules.newton_schulz import NAMED, NewtonSchulz, coefficients_of
from fusedadam.rules.orthogonal import orthogonalize
from tests.support import BF16, F32, F64

SHAPES = [(64, 64), (130, 70), (32, 200), (64, 64)]
KELLER = (3.4445, -4.7750, 2.0315)
BACKENDS = pytest.mark.parametrize("backend", ["numba", "eager"])
needs_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def by_hand(u, steps=5):
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / max(x.norm().item(), 1e-7)
    a, b, c = KELLER
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.T if u.shape[0] > u.shape[1] else x


def parameters(dtype=F64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=F64).to(dtype)) for s in shapes]


def train(optimizer, steps=4, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = (torch.randn(p.shape, generator=generator, dtype=F64) * scale).to(p.dtype)
        optimizer.step()
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


@BACKENDS
@pytest.mark.parametrize("several", [False, True], ids=["one group of launches", "several"])
def test_a_sum_over_all_parameters_is_known_before_products(backend, several, monkeypatch):
    """The sum needs a visit of all parameters, and batches with products visit theirs one after the other."""
    if several:
        monkeypatch.setattr(products, "SMALLEST_LIMIT", 0)

    def scalars(lr):
        return {"lr": lr}

    @rule(scalars=scalars)
    def by_norm(param: Value, grad: Value, momentum: Value, *, lr: Scalar) -> Values:
        norm = sqrt(total(grad * grad))
        momentum = momentum + grad
        param = param - lr * orthogonalized(momentum) * norm
        return param, momentum

    class ByNorm(FusedOptimizer):
        rule, states, options = by_norm, {"momentum": State()}, OPTIONS

        def __init__(self, params, lr=0.1, **common):
            super().__init__(params, lr=lr, **common)

    params, others = parameters(), [p.detach().clone() for p in parameters()]
    optimizer, momenta = ByNorm(params, backend=backend), [torch.zeros_like(p) for p in others]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=F64)
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        optimizer.step()
        for param, other, momentum in zip(params, others, momenta, strict=True):
            momentum += param.grad
            other -= 0.1 * by_hand(momentum) * norm
            torch.testing.assert_close(param.detach(), other, rtol=1e-9, atol=1e-9)


def test_a_convolution_is_refused_by_a_rule_with_other_rows():
    def scalars(lr):
        return {"lr": lr}

    @rule(scalars=scalars)
    def by_row(param: Value, grad: Value, row: RowValue, *, lr: Scalar) -> Values:
        update = orthogonalized(grad)
        row = row + sum_last(update * update)
        param = param - lr * update / row
        return param, row

    class ByRow(FusedOptimizer):
        rule, states, options = by_row, {"row": State()}, OPTIONS

        def __init__(self, params, lr=0.1, **common):
            super().__init__(params, lr=lr, **common)

    for shape in ((4, 6), (2, 4, 6)):
        train(ByRow(parameters(shapes=[shape])), steps=1)
    param = parameters(shapes=[(8, 4, 3, 3)])
    before = param[0].detach().clone()
    with pytest.raises(
        ValueError, match=r"shape \(8, 4, 3, 3\): orthogonalized\(\) sees 8 rows.*flatten all dimensions"
    ):
        train(ByRow(param), steps=1)
    assert torch.equal(param[0], before)


@BACKENDS
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_equals_the_formula_by_hand(nesterov, adjust, backend):
    ours = train(Muon(parameters(), lr=0.05, nesterov=nesterov, adjust_lr_fn=adjust, backend=backend))
    generator, weights = torch.Generator().manual_seed(1), [p.detach() for p in parameters()]
    buffers = [torch.zeros_like(w) for w in weights]
    for _ in range(4):
        for k, w in enumerate(weights):
            g = torch.randn(w.shape, generator=generator, dtype=F64)
            buffers[k] = 0.95 * buffers[k] + (1 - 0.95) * g
            u = 0.95 * buffers[k] + (1 - 0.95) * g if nesterov else buffers[k]
            m, n = w.shape
            scale = 0.2 * max(m, n) ** 0.5 if adjust else max(1, m / n) ** 0.5
            weights[k] = w * (1 - 0.05 * 0.1) - 0.05 * scale * by_hand(u)
    torch.testing.assert_close(ours, weights, rtol=1e-9, atol=1e-11)


@needs_torchs
@BACKENDS
def test_is_as_close_to_float64_as_torchs(backend):
    exact = train(Muon(parameters(), lr=0.05))
    for dtype in (F32, BF16):
        made = Muon(parameters(dtype), lr=0.05, backend=backend, state_dtype=dtype)
        ours, theirs = train(made), train(torch.optim.Muon(parameters(dtype), lr=0.05))
        for e, p, q in zip(exact, ours, theirs, strict=True):
            assert (p - e).norm() <= 1.2 * (q - e).norm()


@BACKENDS
@pytest.mark.parametrize("storage", [None, "8bit"])
def test_a_matrix_has_the_same_bits_in_any_company(storage, backend):
    together = train(Muon(parameters(F32), lr=0.05, backend=backend, storage=storage))
    apart = train(Muon([{"params": [p]} for p in parameters(F32)], lr=0.05, backend=backend, storage=storage))
    other = train(Muon(parameters(F32), lr=0.05, backend="eager", storage=storage))
    for a, b, c in zip(together, apart, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_stacks_and_convolutions():
    """Three dimensions are a stack of matrices; of four, each index of the first is a row."""
    stack = train(Muon(parameters(shapes=[(3, 8, 5)]), lr=0.05), steps=1)[0]
    flat = train(Muon(parameters(shapes=[(6, 2, 3, 3)]), lr=0.05), steps=1)[0]
    for result, shape, matrices in ((stack, (3, 8, 5), 3), (flat, (6, 2, 3, 3), 1)):
        start = parameters(shapes=[shape])[0].detach()
        g = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=F64)
        view = (matrices, -1, shape[-1]) if matrices > 1 else (1, shape[0], -1)
        u = (g * (0.95 * 0.05 + 0.05)).reshape(view)
        m, n = u.shape[1:]
        expected = start * (1 - 0.05 * 0.1) - 0.05 * max(1, m / n) ** 0.5 * torch.stack([*map(by_hand, u)]).view(shape)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


def test_zeros_stay_and_nan_stays_in_its_own_matrix():
    params = parameters(F32, [(8, 8)] * 3)
    before = [p.detach().clone() for p in params]
    optimizer = Muon(params, lr=0.1, weight_decay=0)
    for p, value in zip(params, (0.0, float("nan"), 1.0), strict=True):
        p.grad = torch.full_like(p, value)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert params[1].isnan().all()
    assert params[2].isfinite().all()


@needs_torchs
def test_state_dicts_go_to_torch_and_back():
    ours, theirs = (module(parameters(F32), lr=0.05) for module in (Muon, torch.optim.Muon))
    train(ours, 2)
    theirs.load_state_dict(ours.state_dict())
    again = Muon(parameters(F32), lr=0.05)
    again.load_state_dict(theirs.state_dict())
    for p, q in zip(ours.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
        assert torch.equal(ours.state[p]["momentum_buffer"], again.state[q]["momentum_buffer"])


def test_states_of_the_other_branch_are_refused():
    adamw, muon = (Muon([{"params": parameters(F32), "use_muon": use}]) for use in (False, True))
    train(adamw, 1)
    with pytest.raises(ValueError, match="has no 'momentum_buffer'"):
        muon.load_state_dict({**adamw.state_dict(), "param_groups": muon.state_dict()["param_groups"]})


def test_groups_have_the_defaults_of_their_branch():
    matrix, vector = parameters(F32, [(4, 4), (4,)])
    groups = Muon([{"params": [matrix], "use_muon": True}, {"params": [vector], "use_muon": False}]).param_groups
    assert [g["lr"] for g in groups] == [0.02, 3e-4]
    assert [g["weight_decay"] for g in groups] == [0, 0]
    assert [g["eps"] for g in groups] == [1e-7, 1e-10]
    assert Muon([{"params": [matrix], "use_muon": True}], lr=1e-3).param_groups[0]["lr"] == 1e-3
    assert Muon([matrix]).param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(("given", "lr"), [({}, 0.02), ({"lr": 1e-3}, 1e-3), ({"weight_decay": 0.1}, 0.02)])
def test_copies_know_which_arguments_were_given(copied, given, lr):
    """A group that says use_muon has defaults of its own, and what was given may equal the default."""
    original = Muon([torch.nn.Parameter(torch.ones(2, 3))], **given)
    for optimizer in (original, copied(original), copied(copied(original))):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 3))], "use_muon": True})
        group = optimizer.param_groups[-1]
        assert (group["lr"], group["weight_decay"]) == (lr, 0.1 if "weight_decay" in given else 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_steps": 100}, "ns_steps=100 must be an int from 0 to 99"),
        ({"ns_steps": -1}, "ns_steps=-1 must be an int from 0 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "not three numbers"),
        ({"ns_coefficients": "none"}, "ns_coefficients='none' is unknown"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn='other' is unknown"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(parameters(F32), **options)
    with pytest.raises(ValueError, match=r"shape \(4,\), and Muon takes matrices"):
        Muon(parameters(F32, [(4,)]))


@pytest.mark.parametrize(("name", "low", "high"), [("keller", 0.67, 1.16), ("polar-express", 0.98, 1.02)])
def test_singular_values_end_near_1(name, low, high):
    stack = torch.randn(2, 40, 90, generator=torch.Generator().manual_seed(0), dtype=F64)
    orthogonalize(stack, NewtonSchulz(coefficients_of(name, 6 if name != "keller" else 5)))
    values = torch.linalg.svdvals(stack)
    assert low < values.min()
    assert values.max() < high
    assert {*NAMED} == {"keller", "you", "polar-express"}
    assert coefficients_of("you", 7)[-3:] == (NAMED["you"][-1],) * 3


def test_vectors_are_refused_whenever_they_come():
    """The check was made when a group was added, and AdamW took them later."""
    vector = torch.nn.Parameter(torch.ones(3))
    vector.grad = torch.ones(3)
    optimizer = Muon([{"params": [vector], "use_muon": False}])
    optimizer.param_groups[0]["use_muon"] = True
    with pytest.raises(ValueError, match=r"shape \(3,\), and Muon takes matrices.*or write use_muon=None"):
        optimizer.step()
    assert torch.equal(vector, torch.ones(3))
    assert not optimizer.state


def test_a_group_is_the_callers_dict_and_has_the_defaults_of_its_branch_after_a_pickle_too():
    def group():
        return {"params": parameters(F32, SHAPES[:1]), "use_muon": True}

    mine = group()
    optimizer = pickle.loads(pickle.dumps(Muon([mine])))
    optimizer.add_param_group(group())
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.02]
    optimizer = Muon([mine])
    mine["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5
    refused = {**group(), "ns_steps": -1}
    before = [*refused]
    with pytest.raises(ValueError, match="ns_steps"):
        optimizer.add_param_group(refused)
    assert [*refused] == before


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_zeros_stay_zeros_whatever_eps(dtype):
    param = torch.nn.Parameter(torch.ones(4, 6, dtype=dtype))
    param.grad = torch.zeros_like(param)
    Muon([param], eps=0.0, weight_decay=0.0).step()
    assert torch.equal(param, torch.ones_like(param))


def test_buffers_of_sgd_are_refused_and_muons_by_sgd():
    """Of the same name, and ten times as large."""
    for cls in (torch.optim.SGD, SGD):
        saved = cls(parameters(F32, SHAPES[:1]), lr=0.1, momentum=0.9)
        train(saved, steps=1)
        with pytest.raises(ValueError, match="options of another optimizer than Muon"):
            Muon(parameters(F32, SHAPES[:1])).load_state_dict(saved.state_dict())
    saved = Muon(parameters(F32, SHAPES[:1]))
    train(saved, steps=1)
    with pytest.raises(ValueError, match="options of another optimizer than SGD"):
        SGD(parameters(F32, SHAPES[:1]), lr=0.1, momentum=0.9).load_state_dict(saved.state_dict())


class Chosen(Muon):
    method = NewtonSchulz()

    @classmethod
    def newton_schulz(cls, group):
        return cls.method


@pytest.mark.parametrize(
    ("method", "error", "says"),
    [
        ("polar-express", TypeError, "Chosen.newton_schulz(group) returned a str; it must return a fusedadam.New"),
        (((1.5, -0.5, 0.0),) * 5, TypeError, "returned a tuple"),
        (NewtonSchulz((3.4445, -4.775, 2.0315)), ValueError, "must have a triple (a, b, c) of numbers for each"),
        (NewtonSchulz(((1.5, -0.5),)), ValueError, "must have a triple"),
        (NewtonSchulz("keller"), ValueError, "must have a triple"),
        (NewtonSchulz(eps=-1e-9), ValueError, "eps at least 0"),
        (NewtonSchulz(eps=float("nan")), ValueError, "eps at least 0"),
        (NewtonSchulz(((float("inf"), 0.0, 0.0),)), ValueError, "coefficients must be finite"),
    ],
)  # fmt: skip
def test_iterations_of_ones_own_are_checked_before_anything_is_written(method, error, says, monkeypatch):
    param = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = Chosen([param])
    monkeypatch.setattr(Chosen, "method", method)
    optimizer.param_groups[0]["lr"] = 0.1
    param.grad = torch.ones_like(param)
    with pytest.raises(error, match=re.escape(says)):
        optimizer.step()
    assert not optimizer.state[param]
    assert param.eq(1).all()


@pytest.mark.parametrize("eps", [0.0, 1e-46])
def test_zeros_stay_zeros_whatever_eps_an_author_takes(eps, monkeypatch):
    """In float32, 1e-46 is 0."""
    monkeypatch.setattr(Chosen, "method", NewtonSchulz(eps=eps))
    param = torch.nn.Parameter(torch.ones(4, 6))
    param.grad = torch.zeros_like(param)
    Chosen([param], weight_decay=0.0).step()
    assert param.eq(1).all()


def test_iterations_may_be_lists(monkeypatch):
    """As configuration files have them."""
    found = []
    for method in (NewtonSchulz([[1.5, -0.5, 0], [2, -1.5, 0.5]]), NewtonSchulz(((1.5, -0.5, 0.0), (2.0, -1.5, 0.5)))):
        monkeypatch.setattr(Chosen, "method", method)
        param = torch.nn.Parameter(torch.eye(4, 6))
        optimizer = Chosen([param], lr=0.1)
        param.grad = torch.arange(24.0).view(4, 6)
        optimizer.step()
        found.append(param.detach())
    assert torch.equal(*found)
