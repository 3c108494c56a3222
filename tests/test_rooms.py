"""Rooms import one way: each may use the ones before it, so that a reader can stop where they are."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src/fusedadam"
# each imports only from the ones before it
ORDER = [
    "startup", "compat", "machine", "codegen",  # leaves
    "tensors", "rules", "formats", "checks", "ops", "schedules", "grouping", "engine", "backends",
    "contract", "optimizers", "clipping", "functional", "in_backward", "__init__", "peer", "catalog",
    "ascend", "cli", "__main__",
]  # fmt: skip


def room(dotted: str) -> str:
    return dotted.split(".")[1] if "." in dotted else "__init__"


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports when it is loaded or run, but not for its types alone."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fusedadam":
            names = [f"fusedadam.{a.name}" for a in node.names] if node.module == "fusedadam" else [node.module]
            found.update(name for name in names if room(name) in ORDER)
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.split(".")[0] == "fusedadam")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text("utf-8")))
    return found


FILES = [p for p in sorted(SOURCE.rglob("*.py")) if "stand_ins" not in p.parts]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_from_rooms_before_its_own(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    later = {name for name in imports(path) if ORDER.index(room(name)) > ORDER.index(own)}
    assert not later


def test_every_room_is_in_the_order_and_says_why_it_exists():
    rooms = {p.name.removesuffix(".py") for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms == set(ORDER)
    for folder in (p for p in SOURCE.iterdir() if p.is_dir() and p.name in ORDER):
        doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
        assert len(doc) > 100, f"{folder.name} needs a paragraph on why it exists"


FOLDERS = ["codegen", "tensors", "rules", "formats", "engine", "backends", "contract", "optimizers", "ascend", "cli"]


NAMED = [folder for folder in FOLDERS[:-2] if folder != "optimizers"]  # the catalog names these


@pytest.mark.parametrize("folder", ["checks", *NAMED, "engine/changes"])
def test_a_room_names_each_of_its_files(folder):
    doc = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text("utf-8"))) or ""
    files = {p.stem for p in (SOURCE / folder).iterdir() if not p.name.startswith("__") and p.suffix in (".py", "")}
    assert files <= set(re.findall(r"\w+", doc))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_room_has_tests(folder):
    assert list((Path(__file__).parent / folder).glob("test_*.py"))
