"""A rule's source, parsed, checked and rewritten as straight-line code, to which each backend binds its own ops.

Code that some backend cannot compile is refused here, with its line and what to write instead. In the result, flags are
decided, division is ``divide(a, b)``, a number is ``number(x)``, and ops have their names in ``fusedadam.rules.ops``,
even if the author imported them under others.

A helper function stays a function, unless it sums: then its statements are inlined, so that the rule can be divided
where it waits for the sum. The names of an inlined helper begin with the place of the call, ``12_8.norm``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

from fusedadam.rules.ops import COMPOSED, OPS, SUMS, divide, where

KINDS = ("Value", "Scalar", "Flag")
# what a role's annotation says that it has a value for
SPACES = {"Value": "element", "RowValue": "row", "ColumnValue": "column", "TensorValue": "tensor"}
# what authors may write first, and what it is called here
MEANT = {"norm": "tensor_norm", "sum": "tensor_sum", "max": "maximum", "min": "minimum", "pow": "power"}
RESERVED = {  # names that kernels use, and arguments may not have
    "AHEAD", "BLOCK", "CHUNK", "FULL", "LANES", "LOG", "NUMBER", "ROWS", "RUN", "add_up", "chunk_first", "chunk_tensor",
    "divide", "find_largest", "fold", "found_inf", "grad_scale", "inline", "int64_at", "kernel", "load", "max",
    "min", "number", "numbers", "range", "run", "scalar", "scratch", "store", "stored", "table", "take",
    "tensors", "tl", "triton", "update", *OPS,
}  # fmt: skip
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr)


class RuleError(TypeError):
    """A rule has code that some backend cannot compile."""


class Helper(NamedTuple):
    """A helper function as the backends see it."""

    name: str
    text: str
    is_condition: bool | None  # whether it returns one; None if its arguments decide


def define(name: str, parameters: list[str], body: list[ast.stmt]) -> str:
    lines = [f"def {name}({', '.join(parameters)}):"]
    lines += [textwrap.indent(ast.unparse(ast.fix_missing_locations(s)), "    ") for s in body]
    return "\n".join(lines)


class Function:
    """The parsed source of a rule or helper, and errors that point into it."""

    def __init__(self, function: Callable[..., Any], helper: bool = False) -> None:
        self.function, self.name = function, function.__name__
        self.filename, self.first_line = function.__code__.co_filename, function.__code__.co_firstlineno
        try:
            text = textwrap.dedent(inspect.getsource(function))
        except OSError as error:
            raise RuleError(
                f"{self.name}: its source cannot be read; define rules in a file or a notebook cell"
            ) from error
        tree = ast.parse(text).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise RuleError(f"{self.name} ({self.filename}): a rule is made with `def`, not with lambda")
        self.tree = tree
        if function.__closure__:
            free = ", ".join(function.__code__.co_freevars)
            self.fail(tree, f"it closes over {free}; pass what it needs as scalars or use module-level helpers")
        if tree.args.vararg or tree.args.kwarg or tree.args.defaults or any(tree.args.kw_defaults):
            self.fail(tree, "a signature with *args, **kwargs or defaults; name every role, scalar and flag")
        arguments = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
        written = {a.arg: "Value" if helper else self._annotation(a) for a in arguments}
        self.kinds = {name: "Value" if kind in SPACES else kind for name, kind in written.items()}
        self.spaces = {name: SPACES[kind] for name, kind in written.items() if kind in SPACES}
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            self.fail(tree, "the last statement must be `return`")
        self.body, self.result = body[:-1], body[-1].value

    def fail(self, node: ast.AST, why: str) -> NoReturn:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        raise RuleError(f"rule {self.name} ({self.filename}:{line}): {why}")

    def _annotation(self, argument: ast.arg) -> str:
        kind = ast.unparse(argument.annotation).split(".")[-1].strip("'\"") if argument.annotation else ""
        if kind not in (*KINDS, *SPACES):
            self.fail(argument, f"say what `{argument.arg}` is: `{argument.arg}: Value`, `: Scalar` or `: Flag`")
        if argument.arg.startswith("_") or argument.arg in RESERVED:
            self.fail(argument, f"`{argument.arg}` is a name that kernels use; choose another")
        return kind

    def returned_roles(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        elements = self.result.elts if isinstance(self.result, ast.Tuple) else [self.result]
        names = [e.id if isinstance(e, ast.Name) else "" for e in elements]
        for element, name in zip(elements, names, strict=True):
            if name not in roles:
                self.fail(element, f"return roles by name (one of {', '.join(roles)}), not `{ast.unparse(element)}`")
            if name == "grad":
                self.fail(element, "`grad` belongs to the user and is never stored; keep what you need in a state")
        return tuple(names)


class SumCall(NamedTuple):
    """Where a sum is written: ``op(term)``, in the source of a rule or a helper."""

    op: Callable[..., Any]
    source: Function
    node: ast.Call


class Lowering(ast.NodeTransformer):
    """Rewrites the body of a rule, or of a helper that ``caller`` calls, as straight-line code."""

    ops: Mapping[str, Callable[..., Any]] = OPS
    helper_prefix = ""

    def __init__(
        self, source: Function, flags: Mapping[str, bool], caller: Lowering | None = None, scope: str = "",
        every_branch: bool = False,
    ) -> None:  # fmt: skip
        self.source, self.flags, self.scope, self.every_branch = source, flags, scope, every_branch
        self.is_helper = caller is not None
        self.helpers: dict[FunctionType, Helper] = {} if caller is None else caller.helpers
        self.sums: dict[str, SumCall] = {} if caller is None else caller.sums  # by name, as they are called in the code
        self.assigned: set[str] = set()
        self.conditions: dict[str, bool | None] = {}  # which of the assigned names are conditions
        self.inlined: list[ast.stmt] = []  # belongs before the statement that is being visited

    def check(self) -> None:
        """Refuses what cannot be compiled; with ``every_branch``, under any flags."""
        for _ in self.statements(self.source.body):
            pass

    def statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            if isinstance(statement, ast.If):
                chosen_body, other_body = statement.body, statement.orelse
                if not self.decide(statement.test):
                    chosen_body, other_body = other_body, chosen_body
                yield from self.statements(chosen_body)
                if self.every_branch:
                    yield from self.statements(other_body)
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
        value, names = self.visit(chosen), self.targets(target)
        if isinstance(value, ast.Tuple) and len(value.elts) != len(names):
            self.source.fail(statement, f"there are {len(names)} names for {len(value.elts)} values")
        if len(names) > 1 and not isinstance(value, (ast.Tuple, ast.Call)):  # a call: of a helper that returns several
            self.source.fail(statement, f"there are {len(names)} names for 1 value")
        self.assigned.update(names)
        self.conditions.update(zip(names, self.are_conditions(chosen, len(names)), strict=True))
        yield from self.inlined
        self.inlined = []
        scoped: list[ast.expr] = [ast.Name(self.scope + name) for name in names]
        yield ast.Assign([ast.Tuple(scoped) if isinstance(target, ast.Tuple) else scoped[0]], value)

    def chosen(self, value: ast.expr) -> ast.expr:
        """What is left of ``a if flag else b``."""
        while isinstance(value, ast.IfExp):
            value = value.body if self.decide(value.test) else value.orelse
        return value

    def are_conditions(self, value: ast.expr, count: int) -> list[bool | None]:
        """Whether each of the values that are assigned at once is a condition."""
        if isinstance(value, ast.Tuple):
            return [self.is_condition(element) for element in value.elts]
        return [self.is_condition(value)] if count == 1 else [None] * count

    def is_condition(self, value: ast.expr) -> bool | None:
        """Whether an expression of the source is a comparison or made of comparisons; None if that is not known here:
        it is an argument of a helper, or was assigned in a branch that other flags choose."""
        value = self.chosen(value)
        if isinstance(value, ast.Compare):
            return True
        if isinstance(value, ast.BinOp):
            return isinstance(value.op, (ast.BitAnd, ast.BitOr))
        if isinstance(value, ast.Name):
            if value.id in self.conditions:
                return None if self.every_branch else self.conditions[value.id]
            return None if self.is_helper and value.id in self.source.kinds else False
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name)):
            return False
        called = self.source.function.__globals__.get(value.func.id)
        if called is where:  # what its two sides are
            sides = [self.is_condition(side) for side in value.args[1:]]
            return sides[0] if len(set(sides)) == 1 else None
        if called in self.helpers:
            return self.helpers[called].is_condition
        return False if called in (*self.ops.values(), *SUMS) else None

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
        if isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            for side in (node.left, node.right):
                if self.is_condition(side) is False:
                    code, text = ast.unparse(node), ast.unparse(side)
                    self.source.fail(node, f"`{code}`: `{text}` is not a condition; compare it, as in `{text} > 0`")
        left, right = self.visit(node.left), self.visit(node.right)
        return call("divide", left, right) if isinstance(node.op, ast.Div) else ast.BinOp(left, node.op, right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if not isinstance(node.op, ast.USub):
            self.source.fail(node, f"`{ast.unparse(node)}`: the only sign is minus")
        return ast.UnaryOp(node.op, self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) != 1 or isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
            self.source.fail(
                node,
                f"`{ast.unparse(node)}`: compare two values at a time, with < <= > >= == !=, "
                "in parentheses where & or | joins them",
            )
        return ast.Compare(self.visit(node.left), node.ops, [self.visit(node.comparators[0])])

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return self.visit(self.chosen(node))  # type: ignore[no-any-return]

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.Tuple([self.visit(e) for e in node.elts])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = self.source.function.__globals__.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            self.source.fail(node, f"`{ast.unparse(node)}`: pass arguments by position")
        arguments = [self.visit(a) for a in node.args]
        for name, op in self.ops.items():
            if called is op:
                if op is where and node.args and self.is_condition(node.args[0]) is False:
                    code, first = ast.unparse(node), ast.unparse(node.args[0])
                    self.source.fail(node, f"`{code}`: `{first}` is not a condition; compare it, as in `{first} > 0`")
                return call(name, *arguments)
        place = f"{self.scope}{node.lineno}_{node.col_offset}"  # the same under all flags
        if called in SUMS:
            if len(arguments) != 1:
                self.source.fail(node, f"`{ast.unparse(node)}`: a sum has one argument")
            name = f"{called.__name__}_{place.replace('.', '_')}"
            self.sums[name] = SumCall(called, self.source, node)
            return call(name, *arguments)
        if called is divide:
            self.source.fail(node, f"`{ast.unparse(node)}`: in a rule, divide with `/`")
        if isinstance(called, FunctionType):
            wanted = inspect.signature(called).parameters
            if len(wanted) != len(arguments):
                self.source.fail(node, f"`{ast.unparse(node)}`: the helper's arguments are {', '.join(wanted)}")
            if _has_sums(called):
                return self.inline(called, arguments, f"{place}.")
            return call(self.helper(called).name, *arguments)
        asked = ast.unparse(node.func).rpartition(".")[2]
        asked = MEANT.get(asked, asked)
        if asked in (*self.ops, *COMPOSED, *MEANT.values()):
            self.source.fail(node, f"`{ast.unparse(node)}`: write {asked}(...), imported by name from fusedadam.ops")
        known = ", ".join([*self.ops, *COMPOSED, *(op.__name__ for op in SUMS), "tensor_norm", "total_norm"])
        self.source.fail(
            node, f"`{ast.unparse(node.func)}` is neither an op ({known}) nor a helper function of this module"
        )

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        joined = " & " if isinstance(node.op, ast.And) else " | "
        instead = joined.join(f"({ast.unparse(value)})" for value in node.values)
        self.source.fail(node, f"`{ast.unparse(node)}`: write `{instead}`, with parentheses")

    def helper(self, function: FunctionType) -> Helper:
        if function not in self.helpers:
            source = Function(function, helper=True)
            lowering = type(self)(source, {}, self)
            body = list(lowering.statements(source.body))
            result = ast.Return(lowering.visit(source.result))
            name = f"{self.helper_prefix}{function.__name__}_{len(self.helpers)}"
            is_condition = lowering.is_condition(source.result)
            self.helpers[function] = Helper(name, define(name, list(source.kinds), [*body, result]), is_condition)
        return self.helpers[function]

    def inline(self, function: FunctionType, arguments: list[ast.expr], scope: str) -> ast.expr:
        """What a helper that sums returns; its statements come before the one that calls it."""
        source = Function(function, helper=True)
        lowering = type(self)(source, {}, self, scope)
        given = zip(source.kinds, arguments, strict=True)
        self.inlined += [ast.Assign([ast.Name(scope + name)], argument) for name, argument in given]
        self.inlined += lowering.statements(source.body)
        result: ast.expr = lowering.visit(source.result)
        self.inlined += lowering.inlined
        return result

    def generic_visit(self, node: ast.AST) -> ast.AST:
        self.source.fail(node, f"`{ast.unparse(node)}` is not something that every backend compiles")


def _has_sums(function: FunctionType) -> bool:
    """Whether a helper sums, in its own code or through another helper."""
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    called = [f for f in used if isinstance(f, FunctionType) and f not in OPS.values()]
    return any(f in SUMS or _has_sums(f) for f in called)


def call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name), list(arguments), [])
