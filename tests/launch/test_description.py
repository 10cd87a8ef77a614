"""What is written beside a binary against what the binary, its PTX and Triton's own launcher say."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from sparsegen.errors import ArtifactError, ToolchainError
from sparsegen.launch import Job
from sparsegen.launch import signature as sig
from sparsegen.launch.binary import read_metadata
from sparsegen.launch.description import (
    BYTES,
    DESCRIPTOR,
    LAUNCH,
    Description,
    describe,
    read_description,
)
from tests.launch.described import KERNELS, compiled, launches
from tests.launch.fake_driver import ptx_parameters

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return compiled(KERNELS, tmp_path_factory.mktemp("binaries"))


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_what_the_binary_takes(name: str, jobs: dict[str, Job]) -> None:
    """PTX declares the parameters and threads: what the assembler read, not what we or Triton say about it."""
    for _, folder, entry in launches(jobs[name]):
        found, ptx = read_description(folder), (folder / f"{entry}.ptx").read_text()
        declared = ptx_parameters(ptx)
        assert [BYTES[kind] for kind in found.binary_kinds()] == [size for size, _ in declared]
        assert all(align <= (64 if size == 128 else 8) for size, align in declared)
        assert f".reqntid {found.threads}\n" in ptx and found.kernel == entry
        boxes = [p for p in found.parameters if p.kind == DESCRIPTOR]
        assert bool(boxes) == ("tensorMap" in ptx or "cp.async.bulk.tensor" in ptx)


TRITON = """
    import json, sys, re
    signature, meta = json.load(sys.stdin)
    from triton.backends.nvidia import driver
    try:
        from triton.backends.driver import expand_signature
    except ImportError:  # Triton 3.6 writes a launcher in C: its function's parameters
        text = driver.make_launcher({}, signature, meta)
        line = re.search(r"static void _launch\\((.*)\\) \\{", text)[1]
        kinds = [word.rsplit(" ", 1)[0].strip() for word in line.split(",")]
        kinds = kinds[kinds.index("CUfunction") + 1:]
        kinds = kinds[2:] + kinds[:2]  # scratch memory stands first there, and last in the binary
        assert re.search(r"&global_scratch, &profile_scratch \\}", text)
    else:
        found = expand_signature(signature.values(), meta, "nvTmaDesc")
        kinds = [driver.ty_to_cpp(kind) for kind in found if kind != "constexpr"]
        kinds += ["CUdeviceptr"] * 2
    sizes = {"CUdeviceptr": 8, "CUtensorMap": 128, "double": 4, "uint32_t": 4,
             "int32_t": 4, "int64_t": 8}
    print(json.dumps([sizes[kind] for kind in kinds]))
"""


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_what_tritons_launcher_passes(name: str, jobs: dict[str, Job]) -> None:
    from textwrap import dedent

    job = jobs[name]
    for number, folder, entry in launches(job):
        signature = sig.signature(job.source, job.config, job.variant, number)
        meta = read_metadata(folder, entry)["tensordesc_meta"]
        done = subprocess.run(
            [sys.executable, "-c", dedent(TRITON)],
            input=json.dumps([signature, meta]),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        kinds = read_description(folder).binary_kinds()
        assert [BYTES[kind] for kind in kinds] == json.loads(done.stdout)


@pytest.mark.parametrize("name", [n for n in KERNELS if n not in ("pointers", "general")])
def test_boxes_are_tritons(name: str, jobs: dict[str, Job]) -> None:
    """Triton numbers the types of elements in its own way and turns them; ours are the driver's from the start."""
    job, seen = jobs[name], 0
    for _, folder, entry in launches(job):
        metas = read_metadata(folder, entry)["tensordesc_meta"] or []
        boxes = [p.box for p in read_description(folder).parameters if p.box]
        to_driver = {i: i for i in range(16)} | {8: 10, 9: 8, 10: 9}
        assert [
            (m["swizzle"], m["elem_size"], to_driver[m["elem_type"]], tuple(m["block_size"]))
            for m in metas
        ] == [(b.swizzle, b.element_bytes, b.element, b.shape) for b in boxes]
        seen += len(boxes)
    assert seen


def test_json_and_back(jobs: dict[str, Job]) -> None:
    for job in jobs.values():
        for _, folder, _ in launches(job):
            text = (folder / LAUNCH).read_text()
            assert Description.from_json(text).to_json() == text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 1}, "schema 1"),
        ({"platform": "metal"}, "platform 'metal'"),
        ({"platform": "hip"}, "tensor descriptors on AMD's GPUs"),
        ({"threads": 0}, "0 is not within 1..1024"),
        ({"threads": True}, "True is not within"),
        ({"shared_bytes": 1 << 30}, "is not within"),
        ({"kernel": 3}, "kernel 3"),
        ({"more": 1}, "expected the fields"),
        ({"parameters": [{"name": "a", "kind": "int7", "box": None}]}, "int7"),
        ({"parameters": [{"name": "a", "kind": "descriptor", "box": None}]}, "parameter"),
        ({"parameters": [{"name": "a", "kind": "int32"}]}, "expected the fields"),
        ({"parameters": 3}, "not iterable"),
    ],
)
def test_a_damaged_one_is_one_sentence(change: Any, words: str, jobs: dict[str, Job]) -> None:
    data = json.loads((jobs["boxes"].directory / LAUNCH).read_text()) | change
    with pytest.raises(ArtifactError, match=words) as error:
        Description.from_json(json.dumps(data), "here/launch.json")
    assert str(error.value).startswith("here/launch.json") and "build it again" in str(error.value)
    with pytest.raises(ArtifactError, match="no launch description"):
        Description.from_json("[" * 100_000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_ctas", 2),
        ("launch_cooperative_grid", True),
        ("launch_pdl", True),
        ("global_scratch_size", 64),
        ("profile_scratch_size", 64),
        ("tensordesc_meta", []),
    ],
)
def test_what_the_launcher_does_not_do_is_refused(
    field: str, value: Any, jobs: dict[str, Job]
) -> None:
    job = jobs["boxes"]
    metadata = read_metadata(job.directory, "attend_forward") | {field: value}
    with pytest.raises(ToolchainError, match="descriptor" if "desc" in field else field):
        describe(sig.signature(job.source, job.config, "fast"), metadata)
