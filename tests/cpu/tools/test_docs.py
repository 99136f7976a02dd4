"""The pages of docs/ and README.md: links lead somewhere, files that they name exist, scripts are bash."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from textwrap import indent

import pytest

from skyrl_train.config import Config
from skyrl_train.config.overrides import is_known
from skyrl_train.config.schema import key_types
from skyrl_train.config.sft import SftConfig
from skyrl_train.config.skyrl_04.table import table

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|sh|yaml|md|json|txt))`")
KEY = re.compile(r"(?<![\w./-])((?:trainer|generator|data|environment)\.\w+(?:\.\w+)*)(?![\w*(])")
KEYS = key_types(Config) | key_types(SftConfig)
READINGS = ROOT / "docs/readings"
"""Dated records: they name files as they were then."""


def anchors(page: Path) -> set[str]:
    """Fragments that GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path):
    broken = []
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", [p for p in PAGES if READINGS not in p.parents], ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path):
    named = {file for file in FILE.findall(page.read_text()) if "NAME" not in file}
    roots = (ROOT, ROOT / "skyrl_train", ROOT / "examples/custom")
    assert not [file for file in sorted(named) if not any((root / file).exists() for root in roots)]


@pytest.mark.parametrize("page", [p for p in PAGES if READINGS not in p.parents], ids=lambda page: page.name)
def test_keys_that_are_named_exist(page: Path):
    """Here or in skyrl_train 0.4. The first cells of tables in from_verl.md are verl's; the tables of
    skyrl_train_04.md are generated.
    """
    text = page.read_text().partition("## Keys and values of 0.4")[0]
    if page.name == "from_verl.md":
        text = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE)
    named = set(KEY.findall(text)) - {"data.md", "trainer.algorithm.mine.alpha"}
    assert not [key for key in sorted(named) if not is_known(key, KEYS) and table().find(key) is None]


@pytest.mark.parametrize("page", [p for p in PAGES if "```bash" in p.read_text()], ids=lambda page: page.name)
def test_scripts_of_a_page_are_bash(page: Path):
    for script in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert not checked.returncode, checked.stderr


def test_the_architecture_page_quotes_the_step():
    code = re.search(
        r"```python\nasync def step[^\n]*\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL
    )
    assert code is not None
    assert indent(code[1], "    ") in (ROOT / "skyrl_train/trainer/step.py").read_text()


def test_no_docstring_of_the_package_begins_with_a_dangling_word():
    dangling = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "skyrl_train").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if re.match(r"\s*(Of|As|The same)\b", node.value.value)
    ]
    assert not dangling, "a docstring is a sentence or a noun phrase that can be read by itself"
