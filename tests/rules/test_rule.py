"""What a rule may say, what is refused and in which words, and what becomes of it for the backends."""

from __future__ import annotations

import pytest
import torch

from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.base import FusedOptimizer
from fusedadam.optimizers.declarations import State
from fusedadam.rules import ops
from fusedadam.rules.ops import maximum, sqrt, where
from fusedadam.rules.rule import Flag, RuleError, Scalar, Value, Values, rule
from tests.support import PLACES

LIMIT = 3.0


def no_scalars(step):
    return {}


def some_scalars(step):
    return dict.fromkeys(("s", "t"), 1.0)


def halved(x):
    y = 0.5 * x
    return y, sqrt(x)


@rule(scalars=some_scalars)
def everything(param: Value, grad: Value, a: Value, b: Value, *, s: Scalar, t: Scalar, f: Flag, g: Flag) -> Values:
    """All that a rule may say."""
    half, root = halved(grad)
    if f and not g:
        a = where((a < half) | (a > LIMIT), a + 1, maximum(a, -root))
    param = param - s * half / (root if f else t)
    b = b + grad if g else b
    return param, a, b


def test_flags_decide_what_exists():
    off = everything.special({"f": False, "g": False})
    assert off.roles == off.inputs == ("param", "grad")
    assert off.outputs == ("param",)
    assert off.scalars == ("s", "t")
    on = everything.special({"f": True, "g": False})
    assert on.outputs == ("param", "a")
    assert on.scalars == ("s",)
    assert adam.special({"amsgrad": False, "maximize": True, "decoupled": True, "clipped": False}).states == (
        "exp_avg",
        "exp_avg_sq",
    )
    assert (
        "weight_decay"
        not in adam.special({"amsgrad": False, "maximize": True, "decoupled": True, "clipped": False}).scalars
    )


def test_the_source_for_compilers_is_straight_and_has_no_bare_numbers():
    special = everything.special({"f": True, "g": False})
    (stage,) = special.stages
    text = "\n".join(stage.functions)
    assert "if " not in text
    assert "number(0.5)" in text
    assert "number(3.0)" in text
    assert "/" not in text.replace("divide", "")
    assert text.count("def ") == 2


def test_the_rule_itself_still_runs_as_plain_python():
    p, a, b = everything(*(torch.tensor([x]) for x in (1.0, 4.0, 1.5, 0.0)), s=0.5, t=1.0, f=True, g=False)
    assert (p.item(), a.item(), b.item()) == (0.5, 2.5, 0.0)


@rule(scalars=no_scalars)
def swap(param: Value, grad: Value, previous: Value) -> Values:
    previous = param
    param = grad
    return param, previous


class Swap(FusedOptimizer):
    rule = swap
    states = {"previous": State()}

    def __init__(self, params, *, backend=None):
        super().__init__(params, backend=backend)


@pytest.mark.parametrize("place", PLACES)
def test_a_rule_may_have_no_scalars_and_write_what_it_does_not_read(place):
    device, backend = place
    params = [torch.nn.Parameter(torch.full((n,), 2.0, device=device)) for n in (3, 5000)]
    optimizer = Swap(params, backend=backend)
    for p in params:
        p.grad = torch.full_like(p, 7.0)
    optimizer.step()
    for p in params:
        assert p.eq(7).all()
        assert optimizer.state[p]["previous"].eq(2).all()


def bad_in_place(param: Value, grad: Value) -> Values:
    param -= grad
    return param


def bad_if(param: Value, grad: Value) -> Values:
    if grad > 0:
        param = param - grad
    return param


def bad_power(param: Value, grad: Value) -> Values:
    param = param - grad**2
    return param


def bad_word(param: Value, grad: Value) -> Values:
    param = torch.exp(grad)
    return param


def bad_loop(param: Value, grad: Value) -> Values:
    for _ in range(3):
        param = param - grad
    return param


def bad_name(param: Value, grad: Value) -> Values:
    param = param - nowhere  # noqa: F821
    return param


def bad_return(param: Value, grad: Value) -> Values:
    return param - grad


def bad_grad(param: Value, grad: Value) -> Values:
    grad = -grad
    return param, grad


def bad_scalar(param: Value, grad: Value, *, s: Scalar) -> Values:
    s = s + s
    param = param - s
    return param


def bad_flag(param: Value, grad: Value, *, f: Flag) -> Values:
    param = param - f
    return param


def bad_annotation(param: Value, grad) -> Values:
    return param


def bad_roles(weight: Value, grad: Value) -> Values:
    return weight


def bad_keyword(param: Value, grad: Value) -> Values:
    param = maximum(param, b=grad)
    return param


def bad_unassigned(param: Value, grad: Value, *, f: Flag) -> Values:
    if f:
        x = grad
    param = param - x
    return param


def bad_argument(param: Value, grad: Value, table: Value) -> Values:
    return param


def bad_word_argument(param: Value, grad: Value, *, word: Scalar) -> Values:
    param = param - word * grad
    return param


def bad_local(param: Value, grad: Value) -> Values:
    divide = param
    param = divide
    return param


def bad_string(param: Value, grad: Value) -> Values:
    param = "param"
    return param


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (bad_in_place, "write `x = x + y`"),
        (bad_if, "where("),
        (bad_power, "powers belong in scalars"),
        (bad_word, "neither a word"),
        (bad_loop, "only assignments"),
        (bad_name, "`nowhere` is not known"),
        (bad_return, "return roles by name"),
        (bad_grad, "`grad` belongs to the user"),
        (bad_scalar, "`s` is a scalar"),
        (bad_flag, "ask it with `if`"),
        (bad_annotation, "say what `grad` is"),
        (bad_roles, "`param: Value, grad: Value`"),
        (bad_keyword, "by position"),
        (bad_unassigned, "`x` is not known"),
        (bad_string, "not a number"),
        (bad_argument, "`table` is a name that kernels use"),
        (bad_word_argument, "`word` is a name that kernels use"),
        (bad_local, "`divide` is taken"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused_with_the_line_and_what_to_write_instead(function, says):
    with pytest.raises(RuleError) as caught:
        rule(scalars=some_scalars)(function)
    assert says in str(caught.value)
    assert f"{function.__name__} ({__file__}:" in str(caught.value)
    line = int(str(caught.value).split(f"{__file__}:")[1].split(")")[0])
    assert function.__code__.co_firstlineno <= line <= function.__code__.co_firstlineno + 4


def test_a_closure_is_refused():
    factor = 2.0

    def closes(param: Value, grad: Value) -> Values:
        param = param - factor * grad
        return param

    with pytest.raises(RuleError, match="closes over factor"):
        rule(scalars=no_scalars)(closes)


def test_a_rule_without_source_is_refused():
    namespace = {"Value": Value}
    exec("def made_up(param: Value, grad: Value):\n    return param", namespace)
    with pytest.raises(RuleError, match="in a file or a notebook cell"):
        rule(scalars=no_scalars)(namespace["made_up"])


def test_every_backend_has_every_word():
    from fusedadam.backends.numba import ops as for_numba
    from fusedadam.backends.triton import ops as for_triton

    for name in ops.OPS:
        assert hasattr(for_numba, name)
        assert hasattr(for_triton, name)


def test_words_propagate_nan_from_either_side():
    nan, one = torch.tensor(float("nan")), torch.tensor(1.0)
    for word in (ops.maximum, ops.minimum):
        assert torch.isnan(word(nan, one))
        assert torch.isnan(word(one, nan))
        assert word(float("nan"), 1.0) != word(float("nan"), 1.0)
