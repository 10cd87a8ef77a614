"""The documents say what is: commands exist, nodes are all described, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [body for name, body in FENCE.findall(text) if name == language]


def commands() -> list[tuple[str, str]]:
    """Every line of a shell block that starts with ``sparsegen``: (page, line)."""
    return [
        (page.name, line.split("#")[0].split(">")[0].strip())
        for page in PAGES
        for block in blocks(page, "sh")
        for line in block.splitlines()
        if line.startswith("sparsegen ")
    ]


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda x: x)
def test_commands_in_documents_parse(page: str, line: str) -> None:
    """The command exists and takes these options; it is parsed and not run."""
    from sparsegen.cli import app

    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{page}: no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)  # raises a usage error for a wrong option


def test_patterns_named_in_commands_are_shipped() -> None:
    shipped = {p.stem for p in (ROOT / "patterns").glob("*.yaml")}
    for page, line in commands():
        words = shlex.split(line)[1:]
        if words[:2] == ["tune", "--cover"]:  # takes no pattern
            continue
        if words[0] in ("show", "compile", "tune") and not words[1].endswith(".yaml"):
            assert words[1] in shipped, f"{page}: {line}"


def script(name: str) -> Any:
    """A script without a suffix as a module."""
    from importlib.machinery import SourceFileLoader
    from importlib.util import module_from_spec, spec_from_loader

    loader = SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


MARK = re.compile(r"^<!-- (?:output|part): ", re.M)


@pytest.mark.parametrize("page", [p for p in PAGES if MARK.search(p.read_text("utf-8"))], ids=str)
def test_printed_output_is_what_the_command_prints(page: Path) -> None:
    printed = script("printed-output")
    text = page.read_text(encoding="utf-8")
    found = list(printed.SHOWN.finditer(text))
    assert len(found) == len(MARK.findall(text)), f"{page.name}: a mark without a text block"
    for m in found:
        assert m[4] == printed.wanted(m[2], m[3], m[4]), f"{page.name}: {m[3]}"


def test_python_in_documents_compiles_and_names_what_exists() -> None:
    import sparsegen

    code = [(page.name, block) for page in PAGES for block in blocks(page, "python")]
    assert code
    for page, block in code:
        compile(block, page, "exec")
        named = set(re.findall(r"\bsparsegen\.(\w+)", block))
        assert named <= set(sparsegen.__all__), f"{page}: {named - set(sparsegen.__all__)}"


def test_readme_names_the_two_commands_of_ci() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    marks = re.findall(r"<!-- ci: (\w+) -->\n```sh\n", text)
    assert marks == ["compile", "test"]
    for mark in marks:
        assert f"readme {mark}" in ci


def test_every_node_is_described() -> None:
    from sparsegen.spec import language  # noqa: F401  (fills NODES)
    from sparsegen.spec.node import NODES

    text = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    headings = " ".join(re.findall(r"^### (.*)$", text, re.M))
    missing = [k for k in NODES if f"`{k}`" not in headings]
    assert not missing, f"docs/language.md has no heading for {missing}"


@pytest.mark.parametrize("text", blocks(ROOT / "docs" / "language.md", "yaml"))
def test_examples_of_the_language_are_valid(text: str) -> None:
    from sparsegen import Pattern

    if not text.startswith("name:"):
        text = "name: example\n" + text
    Pattern.from_yaml_text(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    links += re.findall(r'<img src="([^"]+)"', page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_pipeline_names_every_module() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    modules = [
        str(p.relative_to(ROOT / "sparsegen"))
        for p in (ROOT / "sparsegen").rglob("*.py")
        if p.name != "__init__.py" and "_data" not in p.parts
    ]
    missing = [m for m in sorted(modules) if f"`{m}`" not in text]
    assert not missing, f"docs/pipeline.md does not name {missing}"
    gone = set(re.findall(r"^\| `([\w/]+\.py)`", text, re.M)) - set(modules)
    assert not gone, f"docs/pipeline.md names what is gone: {gone}"


def test_page_of_patterns_is_current() -> None:
    """Every shipped pattern and every tuned row is on the page."""
    module = script("patterns-page")
    text = (ROOT / "docs" / "patterns.md").read_text(encoding="utf-8")
    assert text == module.page(), "run scripts/patterns-page"
    assert all(f"`{p.stem}`" in text for p in (ROOT / "patterns").glob("*.yaml"))


def test_no_page_tells_of_the_place_it_was_written() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = page.read_text(encoding="utf-8").lower()
        found = [w for w in ("/work/", "/root/", "/tmp/") if w in text]
        assert not found, f"{page.name}: {found}"
