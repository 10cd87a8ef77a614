"""Kernels compiled for GPU types that are not here, in child processes: no GPU, no driver, no interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparsegen.codegen import KernelSource, load_template, render
from sparsegen.launch import Job, Outcome, compile_many
from sparsegen.launch.binary import from_record, read_metadata, record
from sparsegen.schedule.build import build
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

ROOT = Path(__file__).parents[2]
SMALL = Problem(head_dim=16, dtype="float16")
MASKS = {
    "causal": "causal",
    "streaming": {"all_of": ["causal", {"any_of": [{"window": {"size": 100}}, {"sink": {"tokens": 4}}]}]},
    "bigbird": {"any_of": [{"window": {"radius": 8}}, {"random_blocks": {"block": 16, "per_row": 2, "seed": 1}}]},
}  # fmt: skip
PAIRS = [(name, gpu) for gpu in ("h200", "a100", "mi300x") for name in MASKS] + [("causal", "b200")]
TIGHT = {"a10g-64k": replace(find_gpu("a10g"), shared_bytes=65_536), "a10g": find_gpu("a10g")}
WIDE = {"192-128": Problem(head_dim=192, value_dim=128), "256-256": Problem(head_dim=256)}


def source_of(mask: object, problem: Problem) -> KernelSource:
    pattern = Pattern.from_dict({"name": "p", "mask": mask})
    return render(pattern, build(pattern, problem), problem)


def job(mask: object, problem: Problem, gpu: object, folder: Path, variant: str = "fast") -> Job:
    config = load_template().default(problem, gpu)
    return Job(source_of(mask, problem), config, variant, gpu, folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All that these tests look at, compiled at once."""
    root = tmp_path_factory.mktemp("binaries")
    jobs: dict[str, Job] = {}
    for name, gpu in PAIRS:
        label = f"{name} {gpu}"
        jobs[label] = job(MASKS[name], SMALL, find_gpu(gpu), root / label)
    for variant in ("fast", "general"):
        label = f"d128 {variant}"
        jobs[label] = job("causal", Problem(), find_gpu("h200"), root / label, variant)
    for dims, problem in WIDE.items():
        for limit, gpu in TIGHT.items():
            jobs[f"{dims} {limit}"] = job("causal", problem, gpu, root / dims / limit)
    return dict(zip(jobs, compile_many(list(jobs.values()))))


@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_three_patterns_for_four_gpus(name: str, gpu: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[f"{name} {gpu}"]
    assert outcome.error == "" and outcome.binary is not None
    binary, kind = outcome.binary, find_gpu(gpu)
    code = "cubin" if kind.backend == "cuda" else "hsaco"
    assert {f"attend_forward.{code}", "attend_forward.json"} <= set(binary.files)
    assert sorted(p.name for p in binary.directory.iterdir()) == list(binary.files)
    target = read_metadata(binary.directory, binary.entry)["target"]
    assert (target["backend"], target["arch"]) == (kind.backend, kind.arch)
    assert 0 < binary.shared_bytes <= kind.shared_bytes
    if kind.backend == "cuda":
        assert 16 <= binary.registers <= 255 and binary.spill_bytes == 0
        assert f".target sm_{kind.arch}" in (binary.directory / "attend_forward.ptx").read_text()
    assert from_record(record(binary)) == binary


@pytest.mark.parametrize("variant", ["fast", "general"])
def test_the_default_of_the_main_case_spills_nothing(
    variant: str, outcomes: dict[str, Outcome]
) -> None:
    """bf16, head_dim 128 on an H200: what everybody launches first."""
    binary = outcomes[f"d128 {variant}"].binary
    assert binary is not None and binary.spill_bytes == 0 and binary.registers <= 255
    ptx = (binary.directory / "attend_forward.ptx").read_text()
    assert ("cp.async.bulk.tensor" in ptx) == (variant == "fast")  # TMA where it is asked for


# ---------------------------------------------------------------------- tight limits (B04)
@pytest.mark.parametrize("limit", TIGHT)
@pytest.mark.parametrize("dims", WIDE)
def test_the_default_fits_small_shared_memory(
    dims: str, limit: str, outcomes: dict[str, Outcome]
) -> None:
    """99 KiB and 64 KiB: the template says that its default fits, and the binary does."""
    gpu, problem = TIGHT[limit], WIDE[dims]
    template, outcome = load_template(), outcomes[f"{dims} {limit}"]
    assert outcome.job.config == template.default(problem, gpu)
    assert template.invalid(outcome.job.config, problem, gpu) is None
    assert outcome.binary is not None and outcome.binary.shared_bytes <= gpu.shared_bytes


# ---------------------------------------------------------------------- compilers that refuse, crash or hang (B03)
@pytest.fixture
def refusing_ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles_anew: None) -> Path:
    """An assembler that does not know the architecture, where Triton looks for one."""
    tool = tmp_path / "ptxas"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo "Cuda compilation tools, release 12.8, V12.8.93"; exit 0;; esac\n'
        "echo \"ptxas fatal   : Value 'sm_80' is not defined for option 'gpu-name'\" >&2\n"
        "exit 255\n"
    )
    tool.chmod(0o755)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(name, str(tool))
    return tool


def test_an_assembler_that_refuses_the_architecture(refusing_ptxas: Path, tmp_path: Path) -> None:
    """Its own words reach the user, with the kernel, the GPU and the tool that said them."""
    (outcome,) = compile_many([job("causal", SMALL, find_gpu("a100"), tmp_path / "out")])
    assert outcome.binary is None
    for words in (
        "attend_forward (fast, ",
        "for nvidia-a100",
        "ptxas fatal   : Value 'sm_80' is not defined for option 'gpu-name'",
        str(refusing_ptxas),
    ):
        assert words in outcome.error, outcome.error
    assert not (tmp_path / "out" / "attend_forward.cubin").exists()


def cli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "sparsegen", *words], env=env, capture_output=True, text=True, timeout=280
    )  # fmt: skip


def test_a_refusing_assembler_is_one_message_with_a_hint(
    refusing_ptxas: Path, cache: Path, tmp_path: Path
) -> None:
    pattern = tmp_path / "tiny.yaml"
    pattern.write_text("name: tiny\nmask: causal\nproblem: {head_dim: 16}\n")
    done = cli("compile", str(pattern), "--gpu", "a100")
    assert done.returncode == 1 and "CompileError: tiny (fast) for nvidia-a100" in done.stderr
    assert len(done.stderr.splitlines()) < 20, "an assembler's listing is not a message"
    assert "TRITON_PTXAS_PATH" in done.stderr or "newer triton" in done.stderr


def broken(text: str, folder: Path) -> Job:
    good = job("causal", SMALL, find_gpu("a100"), folder)
    return replace(good, source=replace(good.source, text=text))


def test_a_compiler_that_crashes_takes_only_its_own_job(tmp_path: Path) -> None:
    """One worker, four jobs: it exits, it segfaults, it refuses, and then compiles what is fine."""
    seen: list[str] = []
    jobs = [
        broken("import os\nos._exit(3)\n", tmp_path / "exit"),
        broken("import ctypes\nctypes.string_at(0)\n", tmp_path / "segfault"),
        broken("attend_forward = None\n", tmp_path / "refused"),
        job("causal", SMALL, find_gpu("a100"), tmp_path / "fine"),
    ]
    outcomes = compile_many(jobs, workers=1, done=lambda o: seen.append(o.job.directory.name))
    assert [o.job for o in outcomes] == jobs and seen == ["exit", "segfault", "refused", "fine"]
    assert [o.error for o in outcomes[:2]] == [
        "compiler died with exit code 3",
        "compiler died with exit code -11",
    ]
    assert outcomes[2].error and outcomes[2].binary is None
    assert outcomes[3].error == "" and outcomes[3].binary is not None


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path) -> None:
    started = time.monotonic()
    hanging = broken("import time\ntime.sleep(600)\n", tmp_path / "hang")
    (outcome,) = compile_many([hanging], timeout_s=2.0)
    assert outcome.binary is None and outcome.error == "took over 2 s"
    assert time.monotonic() - started < 60


def test_a_missing_triton_is_said_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('no triton here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (outcome,) = compile_many([job("causal", SMALL, find_gpu("a100"), tmp_path / "out")])
    assert re.search(r"pip install 'triton>=3\.6'", outcome.error), outcome.error


def test_no_jobs_are_no_processes() -> None:
    assert compile_many([]) == []
