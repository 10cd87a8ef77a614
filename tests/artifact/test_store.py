"""A store in one process: publish, load, refuse, replace, explain."""

from __future__ import annotations

import json
import logging
import os
import threading

import pytest

from sparsegen.artifact import folder
from sparsegen.artifact.entry import read_entry
from sparsegen.artifact.manifest import MANIFEST, DamagedError, Manifest, MismatchError
from sparsegen.artifact.manifest_json import _digest
from sparsegen.artifact.store import Store, default_root
from sparsegen.errors import ArtifactError, CacheMiss
from tests.artifact.standin import KEY, VERSIONS, build, key, write_standin


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache")


def names(store):
    return sorted(os.listdir(store.artifacts))


def rewrite(artifact, change, seal=True):
    """Edit a manifest the way a person or a bad tool would; ``seal`` also makes its digest fit again."""
    path = artifact.path / MANIFEST
    data = json.loads(path.read_text())
    change(data)
    if seal:
        data["digest"] = _digest({k: v for k, v in data.items() if k != "digest"})
    path.write_text(json.dumps(data))


def test_build_then_load(store):
    assert store.try_load(KEY) is None
    built = build(store, content=b"abc")
    loaded = store.load(KEY)
    assert loaded == built
    assert built.path.name == f"causal-nvidia-h200-{KEY.short()}"
    assert loaded.read("fast/forward.cubin") == b"abc" * 1000
    assert set(loaded.files) == {
        "kernel.py",
        "schedule.txt",
        "fast/forward.cubin",
        "fast/forward.json",
        "general/forward.cubin",
    }
    assert all(path.is_file() for path in loaded.files.values())
    assert loaded.manifest.decision.config["BLOCK_N"] == 64
    assert loaded.manifest.versions == VERSIONS


def test_second_build_is_a_hit(store):
    build(store)
    assert store.build_once(KEY, "causal", lambda d: pytest.fail("built twice"), VERSIONS)


def test_reading_makes_nothing(store):
    assert store.try_load(KEY) is None
    with pytest.raises(CacheMiss):
        store.load(KEY)
    assert list(store.entries()) == []
    assert not store.root.exists()


def test_folders_are_private(store):
    path = build(store).path
    for folder_ in (store.root, store.artifacts, path):
        assert folder_.stat().st_mode & 0o777 == 0o700, folder_


def test_same_key_under_another_name_is_the_same_entry(store):
    first = build(store, pattern="causal")
    assert build(store, pattern="window_as_long_as_all") == first
    assert len(names(store)) == 1


def test_two_architectures_coexist(store):
    hopper = build(store, KEY, content=b"90")
    ampere = build(store, key(gpu="nvidia-a100", arch=80), content=b"80")
    assert store.load(KEY).read("fast/forward.cubin")[:2] == b"90"
    assert store.load(key(gpu="nvidia-a100", arch=80)).read("fast/forward.cubin")[:2] == b"80"
    assert hopper.path != ampere.path
    hopper.require("cuda", 90)
    with pytest.raises(
        MismatchError, match=r"made for cuda 80 \(nvidia-a100\), this GPU is cuda 90"
    ):
        ampere.require("cuda", 90)


@pytest.mark.parametrize("seal", [True, False], ids=["resealed", "plain edit"])
@pytest.mark.parametrize("arch", [80, 86, 120])
def test_rewritten_architecture_is_refused(store, arch, seal, caplog):
    artifact = build(store)
    rewrite(artifact, lambda data: data["key"].update(arch=arch), seal)
    with pytest.raises(MismatchError, match=rf"arch: \S+( \S+)? {arch}, asked 90"):
        store.load(KEY)
    with caplog.at_level(logging.WARNING):
        assert store.try_load(KEY) is None
    assert f"{arch}, asked 90" in caplog.text
    rebuilt = build(store, content=b"new")
    assert rebuilt.read("fast/forward.cubin")[:3] == b"new"
    assert names(store) == [rebuilt.path.name]


@pytest.mark.parametrize("seal", [True, False], ids=["resealed", "plain edit"])
@pytest.mark.parametrize("part", ["triton", "torch"])
def test_rewritten_version_is_refused(store, part, seal):
    rewrite(build(store), lambda data: data["versions"].update({part: "1.2.3"}), seal)
    with pytest.raises(MismatchError, match=rf"{part}.* 1\.2\.3, asked"):
        store.load(KEY)
    assert store.try_load(KEY) is None


def test_rewritten_ptxas_version_is_refused(store):
    rewrite(build(store), lambda data: data["versions"].update(ptxas="11.0"), seal=False)
    with pytest.raises(DamagedError, match="was changed after it was written"):
        store.load(KEY)


def test_entry_under_a_foreign_name_is_refused(store):
    artifact = build(store)
    other = key(head_dim=64)
    artifact.path.rename(artifact.path.with_name(f"causal-nvidia-h200-{other.short()}"))
    with pytest.raises(MismatchError, match="head_dim: made for 128, asked 64"):
        store.load(other)


FILES = ["kernel.py", "schedule.txt", "fast/forward.cubin", "general/forward.cubin", MANIFEST]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0" * 4096)


def link(path):
    other = path.with_name("moved")
    path.rename(other)
    path.symlink_to(other)


def turn_into_folder(path):
    path.unlink()
    path.mkdir()


def delete(path):
    path.unlink()


@pytest.mark.parametrize("harm", [truncate, flip, empty, grow, link, turn_into_folder, delete])
@pytest.mark.parametrize("file", FILES)
def test_damage_is_a_miss_that_is_named_and_healed(store, file, harm):
    artifact = build(store)
    harm(artifact.path / file)
    with pytest.raises(ArtifactError, match=file.replace(".", r"\.")):
        store.load(KEY)
    assert store.try_load(KEY) is None
    assert [n for n in names(store) if not n.startswith(".damaged-")] == []
    again = build(store)
    assert store.load(KEY) == again
    assert names(store) == [again.path.name], "the damaged entry is swept by the next builder"


def test_changed_file_is_noticed_at_read(store):
    artifact = build(store)
    flip(artifact.path / "fast/forward.cubin")
    with pytest.raises(DamagedError, match=r"fast/forward\.cubin is damaged: 5000 bytes"):
        artifact.read("fast/forward.cubin")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"schema": NaN}',
        '{"schema": 1}',
        '{"schema": 4}',
        '{"schema": 1, "schema": 1}',
        '{"schema": ' + "9" * 5000 + "}",
        "\x00",
        "é",
    ],
)
def test_manifest_garbage_is_one_error(text):
    with pytest.raises(DamagedError):
        Manifest.from_json(text)


def _paths(data, prefix=()):
    for name, value in data.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, name))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"label": "mod 7"}, "decision.label: 'mod 7' is none of its candidates"),
        ({"candidates": []}, "'runs \\+ mod 8' is none of its candidates"),
        (
            {"candidates": [{"label": "runs + mod 8", "predicted_ms": None, "measured_us": None}]},
            "predicted_ms must be a number",
        ),
        ({"candidates": [{"label": "runs + mod 8"}]}, "candidate lacks or does not know"),
    ],
)
def test_the_manifest_names_one_of_its_candidates(store, fields, said):
    data = json.loads((build(store).path / MANIFEST).read_text())
    data["decision"].update(fields)
    data["digest"] = _digest({k: v for k, v in data.items() if k != "digest"})
    with pytest.raises(DamagedError, match=said):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, True, -1.5])
def test_no_field_of_a_manifest_can_break_the_reader(store, value):
    text = (build(store).path / MANIFEST).read_text()
    for path in _paths(json.loads(text)):
        data = json.loads(text)
        inner = data
        for name in path[:-1]:
            inner = inner[name]
        if inner[path[-1]] == value:
            continue
        inner[path[-1]] = value
        if path[0] != "digest":
            data["digest"] = _digest({k: v for k, v in data.items() if k != "digest"})
        try:
            read = Manifest.from_json(json.dumps(data))
        except DamagedError:
            continue
        assert read.to_json()  # accepted: a value that the field may hold


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "a\\b", ".", ""])
def test_manifest_names_stay_inside(store, name):
    artifact = build(store)
    rewrite(artifact, lambda data: data["files"].update({name: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(DamagedError, match="leaves the entry"):
        store.load(KEY)


def test_a_builder_that_fails_leaves_nothing(store):
    def fail(directory):
        (directory / "half").write_text("x")
        raise FileNotFoundError("a tool of the builder")

    with pytest.raises(FileNotFoundError, match="a tool of the builder"):
        store.build_once(KEY, "causal", fail, VERSIONS)
    assert names(store) == []
    assert build(store)


def test_a_builder_may_not_leave_links(store):
    def linked(directory):
        decision = write_standin(directory)
        (directory / "extra").symlink_to("/etc/passwd")
        return decision

    with pytest.raises(ArtifactError, match="a builder left extra, which is no plain file"):
        store.build_once(KEY, "causal", linked, VERSIONS)
    assert names(store) == []


def test_a_decision_must_name_files_that_exist(store):
    def forgetful(directory):
        decision = write_standin(directory)
        (directory / "schedule.txt").unlink()
        return decision

    with pytest.raises(DamagedError, match=r"no digest for \['schedule\.txt'\]"):
        store.build_once(KEY, "causal", forgetful, VERSIONS)


def retune(store, tune, content):
    wanted = ["off", "quick", "full"].index(tune)
    return store.build_once(
        KEY,
        "causal",
        lambda d: write_standin(d, tune=tune, content=content),
        VERSIONS,
        accept=lambda a: ["off", "quick", "full"].index(a.manifest.decision.tune) >= wanted,
    )


def test_a_better_tuned_one_replaces_and_readers_keep_the_old(store):
    old = retune(store, "off", b"off")
    new = retune(store, "quick", b"quick")
    assert new.path != old.path
    assert store.load(KEY) == new == retune(store, "off", b"unused")
    assert old.read("fast/forward.cubin")[:3] == b"off"
    best = retune(store, "full", b"full")
    assert store.load(KEY) == best
    assert new.read("fast/forward.cubin")[:5] == b"quick"
    assert names(store) == sorted([new.path.name, best.path.name]), "one old generation is kept"
    flip(best.path / "kernel.py")
    assert store.try_load(KEY) == new, "the older one is what is left that is sound"


def test_explain_miss(store):
    assert store.explain_miss(KEY) == (
        f"no artifact under key {KEY.short()} in {store.artifacts}: the store is empty"
    )
    build(store)
    build(store, key(dtype="float16", head_dim=64, triton="3.6.0"))
    asked = key(triton="3.10.1")
    text = store.explain_miss(asked, "causal")
    assert text == (
        f"causal: no artifact under key {asked.short()} in {store.artifacts}: the nearest entry, "
        f"causal-nvidia-h200-{KEY.short()}, differs in triton: asked 3.10.1, stored 3.9.0"
    )
    with pytest.raises(CacheMiss, match="triton: asked"):
        store.load(asked)


def test_explain_miss_prefers_the_same_pattern(store):
    build(store, key(mask="a" * 64), pattern="alpha")
    build(store, key(mask="b" * 64), pattern="beta")
    assert "nearest entry, beta-" in store.explain_miss(key(mask="e" * 64), "beta")
    assert "nearest entry, alpha-" in store.explain_miss(key(mask="e" * 64), "alpha")


def test_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEGEN_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert default_root() == tmp_path / "a"
    monkeypatch.delenv("SPARSEGEN_CACHE")
    assert default_root() == tmp_path / "b" / "sparsegen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "sparsegen"


def test_root_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    artifact = build(Store(tmp_path / "link"))
    assert Store(tmp_path / "real").load(KEY).manifest == artifact.manifest
    assert Store(tmp_path / "link").load(KEY) == artifact
    assert read_entry(artifact.path.resolve(), KEY).manifest == artifact.manifest


def test_threads_of_one_process_build_once(store):
    count, results = [], []

    def write(directory):
        count.append(1)
        return write_standin(directory, pause_s=0.02)

    def work():
        results.append(store.build_once(KEY, "causal", write, VERSIONS))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 6 and len(count) == 1
    assert len({r.path for r in results}) == 1


@pytest.mark.parametrize(
    "text, parts",
    [
        ("causal-nvidia-h200-0123456789ab", ("causal-nvidia-h200", "0123456789ab", 1)),
        ("a-0123456789ab-0123456789ab.12", ("a-0123456789ab", "0123456789ab", 12)),
        (".build-0123456789ab-host-1-x", None),
        ("causal-0123456789AB", None),
        ("causal-0123456789ab.0", None),
    ],
)
def test_entry_names(text, parts):
    name = folder.EntryName.parse(text)
    assert (name and (name.name, name.key12, name.generation)) == parts
    assert name is None or str(name) == text


def test_pattern_names_become_safe_folder_names(store):
    artifact = build(store, pattern="../../è vil\n" + "x" * 300)
    assert artifact.path.parent == store.artifacts
    assert len(artifact.path.name) < 120
    assert store.load(KEY).manifest.pattern.startswith("../../è vil\n")
