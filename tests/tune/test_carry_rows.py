"""`scripts/carry-rows`: rows whose kernels an edit of a template leaves as they were are not stale behind it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRADIENTS = 4  # rows of gradients of the two patterns


def tree(folder: Path) -> Path:
    """A copy of what renders rows, and of the rows of two patterns."""
    for name in ("sparsegen", "templates", "patterns", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    rows = folder / "tuned" / "nvidia-h200"
    rows.mkdir(parents=True)
    for name in ("causal", "bigbird"):
        shutil.copy(ROOT / "tuned" / "nvidia-h200" / f"{name}.json", rows)
    return folder


def carried(now: Path, before: Path) -> str:
    done = subprocess.run(
        [sys.executable, now / "scripts" / "carry-rows", before], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def digests(root: Path) -> dict[tuple[str, str, str], str]:
    """Digest of the template by pattern, template and kernel, of both patterns' rows."""
    found = {}
    for path in (root / "tuned").glob("*/*.json"):
        for row in json.loads(path.read_text())["rows"]:
            found[row["pattern"], row["template"], row["config"]["KERNEL"]] = row["template_digest"]
    return found


def test_rows_of_other_kernels_are_carried_over(tmp_path: Path) -> None:
    """An edit of the portable gradient kernels alone, and rows that both trees know as their own before it."""
    before, now = tree(tmp_path / "before"), tree(tmp_path / "now")
    assert carried(now, before).endswith("0 rows carried over\n")  # stale ones stay so, none is new
    for root in (before, now):
        renewed(root)
    path = now / "templates" / "backward" / "kernel.py.jinja"
    text = path.read_text()
    path.write_text(text.replace("def load_run(", "def load_run(  # another text\n    "))
    assert carried(now, before).endswith(
        f"{GRADIENTS} rows carried over\n"
    )  # a comment changes no kernel
    path.write_text(text)
    renewed(now)
    path.write_text(text.replace("row_end - 1 - row)", "row_end - row - 1)"))
    old = digests(now)
    said = carried(now, before)
    changed = {key for key, digest in digests(now).items() if digest != old[key]}
    gradients = {key for key in old if key[1] != "forward"}
    hopper = {key for key in gradients if key[2] == "hopper"}
    assert changed == hopper and hopper and hopper != gradients
    for pattern, template, _ in gradients - hopper:
        assert f"{pattern}, {template}: stale, another kernel" in said
    assert said.endswith(f"{len(hopper)} rows carried over\n")


def renewed(root: Path) -> None:
    """All rows as if they had just been measured."""
    code = (
        "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from sparsegen.codegen.gradient_template import tuned_templates\n"
        "print(json.dumps({n: t.digest for n, t in tuned_templates().items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, root], capture_output=True, text=True, check=True
    )
    now = json.loads(done.stdout)
    for path in (root / "tuned").glob("*/*.json"):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            row["template_digest"] = now[row["template"]]
        path.write_text(json.dumps(data))
