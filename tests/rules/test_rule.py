"""What a rule is under given flags, and that it still runs as plain Python."""

from __future__ import annotations

import gc
import linecache
import re

import pytest
import torch

from fusedadam import ops
from fusedadam.ascend import apply_adam
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.declarations import State
from fusedadam.optimizers.adamw import adam
from fusedadam.rules.clipping import clipped_by_norm, maximized_and_clipped
from fusedadam.rules.ops import maximum, orthogonalized, sqrt, total, where
from fusedadam.rules.rule import Flag, Rule, RuleError, Scalar, Value, Values, rule
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


def rules_of_the_package() -> list[Rule]:
    # rules that other tests saw refused are half made, and may not have been collected yet
    rules = [found for found in gc.get_objects() if type(found) is Rule and hasattr(found, "update")]
    return [found for found in rules if (found.update.__module__ or "").startswith("fusedadam.")]


def test_the_packages_own_rules_keep_the_contract():
    """They are not checked when they are imported, as all others are: it would take half of the import."""
    beyond_adam = {"sgd", "rmsprop", "adadelta", "lamb"}
    assert {"adam", "adamp", "bert_adam", "clip", "ema_adam", *beyond_adam} <= {
        own.name for own in rules_of_the_package()
    }
    assert {apply_adam.ADAM_W, apply_adam.TENSORFLOWS, apply_adam.BERT} <= {*rules_of_the_package()}
    for own in rules_of_the_package():
        own.check()


def test_flags_decide_what_exists():
    off = everything.specialize({"f": False, "g": False})
    assert off.roles == ("param", "grad")
    assert off.outputs == ("param",)
    assert off.scalars == ("s", "t")
    on = everything.specialize({"f": True, "g": False})
    assert on.outputs == ("param", "a")
    assert on.scalars == ("s",)
    assert adam.specialize({"amsgrad": False, "maximize": True, "decoupled": True, "clipped": False}).states == (
        "exp_avg",
        "exp_avg_sq",
    )
    assert (
        "weight_decay"
        not in adam.specialize({"amsgrad": False, "maximize": True, "decoupled": True, "clipped": False}).scalars
    )


def test_the_source_for_compilers_is_straight_and_has_no_bare_numbers():
    specialized = everything.specialize({"f": True, "g": False})
    (stage,) = specialized.stages
    text = "\n".join(stage.functions)
    assert "if " not in text
    assert "number(0.5)" in text
    assert "number(3.0)" in text
    assert "/" not in text.replace("divide", "")
    assert text.count("def ") == 2


def test_the_rule_itself_still_runs_as_plain_python():
    p, a, b = everything(*(torch.tensor([x]) for x in (1.0, 4.0, 1.5, 0.0)), s=0.5, t=1.0, f=True, g=False)
    assert (p.item(), a.item(), b.item()) == (0.5, 2.5, 0.0)


@pytest.mark.parametrize(("reports", "instead"), [("grad_norm", "grad_norm"), ("x", "x"), (None, "grad_norm")])
def test_reports_that_are_not_a_tuple(reports, instead):
    """A string is a sequence of letters: "g" was said never to be assigned."""
    says = rf"everything \(.*:\d+\): reports={reports!r} is not a tuple of names; write reports=\('{instead}',\)"
    with pytest.raises(RuleError, match=says):
        rule(scalars=some_scalars, reports=reports)(everything.update)


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


# openings


def clipping_scalars(lr, max_grad_norm):
    return {"lr": lr, "max_grad_norm": max_grad_norm}


def total_norm(x):
    """Not the helper of this name that the opening calls."""
    return total(3.0 * x)


# fmt: off
@rule(scalars=clipping_scalars, reports=("grad_norm",))
def written_out(
    param: Value, grad: Value, *, lr: Scalar, max_grad_norm: Scalar, maximize: Flag, clipped: Flag
) -> Values:
    if maximize:
        grad = -grad
    if clipped:
        grad, grad_norm = clipped_by_norm(grad, max_grad_norm)  # noqa: RUF059
    param = param - lr * grad / (1.0 + total_norm(param))
    return param


@rule(scalars=clipping_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def opened(param: Value, grad: Value, *, lr: Scalar, max_grad_norm: Scalar, maximize: Flag, clipped: Flag) -> Values:
    param = param - lr * grad / (1.0 + total_norm(param))
    return param
# fmt: on


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_an_opening_is_the_same_as_its_lines(maximize, clipped):
    """In kernels and as plain Python; helpers of the rule and of the opening may share a name."""
    flags = {"maximize": maximize, "clipped": clipped}
    codes, steps = [], []
    for own in (written_out, opened):
        special = own.specialize(flags)
        code = "\n".join(text for stage in special.stages for text in stage.functions)
        codes.append(re.sub(r"total_\w+", "total_of_some_place", code))
        assert [*special.reports] == ["grad_norm"] * clipped
        values = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -2.0])
        steps.append(own(*values, lr=0.5, max_grad_norm=1.0, **flags))
        assert torch.equal(own(param=values[0], grad=values[1], lr=0.5, max_grad_norm=1.0, **flags), steps[-1])
    assert codes[0] == codes[1]
    assert torch.equal(steps[0], steps[1])


def halving(grad: Value, *, clipped: Flag) -> Value:
    small = grad < 1
    if clipped:
        grad = where(small, grad, 0.5 * grad)
    return grad


def without_grad(grad: Value) -> Value:
    half = 0.5 * grad
    return half


def changes_lr(grad: Value) -> Value:
    lr = 2.0
    grad = lr * grad
    return grad


def test_an_opening_of_ones_own_hides_its_names():
    @rule(scalars=clipping_scalars, opening=halving)
    def mine(param: Value, grad: Value, *, lr: Scalar, clipped: Flag) -> Values:
        param = param - lr * grad
        return param

    assert mine(1.0, torch.tensor(2.0), lr=0.5, clipped=True) == 0.5

    def reads(param: Value, grad: Value, *, lr: Scalar, clipped: Flag) -> Values:
        param = param - lr * grad
        param = where(small, param, grad)  # noqa: F821
        return param

    line = reads.__code__.co_firstlineno + 2
    with pytest.raises(RuleError, match=rf"rule reads \(.*:{line}\): `small` is not known here"):
        rule(scalars=clipping_scalars, opening=halving)(reads)
    with pytest.raises(RuleError, match="reports has `norm`, which the rule never assigns"):
        rule(scalars=clipping_scalars, opening=halving, reports=("norm",))(mine.update)
    with pytest.raises(RuleError, match="is a condition, not a number"):
        rule(scalars=clipping_scalars, opening=halving, reports=("small",))(mine.update)


def test_openings_that_are_refused():
    def plain(param: Value, grad: Value, *, lr: Scalar) -> Values:
        param = param - lr * grad
        return param

    line = plain.__code__.co_firstlineno
    says = rf"rule plain \(.*:{line}\): its opening, maximized_and_clipped, takes `max_grad_norm: Scalar`; add it"
    with pytest.raises(RuleError, match=says):
        rule(scalars=clipping_scalars, opening=maximized_and_clipped)(plain)
    for opening in (without_grad, changes_lr):
        place = rf"{opening.__name__} \(.*:{opening.__code__.co_firstlineno}\)"
        with pytest.raises(RuleError, match=rf"rule {place}: an opening changes the gradient alone, and ends with"):
            rule(scalars=clipping_scalars, opening=opening)(plain)


def test_a_rule_that_trains_nothing_is_refused():
    """Compiled kernels left the parameter as it was, without a word."""

    def forgets(param: Value, grad: Value, a: Value) -> Values:
        a = a + grad
        param = param - a
        return a

    def leaves(param: Value, grad: Value, a: Value) -> Values:
        a = a + grad
        return param, a

    with pytest.raises(RuleError, match="the new `param` is not returned, so that nothing is trained; add it to"):
        rule(scalars=no_scalars)(forgets)
    with pytest.raises(RuleError, match="`param` is returned, but never assigned; assign what it becomes"):
        rule(scalars=no_scalars)(leaves)


def test_an_error_in_a_helper_of_the_package_names_the_line_that_calls_it():
    def late(param: Value, grad: Value) -> Value:
        update, norm = clipped_by_norm(orthogonalized(grad), 1.0)
        param = param - update / norm
        return param

    with pytest.raises(RuleError, match=rf"rule late \({re.escape(__file__)}:\d+\): `clipped_by_norm\(.*`: a sum over"):
        rule(scalars=no_scalars)(late)


@pytest.mark.parametrize("op", ["orthogonalized", "sum_last", "total", "tensor_norm"])
def test_sums_and_products_are_imported_by_name(op):
    space: dict[str, object] = {"ops": ops, "Value": Value}
    source = f"def dotted(param: Value, grad: Value) -> Value:\n    param = param - ops.{op}(grad)\n    return param\n"
    linecache.cache[f"<dotted {op}>"] = (len(source), None, source.splitlines(keepends=True), f"<dotted {op}>")
    exec(compile(source, f"<dotted {op}>", "exec"), space)
    with pytest.raises(RuleError, match=rf"write {op}\(...\), imported by name from fusedadam.ops"):
        rule(scalars=no_scalars)(space["dotted"])
