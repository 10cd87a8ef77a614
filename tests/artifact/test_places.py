"""Where nothing can be written: no HOME, HOME=/, read-only, another user's folder, a full small disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sparsegen.artifact.store import Store
from tests.artifact.standin import build

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can start a process of another user",
)
SCRIPT = """
import os, shutil, sys, tempfile, warnings
from sparsegen.artifact.store import CacheWarning, Store
from tests.artifact.standin import KEY, build

user, environment = int(sys.argv[1]), dict(pair.split("=", 1) for pair in sys.argv[2:])
if user:  # load everything first: another user may not even read this Python
    import platformdirs
    platformdirs.user_cache_dir("sparsegen")
    build(Store(tempfile.mkdtemp()))
    shutil.rmtree(tempfile.gettempdir())
    os.mkdir(tempfile.gettempdir())
    os.chmod(tempfile.gettempdir(), 0o777)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
os.environ.pop("HOME", None)
os.environ.update(environment)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hit = Store().try_load(KEY) is not None
    first, second = build(Store()), build(Store())
assert first == second and Store().load(KEY).read("kernel.py")
print("hit" if hit else "built", first.path)
print(*[w.message for w in caught if w.category is CacheWarning], sep="|")
"""


def build_elsewhere(tmp_path, user=0, **environment):
    """Run SCRIPT with nothing but ``environment``, as ``user``: (hit or built, path, warnings, temporary folder)."""
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    temporary.chmod(0o777)
    keep = {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH")}
    keep |= {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    pairs = [f"{name}={value}" for name, value in environment.items()]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(user), *pairs],
        env=keep | {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    first, warned = run.stdout.splitlines()
    how, path = first.split(" ", 1)
    return how, Path(path), [w for w in warned.split("|") if w], temporary


def check_private(path, warned, temporary, reason):
    assert path.is_relative_to(temporary)
    assert len(warned) == 1, "one warning a process"
    assert reason in warned[0] and "SPARSEGEN_CACHE" in warned[0]
    assert os.listdir(temporary) == [], "removed at the end of the process"


@pytest.fixture
def open_path(tmp_path):
    """tmp_path that another user can reach."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path("/") or folder.stat().st_mode & 0o001:
            continue
        folder.chmod(folder.stat().st_mode | 0o011)
    return tmp_path


def test_chosen_folder(tmp_path):
    _, path, warned, temporary = build_elsewhere(
        tmp_path,
        SPARSEGEN_CACHE=str(tmp_path / "chosen"),
        XDG_CACHE_HOME=str(tmp_path / "xdg"),
        HOME=str(tmp_path),
    )
    assert path.parent == tmp_path / "chosen" / "artifacts" and not warned
    assert sorted(os.listdir(tmp_path)) == ["chosen", "tmp"], "nothing is written elsewhere"
    assert os.listdir(temporary) == []


def test_xdg_folder(tmp_path):
    _, path, warned, _ = build_elsewhere(
        tmp_path, XDG_CACHE_HOME=str(tmp_path / "xdg"), HOME=str(tmp_path)
    )
    assert path.parent == tmp_path / "xdg" / "sparsegen" / "artifacts" and not warned
    assert sorted(os.listdir(tmp_path)) == ["tmp", "xdg"]


@needs_root
def test_home_unset(open_path):
    """The user's entry in the password file gives a home that is not there."""
    _, path, warned, temporary = build_elsewhere(open_path, NOBODY)
    check_private(path, warned, temporary, "/nonexistent/")


@needs_root
def test_home_is_the_root_of_the_disk(open_path):
    _, path, warned, temporary = build_elsewhere(open_path, NOBODY, HOME="/")
    check_private(path, warned, temporary, "/.cache/sparsegen")
    assert not Path("/.cache").exists()


@needs_root
def test_user_without_a_name(open_path):
    """A random user id, as container platforms give: no entry in the password file, no HOME."""
    _, path, warned, temporary = build_elsewhere(open_path, 123456)
    assert path.is_relative_to(temporary) and len(warned) == 1


@needs_root
def test_read_only_home(open_path):
    home = open_path / "home"
    home.mkdir(mode=0o555)
    _, path, warned, temporary = build_elsewhere(open_path, NOBODY, HOME=str(home))
    check_private(path, warned, temporary, "Permission denied")
    assert os.listdir(home) == []


@needs_root
def test_another_users_folder(open_path):
    root = open_path / "theirs"
    build(Store(root))
    _, path, warned, temporary = build_elsewhere(open_path, NOBODY, SPARSEGEN_CACHE=str(root))
    check_private(path, warned, temporary, "Permission denied")
    assert len(os.listdir(root / "artifacts")) == 1


@needs_root
def test_filled_read_only_store_is_read(open_path):
    root = open_path / "filled"
    entry = build(Store(root)).path
    for folder, folders, files in os.walk(root):
        for name in folders:
            os.chmod(os.path.join(folder, name), 0o555)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o444)
    root.chmod(0o555)
    how, path, warned, temporary = build_elsewhere(open_path, NOBODY, SPARSEGEN_CACHE=str(root))
    assert (how, path, warned) == ("hit", entry, [])
    assert os.listdir(temporary) == []


def test_a_file_stands_where_the_folder_should(tmp_path):
    (tmp_path / "file").write_text("")
    _, path, warned, temporary = build_elsewhere(
        tmp_path, SPARSEGEN_CACHE=str(tmp_path / "file" / "below")
    )
    check_private(path, warned, temporary, "cannot be written")


@needs_root
@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
def test_full_disk(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        _, path, warned, temporary = build_elsewhere(tmp_path, SPARSEGEN_CACHE=str(small))
        check_private(path, warned, temporary, "No space left")
        assert os.listdir(small / "artifacts") == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_forked_child_has_its_own_private_folder(tmp_path):
    code = f"""
        import os, warnings
        warnings.simplefilter("ignore")
        from sparsegen.artifact.store import Store
        from tests.artifact.standin import KEY, build
        store = Store({str(tmp_path / "file" / "x")!r})
        mine = build(store)
        child = os.fork()
        if child == 0:
            assert store.try_load(KEY) is None
            theirs = build(store)
            assert theirs.path.parent != mine.path.parent
            raise SystemExit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert mine.read("kernel.py")
    """
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert os.listdir(tmp_path / "tmp") == []
