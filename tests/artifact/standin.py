"""A stand-in for the compiler: builds small files from a key, for tests of the store alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sparsegen.artifact.key import ArtifactKey
from sparsegen.artifact.manifest import Considered, Decision, Variant, level_at_least
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ToolchainError, UnsupportedError

VERSIONS = {
    "python": "3.11.7",
    "sparsegen": "0.1.0",
    "triton": "3.9.0",
    "torch": "2.13.0+cpu",
    "ptxas": "12.8",
}
KEY = ArtifactKey(
    mask="c0ffee" + "0" * 58,
    head_rules="all",
    max_position=None,
    min_position=None,
    align="bottom_right",
    scale=None,
    softcap=None,
    alibi=False,
    sink_logits=False,
    null_key=False,
    head_dim=128,
    value_dim=128,
    heads=8,
    kv_heads=8,
    dtype="bfloat16",
    gpu="nvidia-h200",
    backend="cuda",
    arch=90,
    template="forward",
    template_digest="1" * 64,
    code="0.1.0+0123456789ab",
    triton="3.9.0",
    torch="2.13",
)


def key(**changes) -> ArtifactKey:
    return replace(KEY, **changes)


def write_standin(
    directory: Path,
    *,
    content: bytes = b"cubin",
    pause_s: float = 0.0,
    tune: str = "off",
    before: Callable[[int], object] = lambda number: None,
) -> Decision:
    """Write what a compiler would, in five files with a pause before each; ``before`` is told the number of each."""
    files = {
        "kernel.py": b"# generated\n",
        "schedule.txt": b"one segment\n",
        "fast/forward.cubin": content * 1000,
        "fast/forward.json": b"{}",
        "general/forward.cubin": content * 900,
    }
    for number, (name, data) in enumerate(files.items()):
        before(number)
        time.sleep(pause_s)
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return Decision(
        label="runs + mod 8",
        candidates=(Considered("runs + mod 8", 0.2, None), Considered("runs", 2.0, None)),
        predicted_for="1024 queries, 1024 keys, 8 heads of 128 in bfloat16, tiles 128x64",
        config=LaunchConfig.of({"BLOCK_M": 128, "BLOCK_N": 64, "tma": True, "order": "heavy"}),
        chosen_by="template default" if tune == "off" else "study",
        tune=tune,
        variants=(
            Variant(
                "fast",
                "strides are multiples of 16 bytes",
                168,
                0,
                98304,
                ("fast/forward.cubin", "fast/forward.json"),
            ),
            Variant("general", "always", None, None, None, ("general/forward.cubin",)),
        ),
        schedule="schedule.txt",
        source="kernel.py",
        problem={"head_dim": 128, "lengths": [[1024, 1024]]},
    )


def build(store, key=KEY, pattern="causal", **options):
    """Build ``key`` into ``store`` with the stand-in."""
    versions = {**VERSIONS, "triton": key.triton, "torch": f"{key.torch}.0+cpu"}
    return store.build_once(key, pattern, lambda d: write_standin(d, **options), versions)


def build_in_process(root: str, rounds: int, start, results) -> None:
    """Worker of the race tests: every round waits for all, then builds the round's key."""
    try:
        from sparsegen.artifact.store import Store

        for number in range(rounds):
            start.wait(60)
            got = build(Store(Path(root) / str(number)), pause_s=0.002)
            results.put((number, str(got.path), got.manifest.files["fast/forward.cubin"].sha256))
    except BaseException as error:
        results.put((-1, "", repr(error)))
        sys.exit(1)


def build_without_locks(root: str, rounds: int, start, results) -> None:
    """Like ``build_in_process`` on a file system that has no locks."""
    import errno

    import filelock

    def refuse(*arguments, **options):
        raise OSError(errno.ENOLCK, "no locks available")

    filelock.FileLock.acquire = refuse
    build_in_process(root, rounds, start, results)


def build_and_tell(root: str, key: ArtifactKey, ready, pause_s: float) -> None:
    """Say that the build begins, then build: a victim for the kill tests."""
    from sparsegen.artifact.store import Store

    store = Store(root)
    ready.set()
    build(store, key, pause_s=pause_s)


def build_and_halt(root: str, key: ArtifactKey, ready, at: int, go) -> None:
    """Build up to file number ``at``, say so, and go on when told."""
    from sparsegen.artifact.store import Store

    def before(number: int) -> None:
        if number == at:
            ready.set()
            assert go.wait(60)

    build(Store(root), key, before=before)


class StandinBuilder:
    """Builds like ``write_standin``; refuses the patterns it is told to, and counts what it built."""

    def __init__(self, unsupported=(), failing=()):
        self.unsupported, self.failing, self.built = set(unsupported), set(failing), []
        self.triton, self.content = KEY.triton, b"cubin"
        self.outdated = False

    def key(self, request) -> ArtifactKey:
        if request.pattern.name in self.unsupported:
            raise UnsupportedError(f"{request.pattern.name} needs run-time data")
        gpu = request.gpu
        where = {"gpu": gpu.name, "backend": gpu.backend, "arch": gpu.arch}
        return key(mask=request.pattern.digest(), triton=self.triton, **where)

    def versions(self):
        return {**VERSIONS, "triton": self.triton}

    def is_current(self, request, artifact) -> bool:
        return not self.outdated and level_at_least(artifact.manifest.decision.tune, request.tune)

    def build(self, request, directory, progress):
        if request.pattern.name in self.failing:
            raise ToolchainError("the assembler refused it")
        self.built.append((request.pattern.name, request.gpu.name))
        if progress is not None:
            progress(1, 2, "compiled fast")
        return write_standin(directory, content=self.content, tune=request.tune)
