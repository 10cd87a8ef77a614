"""Descriptions of AMD's binaries against what the binaries, their assembler's text and Triton's own launcher say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from sparsegen.errors import ToolchainError
from sparsegen.launch import Job, code_object
from sparsegen.launch import signature as sig
from sparsegen.launch.binary import read_metadata
from sparsegen.launch.description import (
    BYTES,
    HIP,
    INT32,
    INT64,
    POINTER,
    Description,
    Parameter,
    describe,
    read_description,
)
from tests.launch.described import ON_AMD, compiled, job_of, launches

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return compiled(ON_AMD, tmp_path_factory.mktemp("binaries"))


def found_in(job: Job) -> list[tuple[bytes, Description, str]]:
    """(binary, description, entry) of every launch."""
    return [
        ((folder / f"{entry}.hsaco").read_bytes(), read_description(folder), entry)
        for _, folder, entry in launches(job)
    ]


@pytest.fixture(scope="module")
def one(jobs: dict[str, Job]) -> tuple[bytes, Description]:
    ((binary, description, _),) = found_in(jobs["amd everything"])
    return binary, description


ASSEMBLY = """
    import sys
    from pathlib import Path
    from sparsegen.launch import binary
    from tests.launch.described import job_of, launches
    binary.KEPT = (".amdgcn",)
    if __name__ == "__main__":
        job = job_of(sys.argv[1], Path(sys.argv[2]))
        try:
            binary.compile_kernel(job.source, job.config, job.variant, job.gpu, job.directory)
        except FileNotFoundError:  # this process keeps nothing but the assembler's text
            pass
"""


@pytest.mark.parametrize("name", ["amd float16", "amd everything"])
def test_the_reader_finds_what_the_assembler_was_given(
    name: str, jobs: dict[str, Job], tmp_path: Path
) -> None:
    """The compiler writes the same metadata as YAML into the text that it hands to the assembler."""
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", dedent(ASSEMBLY), name, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    (text,) = [p.read_text() for p in tmp_path.rglob("*.amdgcn")] or [done.stderr]
    written = text.split(".amdgpu_metadata")[1].split(".end_amdgpu_metadata")[0].strip()
    wanted = {k[".name"]: k for k in yaml.safe_load(written)["amdhsa.kernels"]}
    (folder,) = [f for _, f, _ in launches(jobs[name])]
    (binary,) = [p.read_bytes() for p in folder.glob("*.hsaco")]
    assert code_object.kernels(binary) == wanted and len(wanted) == 1


@pytest.mark.parametrize("name", ON_AMD)
def test_it_is_what_the_binary_takes(name: str, jobs: dict[str, Job]) -> None:
    job = jobs[name]
    for binary, description, entry in found_in(job):
        code_object.check(binary, description)
        kernel = code_object.kernels(binary)[entry]
        assert [BYTES[k] for k in description.binary_kinds()] == [
            a[".size"] for a in kernel[".args"]
        ]
        assert (description.platform, description.kernel) == (HIP, entry)
        assert description.threads == 64 * int(job.config["num_warps"])
        assert kernel[".wavefront_size"] == 64 and kernel[".group_segment_fixed_size"] == 0
        assert 0 < description.shared_bytes <= job.gpu.shared_bytes


TRITON = """
    import json, re, sys
    signature, meta = json.load(sys.stdin)
    from triton.backends.amd import driver
    try:
        from triton.backends.driver import expand_signature
    except ImportError:  # Triton 3.6 writes a launcher in C: what it hands over
        text = driver.make_launcher({}, signature, 64, meta)
        line = re.search(r"static void _launch\\((.*)\\) \\{", text)[1]
        kinds = dict(word.strip().rsplit(" ", 1)[::-1] for word in line.split(","))
        kinds |= {"global_scratch": "hipDeviceptr_t"}
        given = re.search(r"void \\*params\\[\\] = \\{ (.*) \\};", text)[1].split(", ")
        kinds = [kinds[name.removeprefix("&")] for name in given]
    else:
        found = expand_signature(signature.values(), meta, "tensordesc")
        kinds = [driver.ty_to_cpp(kind) for kind in found if kind != "constexpr"]
        kinds += ["hipDeviceptr_t"] * 2
    sizes = {"hipDeviceptr_t": 8, "double": 4, "uint32_t": 4, "int32_t": 4, "int64_t": 8}
    print(json.dumps([sizes[kind] for kind in kinds]))
"""


@pytest.mark.parametrize("name", ON_AMD)
def test_it_is_what_tritons_launcher_passes(
    name: str, jobs: dict[str, Job], tmp_path: Path
) -> None:
    job, library = jobs[name], tmp_path / "libamdhip64.so"
    library.write_text("")  # Triton looks whether it is there, and does not open it here
    for number, folder, _ in launches(job):
        signature = sig.signature(job.source, job.config, job.variant, number)
        done = subprocess.run(
            [sys.executable, "-c", dedent(TRITON)],
            input=json.dumps([signature, None]),
            env=os.environ | {"TRITON_LIBHIP_PATH": str(library)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        kinds = read_description(folder).binary_kinds()
        assert [BYTES[kind] for kind in kinds] == json.loads(done.stdout)


# ---------------------------------------------------------------------- descriptions that are wrong


def changed(description: Description, name: str, kind: str) -> Description:
    parameters = tuple(
        Parameter(p.name, kind) if p.name == name else p for p in description.parameters
    )
    assert parameters != description.parameters
    return replace(description, parameters=parameters)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: replace(d, parameters=d.parameters[1:]),
            "takes 42 parameters of 236 bytes, .* names 41 parameters of 228 bytes",
        ),
        (lambda d: changed(d, "NULL_K", INT64), "they differ from NULL_K on"),
        (lambda d: changed(d, "q_start", POINTER), "they differ from q_start on"),
        (lambda d: changed(d, "joins", INT64), "they differ from joins on"),
        (lambda d: changed(d, "k_start", INT32), "they differ from k_start on"),
        (
            lambda d: replace(d, threads=128),
            "is for 256 threads a program, its description names 128",
        ),
        (
            lambda d: replace(d, threads=512),
            "is for 256 threads a program, its description names 512",
        ),
        (lambda d: replace(d, kernel="attend"), "the binary holds no attend; build it again"),
    ],
)
def test_a_wrong_description_is_an_error(
    change: Any, words: str, one: tuple[bytes, Description]
) -> None:
    binary, description = one
    with pytest.raises(ToolchainError, match=words) as error:
        code_object.check(binary, change(description))
    assert "\n" not in str(error.value) and "build it again" in str(error.value)


def test_an_argument_of_another_kind_is_an_error(one: tuple[bytes, Description]) -> None:
    binary, description = one
    other = binary.replace(b"\xadglobal_buffer", b"\xadglobal_bugger", 1)
    with pytest.raises(ToolchainError, match="takes a global_bugger, which the launcher"):
        code_object.check(other, description)


def test_hidden_arguments_are_hips_own(one: tuple[bytes, Description]) -> None:
    """What stands behind the kernel's own arguments is filled in by HIP and given by nobody."""
    binary, description = one
    shorter = replace(description, parameters=description.parameters[:-1])
    # the last two are scratch pointers; one of them made a hidden one
    last = binary.rindex(b"\xadglobal_buffer")
    hidden = binary[:last] + b"\xadhidden_none__" + binary[last + 14 :]
    with pytest.raises(ToolchainError, match="takes 41 parameters"):
        code_object.check(hidden, description)
    with pytest.raises(ToolchainError, match="they differ from "):
        code_object.check(hidden, shorter)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: b"", "no 64-bit ELF file"),
        (lambda b: b[:50], "unpack_from requires"),
        (lambda b: b"\x7fELF\x01" + b[5:], "no 64-bit ELF file"),
        (lambda b: b.replace(b"AMDGPU\0", b"NVIDIA\0"), "no note NT_AMDGPU_METADATA"),
        (lambda b: b.replace(b"amdhsa.kernels", b"amdhsa.colonel"), "amdhsa.kernels"),
        (lambda b: b.replace(b"\xae.address_space", b"\xc1.address_space", 1), "byte 0xc1"),
        (
            lambda b: b.replace(b"\xae.address_space", b"\xdb.address_space", 1),
            "ends within a text",
        ),
    ],
)
def test_a_damaged_binary_is_one_sentence(
    damage: Any, words: str, one: tuple[bytes, Description]
) -> None:
    binary, description = one
    assert damage(binary) != binary
    with pytest.raises(ToolchainError, match=words) as error:
        code_object.check(damage(binary), description)
    assert str(error.value).startswith("the binary of attend_forward is no code object of AMD's (")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xc0", None),
        (b"\xc2", False),
        (b"\xc3", True),
        (b"\xcc\xff", 255),
        (b"\xcd\x01\x00", 256),
        (b"\xce\x00\x01\x00\x00", 65_536),
        (b"\xcf" + bytes(7) + b"\x05", 5),
        (b"\xcd\x80\x01", 0x8001),
        (b"\xce\xff\xff\xff\xff", (1 << 32) - 1),
        (b"\xcf" + b"\xff" * 8, (1 << 64) - 1),
        (b"\xd0\xff", -1),
        (b"\xd1\xff\xfe", -2),
        (b"\xd2\xff\xff\xff\xfe", -2),
        (b"\xd3" + b"\xff" * 8, -1),
        (b"\xa2ab", "ab"),
        (b"\xd9\x02ab", "ab"),
        (b"\xda\x00\x02ab", "ab"),
        (b"\x92\x01\xa1x", [1, "x"]),
        (b"\xdc\x00\x02\x01\x02", [1, 2]),
        (b"\xdd\x00\x00\x00\x01\x90", [[]]),
        (b"\x82\xa1a\x01\xa1b\x80", {"a": 1, "b": {}}),
        (b"\xde\x00\x01\xa1a\x91\x02", {"a": [2]}),
    ],
)
def test_messagepack(data: bytes, value: Any) -> None:
    found = code_object._unpack(data)
    assert found == value and type(found) is type(value)
    with pytest.raises(ValueError, match="1 bytes behind"):
        code_object._unpack(data + b"\0")


# ---------------------------------------------------------------------- what is refused when it is described


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_ctas", 2),
        ("launch_cooperative_grid", True),
        ("launch_pdl", True),
        ("global_scratch_size", 64),
        ("profile_scratch_size", 64),
    ],
)
def test_what_the_launcher_does_not_do_is_refused(
    field: str, value: Any, jobs: dict[str, Job]
) -> None:
    job = jobs["amd float16"]
    metadata = read_metadata(job.directory, "attend_forward") | {field: value}
    with pytest.raises(ToolchainError, match=field):
        describe(sig.signature(job.source, job.config, "fast"), metadata)


def test_descriptors_are_refused_by_name(jobs: dict[str, Job], tmp_path: Path) -> None:
    job = jobs["amd float16"]
    metadata = read_metadata(job.directory, "attend_forward")
    boxes = job_of("boxes", tmp_path)
    with pytest.raises(
        ToolchainError, match="K_DESC0 is a tensor descriptor, .* NVIDIA's GPUs alone"
    ):
        describe(sig.signature(boxes.source, boxes.config, "fast"), metadata)


def test_another_platform_is_refused(jobs: dict[str, Job]) -> None:
    metadata = read_metadata(jobs["amd float16"].directory, "attend_forward")
    with pytest.raises(ToolchainError, match="compiled for 'metal', which has no launcher"):
        describe({}, metadata | {"target": {"backend": "metal", "warp_size": 32}})
