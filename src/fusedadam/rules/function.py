"""The source of a rule or helper: parsed, with what its signature declares, and errors that point into it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from fusedadam.rules.ops import OPS

KINDS = ("Value", "Scalar", "Flag")
# what a role's annotation says that it has a value for
SPACES = {"Value": "element", "RowValue": "row", "ColumnValue": "column", "TensorValue": "tensor"}
RESERVED = {  # names that kernels use, and arguments may not have
    "AHEAD", "BLOCK", "CHUNK", "FULL", "LANES", "LOG", "NUMBER", "ROWS", "RUN", "add_up", "chunk_first", "chunk_tensor",
    "divide", "find_largest", "fold", "found_inf", "grad_scale", "inline", "int64_at", "kernel", "load", "max",
    "min", "number", "numbers", "range", "run", "scalar", "scratch", "store", "stored", "table", "take",
    "tensors", "tl", "triton", "update", *OPS,
}  # fmt: skip


class RuleError(TypeError):
    """A rule has code that some backend cannot compile."""


class Function:
    """The parsed source of a rule or helper, and errors that point into it. ``places``: what the names of calls in it
    begin with, to tell them from those of another function in the same rule."""

    def __init__(self, function: Callable[..., Any], helper: bool = False, places: str = "") -> None:
        self.function, self.name, self.places = function, function.__name__, places
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
            self.refuse(f"it closes over {free}; pass what it needs as scalars or use module-level helpers")
        if tree.args.vararg or tree.args.kwarg or tree.args.defaults or any(tree.args.kw_defaults):
            self.refuse("a signature with *args, **kwargs or defaults; name every role, scalar and flag")
        arguments = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
        written = {a.arg: "Value" if helper else self._annotation(a) for a in arguments}
        self.kinds = {name: "Value" if kind in SPACES else kind for name, kind in written.items()}
        self.spaces = {name: SPACES[kind] for name, kind in written.items() if kind in SPACES}
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            self.refuse("the last statement must be `return`")
        self.body, self.result = body[:-1], body[-1].value

    def fail(self, node: ast.AST, why: str) -> NoReturn:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        raise RuleError(f"rule {self.name} ({self.filename}:{line}): {why}")

    def refuse(self, sentence: str) -> NoReturn:
        """Fails for what has no line of its own."""
        self.fail(self.tree, sentence)

    def _annotation(self, argument: ast.arg) -> str:
        kind = ast.unparse(argument.annotation).split(".")[-1].strip("'\"") if argument.annotation else ""
        if kind not in (*KINDS, *SPACES):
            self.fail(argument, f"say what `{argument.arg}` is: `{argument.arg}: Value`, `: Scalar` or `: Flag`")
        if argument.arg.startswith("_") or argument.arg in RESERVED:
            self.fail(argument, f"`{argument.arg}` is a name that kernels use; choose another")
        return kind

    @property
    def assigned(self) -> set[str]:
        """The names that it assigns, under whatever flags."""
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        return {node.id for node in names if isinstance(node.ctx, ast.Store)}

    def returned_roles(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        elements = self.result.elts if isinstance(self.result, ast.Tuple) else [self.result]
        names = [e.id if isinstance(e, ast.Name) else "" for e in elements]
        for element, name in zip(elements, names, strict=True):
            if name not in roles:
                self.fail(element, f"return roles by name (one of {', '.join(roles)}), not `{ast.unparse(element)}`")
            if name == "grad":
                self.fail(element, "`grad` belongs to the user and is never stored; keep what you need in a state")
        return tuple(names)
