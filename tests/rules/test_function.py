"""The source of a rule: what cannot be read, or says too little, is refused."""

from __future__ import annotations

import pytest

from fusedadam.rules.function import Function
from fusedadam.rules.rule import Flag, RowValue, RuleError, Scalar, Value, Values, rule


def no_scalars(step):
    return {}


def everything(param: Value, grad: Value, row: RowValue, *, lr: Scalar, f: Flag) -> Values:
    """What each argument is."""
    row = lr * row
    return param, row


def test_the_signature_says_what_everything_is():
    source = Function(everything)
    assert source.kinds == {"param": "Value", "grad": "Value", "row": "Value", "lr": "Scalar", "f": "Flag"}
    assert source.spaces == {"param": "element", "grad": "element", "row": "row"}
    assert source.returned_roles(("param", "grad", "row")) == ("param", "row")
    assert len(source.body) == 1


def test_an_error_points_at_the_line():
    source = Function(everything)
    with pytest.raises(RuleError, match=rf"rule everything \({__file__}:{source.first_line + 2}\): no"):
        source.fail(source.body[0], "no")


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
