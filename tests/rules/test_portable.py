"""exp, log, power and cos: how exact they are, and that their bits depend on no processor and no library."""

from __future__ import annotations

import ast
import decimal
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedadam
from fusedadam.catalog import CATALOG
from fusedadam.rules.ops import cos, exp, log, power
from tests.engine.test_device_scalars import EVERY_CASE
from tests.rules.test_tracing import STEPS

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, 1.0, 0.5, 2.0, 5e-324, 2.3e-308, 1.7e308, INF, NAN]
decimal.getcontext().prec = 60
PI = Decimal("3.141592653589793238462643383279502884197169399375105820974944592307816")


def exact_cos(x):
    x = abs(Decimal(x)) % (2 * PI)
    term, total, k = Decimal(1), Decimal(1), 0
    while abs(term) > Decimal(10) ** -50:
        k += 2
        term *= -x * x / (k * (k - 1))
        total += term
    return total


def ulps(found, exact):
    return float(abs(Decimal(found) - exact) / Decimal(math.ulp(float(exact))))


@settings(max_examples=300, deadline=None)
@given(st.floats(-745, 709) | st.floats(-1, 1))
def test_exp_is_within_two_ulps(x):
    assert ulps(exp(x), Decimal(x).exp()) <= 2


@settings(max_examples=300, deadline=None)
@given(st.floats(5e-324, 1.7e308) | st.floats(0.5, 2.0))
def test_log_is_within_an_ulp(x):
    assert ulps(log(x), Decimal(x).ln()) <= 1


@settings(max_examples=300, deadline=None)
@given(st.floats(1e-300, 1e300) | st.integers(1, 2**25), st.floats(-2, 2))
def test_power_is_within_two_ulps(x, y):
    exact = (Decimal(x).ln() * Decimal(y)).exp()
    if Decimal(2) ** -1022 < exact < Decimal(2) ** 1023:
        assert ulps(power(x, y), exact) <= 2


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e6, 1e6) | st.floats(-4, 4))
def test_cos_is_within_four_ulps(x):
    assert ulps(cos(x), exact_cos(x)) <= 4


@pytest.mark.parametrize("y", [*SPECIAL, -0.5, -2.0, -INF, 1e300, -1e300])
@pytest.mark.parametrize("x", SPECIAL)
def test_powers_of_special_values_are_those_of_c(x, y):
    try:
        expected = math.pow(x, y)
    except (OverflowError, ValueError):  # 0 to a negative power is an error in Python
        expected = INF
    assert power(x, y) == pytest.approx(expected, rel=1e-13, nan_ok=True)


def test_other_special_values():
    assert [exp(x) for x in (0.0, -0.0, INF, -INF, 710.0, -746.0)] == [1.0, 1.0, INF, 0.0, INF, 0.0]
    assert [log(x) for x in (1.0, 0.0, INF)] == [0.0, -INF, INF]
    assert [cos(x) for x in (0.0, -0.0)] == [1.0, 1.0]
    for function, x in ((exp, NAN), (log, NAN), (log, -1.0), (cos, NAN), (cos, INF)):
        assert math.isnan(function(x))
    assert math.isnan(power(-1.0, 2.0))


def test_numbers_arrays_and_tensors_have_the_same_bits():
    rng = np.random.default_rng(0)
    x = np.concatenate([np.arange(1.0, 500), np.exp(rng.uniform(-740, 700, 500)), SPECIAL])
    y = rng.uniform(-2, 2, len(x))
    for function, arguments in ((exp, [y * 300]), (log, [x]), (power, [x, y]), (cos, [y * 50])):
        host = np.array([function(*numbers) for numbers in zip(*(a.tolist() for a in arguments), strict=True)])
        tensors = function(*map(torch.from_numpy, arguments)).numpy()
        assert host.tobytes() == function(*arguments).tobytes() == tensors.tobytes(), function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_any_dtype_are_computed_in_float64(dtype):
    """Roundings by large numbers would lose everything in float32."""
    x, y = (torch.tensor(values, dtype=dtype) for values in ([0.25, 3.0, 40.0], [1.5, -2.0, 20.0]))
    wide, number = x.double(), torch.tensor(0.75, dtype=dtype)
    for function in (exp, log, cos):
        assert torch.equal(function(x), function(wide).to(dtype))
        assert torch.equal(function(number), function(number.double()).to(dtype))
    assert torch.equal(power(x, y), power(wide, y.double()).to(dtype))
    assert torch.equal(power(0.9, y), power(0.9, y.double()).to(dtype))
    assert torch.equal(power(number, y), power(number.double(), y.double()).to(dtype))
    assert torch.equal(power(x, 0.3), power(wide, 0.3).to(dtype))
    assert exp(np.float32(0.5)) == exp(0.5)
    assert log(np.array([0.5], dtype=np.float32)) == log(0.5)


# by this definition; computed once, on an x86-64 processor
RECORDED = {
    exp: {
        -0.1: "0x1.cf46d99d52b3ap-1",
        1.0: "0x1.5bf0a8b14576ap+1",
        -30.25: "0x1.4835bd010a41bp-44",
        600.1: "0x1.b1ec31df52717p+865",
    },
    log: {
        0.1: "-0x1.26bb1bbb55515p+1",
        3.0: "0x1.193ea7aad030bp+0",
        4097.0: "0x1.0a2d23e3bb61ep+3",
        1e-310: "-0x1.64e69394d9508p+9",
    },
    cos: {
        0.3: "0x1.e921dd42f09bap-1",
        1.5707963267948966: "0x1.1a62633145c07p-54",
        3.0: "-0x1.fae04be85e5d2p-1",
        12345.6: "0x1.4e62cef481db3p-1",
    },
    power: {
        (2.0, -0.8): "0x1.2611186bae674p-1",
        (11.0, -0.8): "0x1.2cc1cd79ce86cp-3",
        (4097.0, -0.8): "0x1.51ba626b470b8p-10",
        (1000000.0, 0.3): "0x1.f8c4106c1abfap+5",
        (0.96, 0.004): "0x1.ffea9969757dbp-1",
    },
}


def test_the_bits_are_those_of_every_processor():
    for function, values in RECORDED.items():
        for x, expected in values.items():
            found = function(*x) if isinstance(x, tuple) else function(x)
            assert found.hex() == expected, (function.__name__, x)


UNSAFE = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "power", "float_power", "cos", "sin", "tan"]


@pytest.fixture
def no_library(monkeypatch):
    """Whatever has other bits elsewhere raises."""

    def refuse(*_, **__):
        raise AssertionError("a function whose last bit depends on the processor or the library")

    for module in (math, np, torch, torch.Tensor):
        for name in UNSAFE:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuse)
    for name in ("__pow__", "__rpow__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda c: c.id)
def test_scalars_take_nothing_from_a_library(case, no_library):
    for step in STEPS:
        assert all(math.isfinite(value) for value in case.rule.scalars(step=step, **case.options).values())


@pytest.mark.parametrize("schedule", fusedadam.schedules.SCHEDULES)
def test_schedules_take_nothing_from_a_library(schedule, no_library):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = fusedadam.BertAdam([param], schedule=schedule, t_total=10, warmup=0.1)
    for _ in range(3):
        optimizer.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("entry", CATALOG.values(), ids=[*CATALOG])
def test_options_take_nothing_from_a_library(entry, no_library):
    for make in entry.tested.values():
        assert make([torch.nn.Parameter(torch.ones(3))])._options()


def test_no_power_in_the_optimizers_but_of_the_step():
    """Python's own ``**`` is the library's, and cannot be replaced for a test."""
    source = Path(fusedadam.__file__).parent
    for path in (*source.glob("optimizers/*.py"), source / "schedules.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                allowed = ("step", "1024 ** power")  # the latter: of bytes, in a text
                assert ast.unparse(node.right) in allowed or ast.unparse(node) in allowed, f"{path}:{node.lineno}"
