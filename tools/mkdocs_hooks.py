"""Hooks for mkdocs: add pages from elsewhere in the repository and those of the optimizers, rewrite links to them,
turn formulas into MathML, and mark where long names in tables may break.

Pages are also read on a code host, so their links are paths in the repository. If the site has no page for a link's
target (a source file, the licence), it shows the text without a link.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fusedadam.catalog import CATALOG

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "examples/README.md": "examples.md",
}
PAGES = "docs/which-page.md"  # part of the front page
LIVES_AT = {page: source for source, page in ELSEWHERE.items()}
LINK = re.compile(r"(?P<image>!?)\[(?P<words>[^\[\]]*)\]\((?P<path>[^()#\s:]+)(?P<anchor>#[^()\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CELL_CODE = re.compile(r"(?<=<code>)[^<]{12,}(?=</code>)")
CELL = re.compile(r"<td[ >].*?</td>", re.DOTALL)
FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the page of each optimizer after their overview."""
    (pages,) = [section["Optimizers"] for section in config.nav or [] if "Optimizers" in section]
    pages[1:1] = [{entry.name: f"optimizers/{entry.page}.md"} for entry in CATALOG.values()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        made = {"examples.md": lambda text: text + _examples(), "index.md": _front}.get(page, str)
        files.append(File.generated(config, page, content=made(text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = LIVES_AT.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [_relink(markdown[end : fence.start()], source, page.file.src_uri), fence[0]]
        end = fence.end()
    return "".join([*pieces, _relink(markdown[end:], source, page.file.src_uri)])


def on_page_content(html_text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def drawn(formula: re.Match[str]) -> str:
        display = "block" if formula[1] == "div" else "inline"
        return f'<{formula[1]} class="formula">{convert(html.unescape(formula[2]), display=display)}</{formula[1]}>'

    return CELL.sub(lambda cell: CELL_CODE.sub(_breakable, cell[0]), FORMULA.sub(drawn, html_text))


def _breakable(code: re.Match[str]) -> str:
    """Long code, with a mark between its words: site.css lets it break there on a narrow screen, and nowhere else."""
    return re.sub(r"(?<=\w)[._/,(=\[]+(?=[A-Za-z&\"'])|(?<=[a-z])(?=[A-Z][a-z])", r"\g<0><wbr>", code[0])


def _relink(markdown: str, source: str, page: str) -> str:
    def relinked(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"]))
        anchor = link["anchor"] or ""
        if target.startswith("examples/") and target.endswith(".py"):
            target, anchor = "examples/README.md", "#" + posixpath.basename(target).replace(".", "")
        if target == PAGES:
            there, anchor = "index.md", "#which-page-do-i-need"
        elif target in ELSEWHERE:
            there = ELSEWHERE[target]
        elif target.startswith("docs/"):
            there = target.removeprefix("docs/")
        elif os.path.exists(ROOT / target):
            return link["words"]
        else:
            return link[0]  # mkdocs reports it as broken
        return f"{link['image']}[{link['words']}]({posixpath.relpath(there, posixpath.dirname(page))}{anchor})"

    return LINK.sub(relinked, markdown)


def _front(readme: str) -> str:
    """The README, with the list of pages after its first screen: a reader of the site may have come to find one."""
    pages = (ROOT / PAGES).read_text(encoding="utf-8").replace("](../", "](").replace("](", "](docs/")
    pages = re.sub(r"\]\(docs/(CONTRIBUTING|examples/)", r"](\1", pages)
    first, install, rest = readme.partition("## Install it\n")
    assert install, "README.md has no heading 'Install it'"
    return f"{first}#{pages}\n{install}{rest}"


def _examples() -> str:
    """The source of every example that examples/README.md lists, since readers of the site have no folder to open."""
    folder = ROOT / "examples"
    names = [link["path"] for link in LINK.finditer((folder / "README.md").read_text(encoding="utf-8"))]
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in names if name.endswith(".py")}
    return "".join(f"\n## {name}\n```python\n{text}```\n" for name, text in texts.items())
