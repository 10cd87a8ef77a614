"""Every command: exit codes, messages, JSON; in this process where that is enough, in a real one where it is not."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import sparsegen
from sparsegen.cli import app, main
from sparsegen.cli.output import age, as_tile, lengths, progress, size, table
from sparsegen.report import built as built_module
from sparsegen.spec.gpu import find_gpu
from tests.artifact.compilers import pretend

ROOT = Path(__file__).parents[2]
CLI = ROOT / "sparsegen" / "cli"
SHIPPED = sorted(p.stem for p in (ROOT / "patterns").glob("*.yaml"))


def sparsegen_(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "sparsegen", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def commands() -> list[list[str]]:
    group = typer.main.get_command(app)
    found = []
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found += [[name, sub] for sub in inner] if inner else [[name]]
    return found


# --- the rules of the command line ---


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help(words: list[str]) -> None:
    code, text = run(*words, "--help")
    assert code == 0 and "Usage:" in text
    assert "--" in text.split("Options:")[1]


@pytest.mark.parametrize("name", ["bench.py", "build.py", "look.py", "report.py", "store.py"])
def test_commands_are_thin(name: str) -> None:
    """At most 15 lines a body, and nothing is caught here."""
    tree = ast.parse((CLI / name).read_text(encoding="utf-8"))
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Try)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 15, f"{name}: {node.name} has {lines} lines"


def test_only_our_errors_are_caught() -> None:
    tree = ast.parse((CLI / "app.py").read_text(encoding="utf-8"))
    caught = [
        ast.unparse(n.type) for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type
    ]
    assert caught == ["SparsegenError"]


def test_error_is_one_message_and_exit_1(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nmask:\n  window: {size: -4}\n")
    done = sparsegen_("show", str(bad), "--length", "64")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("SpecError: ") and "bad.yaml:3:" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_name_suggests_close_ones() -> None:
    done = sparsegen_("show", "streaming_lm", "--length", "64")
    assert done.returncode == 1
    assert "streaming_llm" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["show", "causal"],
        ["show", "causal", "--length", "0"],
        ["show", "causal", "--length", "1,2,3"],
        ["show", "causal", "--length", "4,8", "--kv-length", "8"],
        ["show", "causal", "--length", "64", "--tile", "60x64"],
        ["show", "causal", "--length", "64", "--nonsense"],
        ["show", "causal", "--length", "2147483649"],
        ["show", "causal", "--length", "9" * 5000],
        ["show", "causal", "--length", "8", "--kv-length", "2147483649"],
        ["bench", "causal", "--lengths", "8x2147483649"],
        ["compile", "causal", "--tune", "always"],
        ["compile", "causal", "--gpu", "a100", "--budget", "60"],
        ["compile", "causal", "--gpu", "a100", "--workspace", "0"],
        ["compile", "causal", "--gpu", "a100", "--workspace", "9", "--no-deterministic"],
        ["tune", "--cover", "x.jsonl", "--budget", "60"],
        ["tune", "--cover", "x.jsonl", "--jobs", "1"],
        ["tune", "--cover", "x.jsonl", "--storage", "x"],
        ["tune", "--cover", "x.jsonl", "--passes", "backward"],
        ["tune", "--cover", "x.jsonl", "--no-deterministic"],
        ["tune", "causal", "--no-deterministic"],
        ["cache", "prune", "--days", "1e300"],
        ["cache", "prune", "--all", "--days", "1"],
        ["nonsense"],
    ],
    ids=lambda words: " ".join(words)[:80],
)
def test_usage_errors_exit_2(words: list[str]) -> None:
    assert run(*words)[0] == 2


def test_version() -> None:
    assert run("--version") == (0, f"sparsegen {sparsegen.__version__}\n")


# --- looking ---


def test_patterns_lists_what_is_shipped() -> None:
    code, text = run("patterns", "--json")
    rows = json.loads(text)
    assert code == 0 and [r["name"] for r in rows] == SHIPPED
    assert all(r["summary"] and Path(r["file"]).is_file() for r in rows)
    listed = run("patterns")[1]
    assert all(name in listed for name in SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_patterns_can_be_shown(name: str) -> None:
    pattern = sparsegen.Pattern.from_yaml(name)
    if not pattern.position_only:
        pytest.skip("needs run-time data, see test_show_run_time.py")
    code, text = run("show", name, "--length", "256", "--json")
    seen = json.loads(text)
    assert code == 0 and seen["pattern"] == name
    mask = pattern.dense_mask(256, 256)[0]
    assert seen["cells"] == int(mask.sum())


def test_show_prints_ascii_where_the_terminal_has_no_more() -> None:
    done = sparsegen_("show", "causal", "--length", "512", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "#" in done.stdout and done.stdout.isascii()


def test_show_both_spellings_of_two_lengths() -> None:
    one, other = (
        run("show", "causal", *words, "--json")
        for words in (["--length", "1,512"], ["--length", "1", "--kv-length", "512"])
    )
    assert one == other and json.loads(one[1])["cells"] == 512


def test_schema_accepts_what_is_shipped_and_refuses_mistakes() -> None:
    import jsonschema
    import yaml

    schema = json.loads(run("schema")[1])
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for name in SHIPPED:
        check.validate(yaml.safe_load((ROOT / "patterns" / f"{name}.yaml").read_text()))
    for wrong in (
        {"name": "x"},
        {"mask": {"windw": {"size": 1}}},
        {"mask": {"window": {"size": "a"}}},
    ):
        assert not check.is_valid(wrong)


def test_doctor() -> None:
    code, text = run("doctor", "--json")
    rows = json.loads(text)
    assert code == 0 and {"python", "torch", "triton"} <= {r["name"] for r in rows}
    assert sparsegen.__version__ and run("doctor")[0] == 0


# --- warnings ---


@pytest.mark.filterwarnings("always")  # else Python shows the second command none
def test_a_warning_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No class, no path and no line of ours, from ``warnings`` and from the log alike; each said once."""
    from sparsegen.tune.store import StaleTuningWarning

    def look(*given: object, **more: object) -> object:
        for _ in range(2):
            warnings.warn("tuned row of causal:\n  template has changed", StaleTuningWarning, 3)
            logging.getLogger("sparsegen.artifact.store").warning("entry %s not used", "x")
        return SimpleNamespace(as_dict=lambda: {"cells": 1}, text=lambda explain: "a picture")

    monkeypatch.setattr("sparsegen.report.show.look", look)
    sentences = ["tuned row of causal: template has changed", "entry x not used"]
    lines = "".join(f"warning: {text}\n" for text in sentences)
    for words, out in (
        ([], "a picture\n"),
        (["--json"], json.dumps({"cells": 1, "warnings": sentences}, indent=2) + "\n"),
    ):
        monkeypatch.setattr(sys, "argv", ["sparsegen", "show", "causal", "--length", "16", *words])
        shown = warnings.showwarning
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0 and capsys.readouterr() == (out, lines)
        assert warnings.showwarning is shown


# --- building, in real processes: the compiler needs a process without the interpreter ---


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A cache with the artifacts of both passes, which its problem names, and what ``compile --json`` said."""
    cache = tmp_path_factory.mktemp("cache")
    done = sparsegen_(
        "compile", "causal", "--gpu", "a100", "--tune", "off", "--json", SPARSEGEN_CACHE=str(cache)
    )
    assert done.returncode == 0, done.stderr
    return cache, json.loads(done.stdout)


def test_compile_cross_compiles_and_says_so(built: tuple[Path, dict[str, object]]) -> None:
    cache, said = built
    assert said["gpu"] == "nvidia-a100" and said["cross_compiled"] is True
    assert Path(str(said["path"])).is_dir() and str(said["path"]).startswith(str(cache))
    done = sparsegen_("compile", "causal", "--gpu", "a100", SPARSEGEN_CACHE=str(cache))
    assert "There is no nvidia-a100 here: cross-compiled, not run." in done.stdout
    assert said["schedule"] == "runs"
    gradients = said["gradients"]
    assert isinstance(gradients, dict) and gradients["schedule"] == "dQ runs; dK, dV runs"
    assert Path(gradients["path"]).is_dir() and gradients["path"] != said["path"]
    assert "\ngradients\nschedule       dQ runs; dK, dV runs (predicted " in done.stdout
    assert gradients["path"] in done.stdout
    assert "\nschedule       runs (predicted " in done.stdout
    assert str(said["path"]) in done.stdout  # the second time it is a hit: same key, same folder


def test_check_warm_and_cache_commands(
    built: tuple[Path, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, said = built
    monkeypatch.setenv("SPARSEGEN_CACHE", str(cache))
    assert run("check", "--gpu", "a100", "causal")[0] == 0
    code, text = run("check", "--gpu", "a100,h100", "causal", "--json")
    states = [r["state"] for r in json.loads(text[text.index("{") :])["results"]]
    assert (code, states) == (1, ["ok", "ok", "missing", "missing"])
    warmed = run("warm", "--gpu", "a100", "causal")[1]
    assert "a100 causal: hit" in warmed and "a100 causal gradients: hit" in warmed

    rows = json.loads(run("cache", "ls", "--json")[1])
    assert [row["pattern"] for row in rows] == ["causal"] * 2
    assert {row["path"] for row in rows} == {said["path"], said["gradients"]["path"]}  # type: ignore[index]
    archive = str(tmp_path / "a.tar.gz")
    assert "2 artifacts" in run("cache", "export", archive, "--gpu", "a100")[1]
    none = tmp_path / "none.tar.gz"
    done = sparsegen_("cache", "export", str(none), "--gpu", "h100")
    assert done.returncode == 1 and not none.exists()
    assert "nothing to export: the cache has no artifact for nvidia-h100" in done.stderr
    monkeypatch.setenv("SPARSEGEN_CACHE", str(tmp_path / "other"))
    assert "2 added, 0 already here" in run("cache", "import", archive)[1]
    assert "0 added, 2 already here" in run("cache", "import", archive)[1]
    assert "would remove 2" in run("cache", "prune", "--all", "--dry-run")[1]
    assert "removed 2" in run("cache", "prune", "--all")[1]
    assert json.loads(run("cache", "ls", "--json")[1]) == []
    assert "removed 0 artifacts, 0 B" in run("cache", "prune", "--all")[1]


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ([], ["Compiler", "GradientCompiler"]),
        (["--passes", "forward"], ["Compiler"]),
        (["--passes", "backward"], ["Compiler", "GradientCompiler"]),
        (["--passes", "forward,backward"], ["Compiler", "GradientCompiler"]),
        (["--no-deterministic"], ["Compiler", "GradientCompiler in any order"]),
        (["--workspace", "1000"], ["Compiler", "GradientCompiler with dS stored"]),
    ],
    ids=str,
)
def test_compile_builds_the_passes_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, words: list[str], passes: list[str]
) -> None:
    """The problem of causal names both."""
    asked: list[str] = []

    def ensure(*_: object, builder: object, **__: object) -> None:
        free = not getattr(builder, "deterministic", True)
        stored = getattr(builder, "stored", False)
        name = type(builder).__name__
        asked.append(name + " in any order" * free + " with dS stored" * stored)

    monkeypatch.setattr(built_module, "ensure", ensure)
    monkeypatch.setattr(built_module.Built, "as_dict", lambda self: {})
    monkeypatch.setattr(built_module.Built, "text", lambda self: "")
    assert run("compile", "causal", "--gpu", "a100", *words)[0] == 0
    assert asked == passes


@pytest.mark.parametrize(
    ("words", "asked"),
    [(["--no-deterministic"], "deterministic=False"), (["--workspace", "1000"], "a workspace")],
    ids=str,
)
def test_designs_of_gradients_need_gradients(words: list[str], asked: str) -> None:
    done = sparsegen_("compile", "causal", "--gpu", "a100", "--passes", "forward", *words)
    assert done.returncode == 1 and f"{asked} is about gradients, and causal" in done.stderr


def test_compile_says_what_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes minutes: a log has a line before each pass."""
    monkeypatch.setattr(built_module, "ensure", lambda *_, **__: None)
    said: list[tuple[int, int, str]] = []
    built_module.build("causal", gpu="a100", progress=lambda *step: said.append(step))
    assert said == [(0, 2, "forward pass for nvidia-a100"), (1, 2, "gradients for nvidia-a100")]


def test_compile_says_why_a_workspace_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is refused on a GPU that cannot store dS: the split kernels are built, and the reason is told."""
    jobs = pretend(monkeypatch)  # the fixture ``built`` compiles such kernels
    monkeypatch.setenv("SPARSEGEN_CACHE", str(tmp_path / "cache"))
    small = tmp_path / "small.yaml"
    small.write_text("name: small\nmask: causal\nproblem: {head_dim: 16, heads: 2}\n")
    words = ["compile", str(small), "--gpu", "a100", "--passes", "backward", "--workspace", "1000"]
    code, text = run(*words)
    said = "; design: split, KERNEL=hopper needs sm_90, nvidia-a100 is another architecture\n"
    assert code == 0 and said in text and len(jobs) == 10


def test_compile_names_a_pass_that_does_not_exist() -> None:
    done = sparsegen_("compile", "causal", "--gpu", "a100", "--passes", "forward,decode")
    said = "InputError: passes must be some of forward, backward, got 'decode'"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, said)


def test_compile_refuses_run_time_nodes_by_place(tmp_path: Path) -> None:
    done = sparsegen_("compile", "packed_documents", "--gpu", "h200")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("UnsupportedError: ")
    assert "documents" in done.stderr


@pytest.mark.parametrize(
    ("here", "asked", "level"),
    [("h200", None, "quick"), ("a100", None, "off"), (None, None, "off"), ("h200", "off", "off")],
)
def test_compile_tunes_where_it_can(
    monkeypatch: pytest.MonkeyPatch, here: str | None, asked: str | None, level: str
) -> None:
    """A GPU that is here is measured unless told not to; for one that is not here nothing can be."""
    levels: list[str] = []

    class Asked(Exception):
        pass

    def ensure(*_: object, tune: str, **__: object) -> None:
        levels.append(tune)
        raise Asked

    monkeypatch.setattr(built_module, "current_gpu", lambda: here and find_gpu(here))
    monkeypatch.setattr(built_module, "ensure", ensure)
    with pytest.raises(Asked):
        built_module.build("causal", gpu="h200", tune=asked)
    assert levels == [level]


def test_python_and_the_command_line_tune_alike() -> None:
    default = inspect.signature(sparsegen.compile).parameters["tune"].default
    assert default == built_module.default_level(here=True)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_commands_that_need_a_gpu_say_so() -> None:
    for words in (["compile", "causal"], ["tune", "causal"], ["bench", "causal"]):
        done = sparsegen_(*words)
        assert done.returncode == 1 and done.stderr.startswith("ToolchainError: "), done.stderr


# --- small parts ---


def test_lengths_and_tiles() -> None:
    assert lengths("4096", None) == (4096, 4096)
    assert lengths("1,8", None) == lengths("1", 8) == (1, 8)
    assert lengths("1_000", None) == (1000, 1000)
    assert as_tile("128x64") == (128, 64)


def test_table_aligns_numbers_right() -> None:
    text = table(("name", "n"), [("a", 5), ("bcd", 10)])
    assert text == "name   n\na      5\nbcd   10"
    assert table(("name",), []) == "name\n(none)"


def test_sizes_and_ages() -> None:
    assert [size(5), size(2048), size(3 << 30)] == ["5 B", "2.0 KiB", "3.0 GiB"]
    assert [age(5), age(120), age(7200), age(200000)] == ["5 s", "2 min", "2 h", "2 d"]


def test_progress_in_a_log_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("warm") as report:
        report(1, 2, "causal: built")
    out = capsys.readouterr()
    assert out.err == "warm 1/2: causal: built\n" and out.out == ""


def test_progress_on_a_terminal_is_a_bar() -> None:
    """On a pseudo-terminal, as a person has it."""
    pty = pytest.importorskip("pty")
    code = (
        "from sparsegen.cli.output import progress\nwith progress('warm') as r: r(1, 2, 'causal')"
    )
    seen = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 4096)
        seen.extend(data)
        return data

    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        status = pty.spawn([sys.executable, "-c", code], read)
    finally:
        os.environ.pop("PYTHONPATH") if old is None else os.environ.update(PYTHONPATH=old)
    assert status == 0 and "━".encode() in seen and b"1/2" in seen
