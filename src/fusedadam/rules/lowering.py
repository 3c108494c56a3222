"""A rule's source, parsed, checked and rewritten as straight-line code, to which each backend binds its own ops.

Code that some backend cannot compile is refused here, with its line and what to write instead. In the result, flags are
decided, division is ``divide(a, b)``, a number is ``number(x)``, and ops have their names in ``fusedadam.rules.ops``,
even if the author imported them under others.

A helper function stays a function, unless it sums or multiplies matrices: then its statements are inlined, so that the
rule can be divided
where it waits for the result. The names of an inlined helper begin with the place of the call, ``12_8.norm``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from fusedadam.rules.function import Function
from fusedadam.rules.ops import COMPOSED, OPS, SUMS, cos, divide, exp, log, orthogonalized

# what authors may write first, and what it is called here
MEANT = {"norm": "tensor_norm", "sum": "tensor_sum", "max": "maximum", "min": "minimum", "pow": "power"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr)


# whether a value is a condition; None if flags decide that; a tuple for several values
IsCondition: TypeAlias = "bool | tuple[IsCondition, ...] | None"


class Helper(NamedTuple):
    """A helper function as the backends see it."""

    name: str
    text: str
    is_condition: IsCondition  # what it returns


Helpers: TypeAlias = dict[tuple[FunctionType, tuple[IsCondition, ...]], Helper]  # by what their arguments are


def define(name: str, parameters: list[str], body: list[ast.stmt]) -> str:
    lines = [f"def {name}({', '.join(parameters)}):"]
    lines += [textwrap.indent(ast.unparse(ast.fix_missing_locations(s)), "    ") for s in body]
    return "\n".join(lines)


class WrittenCall(NamedTuple):
    """Where a sum, or a product of matrices, is written: ``op(term)``, in the source of a rule or a helper."""

    op: Callable[..., Any]
    source: Function
    node: ast.Call


class Lowering(ast.NodeTransformer):
    """Rewrites the body of a rule, or of a helper that ``caller`` calls, as straight-line code. ``every_branch``: also
    visits what other flags would choose, to refuse what cannot be compiled."""

    ops: Mapping[str, Callable[..., Any]] = OPS
    helper_prefix = ""

    def __init__(
        self, source: Function, flags: Mapping[str, bool], caller: Lowering | None = None, scope: str = "",
        every_branch: bool = False, arguments: Sequence[IsCondition] = (),
    ) -> None:  # fmt: skip
        self.source, self.flags, self.scope, self.every_branch = source, flags, scope, every_branch
        self.callers: tuple[Any, ...] = (*(caller.callers if caller else ()), source.function)
        self.helpers: Helpers = {} if caller is None else caller.helpers
        # sums and products, by the names that they have in the code
        self.sums: dict[str, WrittenCall] = {} if caller is None else caller.sums
        self.products: dict[str, WrittenCall] = {} if caller is None else caller.products
        self.assigned: set[str] = set()
        self.conditions = dict(zip(source.kinds, arguments, strict=False))  # which names are; the others are not
        self.returned: dict[ast.expr, IsCondition] = {}  # the same for calls that were visited
        self.inlined: list[ast.stmt] = []  # belongs before the statement that is being visited
        self.written_at: tuple[Function, ast.Call] | None = None  # the author's call of a helper of this package

    def statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            if isinstance(statement, ast.If):
                chosen_body, other_body = statement.body, statement.orelse
                if not self.decide(statement.test):
                    chosen_body, other_body = other_body, chosen_body
                before = dict(self.conditions)
                yield from self.statements(chosen_body)
                if self.every_branch:
                    one, self.conditions = self.conditions, before
                    yield from self.statements(other_body)
                    two = self.conditions
                    self.conditions = {
                        name: kind if one.get(name, False) == two.get(name, False) else None
                        for name, kind in {**one, **two}.items()
                    }
            elif isinstance(statement, ast.Assign):
                yield from self.assignment(statement)
            elif isinstance(statement, ast.AugAssign):
                self.source.fail(
                    statement, "in place would change the tensor itself when run eagerly; write `x = x + y`"
                )
            elif not isinstance(statement, ast.Pass):
                self.source.fail(
                    statement, f"`{ast.unparse(statement)}`: only assignments, `if` on flags and a final return"
                )

    def assignment(self, statement: ast.Assign) -> Iterator[ast.stmt]:
        if len(statement.targets) != 1:
            self.source.fail(statement, "one target for each `=`")
        target, chosen = statement.targets[0], self.chosen(statement.value)
        if ast.unparse(chosen) == ast.unparse(target):
            return  # `x = y if flag else x`, decided: nothing to do, and x need not even exist
        value, names, kind = self.visit(chosen), self.targets(target), self.is_condition(chosen)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if len(kinds) != len(names):
            self.source.fail(statement, f"names on the left: {len(names)}; values on the right: {len(kinds)}")
        self.assigned.update(names)
        self.conditions.update(zip(names, kinds, strict=True))
        yield from self.inlined
        self.inlined = []
        scoped: list[ast.expr] = [ast.Name(self.scope + name) for name in names]
        yield ast.Assign([ast.Tuple(scoped) if isinstance(target, ast.Tuple) else scoped[0]], value)

    def chosen(self, value: ast.expr) -> ast.expr:
        """What is left of ``a if flag else b``."""
        while isinstance(value, ast.IfExp):
            value = value.body if self.decide(value.test) else value.orelse
        return value

    def is_condition(self, value: ast.expr) -> IsCondition:
        """Whether an expression of the source, which was visited, is a comparison or made of comparisons."""
        value = self.chosen(value)
        if isinstance(value, ast.Name):
            return self.conditions.get(value.id, False)
        if isinstance(value, ast.BinOp):
            return self.is_condition(value.left)  # as the other side
        if isinstance(value, ast.Tuple):
            return tuple(map(self.is_condition, value.elts))
        return isinstance(value, ast.Compare) or self.returned.get(value, False)

    def expect(self, condition: bool, node: ast.expr, operands: Sequence[ast.expr]) -> None:
        """Refuses operands of ``node`` that are no conditions, or that are: on each backend they are another number."""
        for operand in operands:
            kind = self.is_condition(operand)
            if kind is condition or kind is None:
                continue
            code, text = ast.unparse(node), ast.unparse(operand)
            if isinstance(kind, tuple):
                self.source.fail(node, f"`{code}`: `{text}` has {len(kind)} values; assign them to names first")
            if condition:
                self.source.fail(node, f"`{code}`: `{text}` is not a condition; compare it, as in `{text} > 0`")
            self.source.fail(node, f"`{code}`: `{text}` is a condition, not a number; write `where({text}, 1.0, 0.0)`")

    def targets(self, target: ast.expr) -> list[str]:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        found = [n.id for n in names if isinstance(n, ast.Name)]
        if len(found) != len(names):
            self.source.fail(target, f"assign to names, not to `{ast.unparse(target)}`")
        for name in found:
            if name in self.source.kinds and self.source.kinds[name] != "Value":
                self.source.fail(
                    target, f"`{name}` is a {self.source.kinds[name].lower()} and keeps its value; use a new name"
                )
            if name in ("divide", "number", *OPS) or name.startswith("_"):
                self.source.fail(target, f"`{name}` is taken; choose another name")
        return found

    def decide(self, test: ast.expr) -> bool:
        """The value of an ``if``: flags joined by not, and, or."""
        if isinstance(test, ast.Name) and test.id in self.flags:
            return self.flags[test.id]
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self.decide(test.operand)
        if isinstance(test, ast.BoolOp):
            return (all if isinstance(test.op, ast.And) else any)([self.decide(v) for v in test.values])
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        if names & {name for name, kind in self.source.kinds.items() if kind == "Flag"}:
            self.source.fail(test, f"`if {ast.unparse(test)}`: a flag is True or False; derive one for each choice")
        self.source.fail(test, f"`if {ast.unparse(test)}`: `if` is for flags; choose between values with where(...)")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        name = node.id
        if name in self.flags:
            self.source.fail(node, f"`{name}` is a flag: ask it with `if`, do not calculate with it")
        if name in self.assigned or name in self.source.kinds:
            return ast.Name(self.scope + name)
        constant = self.source.function.__globals__.get(name)
        if isinstance(constant, (int, float)):
            return self.constant(node, constant)
        self.source.fail(
            node, f"`{name}` is not known here: it is no argument, and nothing was assigned to it under these flags"
        )

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            return self.constant(node, node.value)
        self.source.fail(node, f"`{ast.unparse(node)}` is not a number")

    def constant(self, node: ast.expr, value: float) -> ast.expr:
        return call("number", ast.Constant(float(value)))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if isinstance(node.op, ast.Pow):
            base, exponent = ast.unparse(node.left), ast.unparse(node.right)
            factor = base if isinstance(node.left, ast.Name) else f"({base})"
            instead = {"2": f"{factor} * {factor}", "0.5": f"sqrt({base})"}.get(exponent, f"power({base}, {exponent})")
            self.source.fail(
                node, f"`{ast.unparse(node)}`: write `{instead}`, or compute a power of the step in the scalars"
            )
        if not isinstance(node.op, _OPERATORS):
            self.source.fail(node, f"`{ast.unparse(node)}`: only + - * / (and & | between conditions)")
        left, right = self.visit(node.left), self.visit(node.right)
        self.expect(isinstance(node.op, (ast.BitAnd, ast.BitOr)), node, [node.left, node.right])
        return call("divide", left, right) if isinstance(node.op, ast.Div) else ast.BinOp(left, node.op, right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, (ast.Invert, ast.Not)):
            self.source.fail(node, f"`{ast.unparse(node)}`: nothing negates a condition; exchange the sides of where")
        if not isinstance(node.op, ast.USub):
            self.source.fail(node, f"`{ast.unparse(node)}`: the only sign is minus")
        operand = self.visit(node.operand)
        self.expect(False, node, [node.operand])
        return ast.UnaryOp(node.op, operand)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) != 1 or isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
            self.source.fail(
                node,
                f"`{ast.unparse(node)}`: compare two values at a time, with < <= > >= == !=, "
                "in parentheses where & or | joins them",
            )
        left, right = self.visit(node.left), self.visit(node.comparators[0])
        self.expect(False, node, [node.left, node.comparators[0]])
        return ast.Compare(left, node.ops, [right])

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return self.visit(self.chosen(node))  # type: ignore[no-any-return]

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.Tuple([self.visit(e) for e in node.elts])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = self.source.function.__globals__.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            self.source.fail(node, f"`{ast.unparse(node)}`: pass arguments by position")
        arguments, kinds = [self.visit(a) for a in node.args], tuple(map(self.is_condition, node.args))
        if isinstance(called, FunctionType) and len(wanted := inspect.signature(called).parameters) != len(arguments):
            self.source.fail(node, f"`{ast.unparse(node)}`: its arguments are {', '.join(wanted)}")
        if called is self.ops["where"]:
            both = True in kinds[1:] and False not in kinds[1:]
            self.expect(True, node, node.args[:1])
            self.expect(both, node, node.args[1:])
            self.returned[node] = None if kinds[1] is kinds[2] is None else both
        elif (getattr(called, "__module__", None) or "").startswith("fusedadam."):
            self.expect(False, node, node.args)  # a helper of the author's may take conditions
        for name, op in self.ops.items():
            if called is op:
                return call(name, *arguments)
        place = f"{self.scope}{self.source.places}{node.lineno}_{node.col_offset}"  # the same under all flags
        if called in SUMS or called is orthogonalized:
            name = f"{called.__name__}_{place.replace('.', '_')}"
            where = self.written_at or (self.source, node)
            (self.sums if called in SUMS else self.products)[name] = WrittenCall(called, *where)
            return call(name, *arguments)
        if called is divide:
            self.source.fail(node, f"`{ast.unparse(node)}`: in a rule, divide with `/`")
        if called in (cos, exp, log):
            self.source.fail(node, f"`{ast.unparse(node)}` is for scalars only; compute it there, and use the scalar")
        if isinstance(called, FunctionType):
            if called in self.callers:
                self.source.fail(node, f"`{ast.unparse(node)}`: a helper cannot call itself, nor the one that calls it")
            if _has_sums(called):
                result, self.returned[node] = self.inline(called, arguments, f"{place}.", kinds, node)
                return result
            helper = self.helper(called, kinds)
            self.returned[node] = helper.is_condition
            return call(helper.name, *arguments)
        asked = ast.unparse(node.func).rpartition(".")[2]
        asked = MEANT.get(asked, asked)
        sums = [*(op.__name__ for op in SUMS), "orthogonalized", "tensor_norm", "total_norm"]
        if asked in (*self.ops, *COMPOSED, *MEANT.values(), *sums):
            self.source.fail(node, f"`{ast.unparse(node)}`: write {asked}(...), imported by name from fusedadam.ops")
        known = ", ".join([*self.ops, *COMPOSED, *sums])
        self.source.fail(
            node, f"`{ast.unparse(node.func)}` is neither an op ({known}) nor a helper function of this module"
        )

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        joined = " & " if isinstance(node.op, ast.And) else " | "
        instead = joined.join(f"({ast.unparse(value)})" for value in node.values)
        self.source.fail(node, f"`{ast.unparse(node)}`: write `{instead}`, with parentheses")

    def helper(self, function: FunctionType, kinds: tuple[IsCondition, ...]) -> Helper:
        if (function, kinds) not in self.helpers:
            source = Function(function, helper=True)
            lowering = type(self)(source, {}, self, arguments=kinds)
            body = list(lowering.statements(source.body))
            result = ast.Return(lowering.visit(source.result))
            name = f"{self.helper_prefix}{function.__name__}_{len(self.helpers)}"
            text = define(name, list(source.kinds), [*body, result])
            self.helpers[function, kinds] = Helper(name, text, lowering.is_condition(source.result))
        return self.helpers[function, kinds]

    def inline(
        self, function: FunctionType, arguments: list[ast.expr], scope: str, kinds: tuple[IsCondition, ...] = (),
        node: ast.Call | None = None,
    ) -> tuple[ast.expr, IsCondition]:  # fmt: skip
        """What a helper that sums returns; its statements come before the one that calls it."""
        source = Function(function, helper=True)
        lowering = type(self)(source, {}, self, scope, arguments=kinds)
        if node is not None and function.__module__.startswith("fusedadam."):  # an author wrote the call of the helper
            lowering.written_at = self.written_at or (self.source, node)
        given = zip(source.kinds, arguments, strict=True)
        self.inlined += [ast.Assign([ast.Name(scope + name)], argument) for name, argument in given]
        self.inlined += lowering.statements(source.body)
        result: ast.expr = lowering.visit(source.result)
        self.inlined += lowering.inlined
        return result, lowering.is_condition(source.result)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        self.source.fail(node, f"`{ast.unparse(node)}` is not something that every backend compiles")


def _has_sums(function: FunctionType, seen: tuple[FunctionType, ...] = ()) -> bool:
    """Whether a helper sums, or multiplies matrices, in its own code or through another helper."""
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    called = [f for f in used if isinstance(f, FunctionType) and f not in OPS.values() and f not in seen]
    return any(f in SUMS or f is orthogonalized or _has_sums(f, (*seen, function)) for f in called)


def call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name), list(arguments), [])
