"""A prepared launch through a stand-in for HIP's runtime: every byte that a kernel would read on an AMD GPU."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsegen.errors import ArtifactError, InputError, ToolchainError
from sparsegen.launch import Call, Job, loading
from sparsegen.launch.description import LAUNCH, Box, read_description
from sparsegen.launch.driver import Driver, DriverError
from sparsegen.launch.hip import HipDriver
from sparsegen.launch.loading import DriverLoaded
from tests.launch.described import compiled, launches
from tests.launch.fake_driver import FakeHip, FakeLibrary, fake_torch
from tests.launch.faked import Faked, call_of, launched, read, tensors

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
NAMES = ("amd float16", "amd bfloat16", "amd float32", "amd everything", "amd general")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return compiled([*NAMES, "pointers"], tmp_path_factory.mktemp("binaries"))


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_reads_what_the_call_says(name: str, jobs: dict[str, Job]) -> None:
    job, kernel = jobs[name], Faked(jobs[name])
    given, call = tensors(job), call_of(job)
    with fake_torch(stream=0x77):
        assert kernel(*given, call, job.variant) == job.variant
    assert len(launched(job, kernel, given, call, stream=0x77)) == len(job.source.grids)
    asked = [name for name, *_ in kernel.library.asked]
    wanted = ["hipSetDevice", "hipModuleLoadData", "hipModuleGetFunction", "hipFuncGetAttribute"]
    loads = len(job.source.grids)
    assert asked == [*wanted * loads, *["hipModuleLaunchKernel"] * loads]
    assert not kernel.library.maps


def test_every_call_brings_its_own_addresses(jobs: dict[str, Job]) -> None:
    job, kernel = jobs["amd everything"], Faked(jobs["amd everything"])
    sets = [tensors(job) for _ in range(3)]
    (_, folder, _) = launches(job)[0]
    with fake_torch():
        launch = kernel.prepare(*sets[0][:4], call_of(job))
        for given in sets:
            launch(*given)
    for done, given in zip(kernel.library.launched, sets, strict=True):
        seen = read(job, folder, done.parameters)
        names = ("Q", "K", "V", "OUT", "LSE")
        assert [seen[n] for n in names] == [t.data_ptr() for t in given]
    assert kernel.library.count("hipModuleLoadData") == 1


def test_a_new_thread_and_another_current_device(jobs: dict[str, Job]) -> None:
    """HIP's threads have a current device from the start; a launch goes to the binary's, and leaves the other current."""
    kernel, given = Faked(jobs["amd float16"]), tensors(jobs["amd float16"])
    with fake_torch() as entered:
        launch = kernel.prepare(*given[:4], Call())
        launch(*given)
        thread = threading.Thread(target=lambda: launch(*given))
        thread.start()
        thread.join()
        with torch.cuda.device(5):
            launch(*given)
            assert entered[-1] == 5
    assert entered[-4:] == [5, 0, 5, 0] and len(kernel.library.launched) == 3
    assert kernel.library.count("hipSetDevice") == 1


def test_the_binary_stays_where_it_is(jobs: dict[str, Job]) -> None:
    """HIP is not known to copy what it is given, so it must live as long as the driver."""
    kernel = Faked(jobs["amd float16"])
    with fake_torch():
        kernel(*tensors(jobs["amd float16"]), Call())
    assert kernel.driver._binaries == list(kernel.library.sizes)


def test_programs_that_run_at_once(jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    chip = SimpleNamespace(multi_processor_count=304)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    kernel = Faked(jobs["amd float16"])
    with fake_torch():
        assert kernel.loaded("fast", 0, 0).resident == 608
    (asked,) = [
        a for a in kernel.library.asked if a[0].startswith("hipModuleOccupancyMaxActiveBlocks")
    ]
    description = read_description(jobs["amd float16"].directory)
    assert asked[3:] == (description.threads, description.shared_bytes)


# ---------------------------------------------------------------------- what HIP refuses


def refused(job: Job, **settings: Any) -> str:
    kernel = Faked(job, **settings)
    with fake_torch(), pytest.raises(ToolchainError) as error:
        kernel(*tensors(job), call_of(job), job.variant)
    assert not kernel.library.launched and "\n" not in str(error.value)
    if isinstance(error.value, DriverError):  # torch would find it, and blame what it does next
        assert kernel.library.count("hipGetLastError") == 1
    return str(error.value)


@pytest.mark.parametrize("code", [1, 201, 209, 400])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("hipSetDevice", "GPU 0 cannot be used: FAKE_ERROR"),
        ("hipModuleLoadData", "attend_forward cannot be loaded: FAKE_ERROR"),
        ("hipModuleGetFunction", "the binary holds no attend_forward: FAKE_ERROR"),
        ("hipFuncGetAttribute", "a kernel cannot be asked for its resources: FAKE_ERROR"),
        ("hipModuleLaunchKernel", "cannot be launched as 16 programs: FAKE_ERROR"),
    ],
)
def test_each_failure_is_one_sentence(
    function: str, words: str, code: int, jobs: dict[str, Job]
) -> None:
    assert words in refused(jobs["amd float16"], codes={function: [code]})


def test_a_code_without_a_text(jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeHip, "_hipGetErrorName", lambda self, code: 0)
    said = refused(jobs["amd float16"], codes={"hipSetDevice": [101]})
    assert said == "GPU 0 cannot be used: error 101"


def test_more_threads_than_the_gpu_gives(jobs: dict[str, Job]) -> None:
    job = jobs["amd bfloat16"]
    assert "needs 512 threads a program, this GPU gives 256" in refused(job, threads=256)


def test_a_launch_that_is_too_large(jobs: dict[str, Job]) -> None:
    """HIP's header: fewer than 2^32 threads along an axis."""
    kernel, given = Faked(jobs["amd float16"]), tensors(jobs["amd float16"])
    with fake_torch():
        binary = kernel.loaded("fast", 0, 0)
        programs = (1 << 32) // binary.description.threads
        for start in (binary.run, lambda n, args: binary.prepare(n, args, 5)):
            with pytest.raises(InputError, match="16777216 programs of 256 threads are more"):
                start(programs, [])
        binary._check_size(programs - 1)
        kernel(*given, Call())
    assert len(kernel.library.launched) == 1


def test_no_tensor_descriptors() -> None:
    with pytest.raises(ToolchainError, match="AMD's GPUs take no tensor descriptors"):
        HipDriver(FakeHip({})).encoder(0, Box(6, 2, 3, (1, 1, 64, 64)), (1, 1, 64, 64), (1,))


# ---------------------------------------------------------------------- descriptions and binaries that do not fit


@pytest.fixture
def copied(jobs: dict[str, Job], tmp_path: Path) -> Path:
    return Path(shutil.copytree(jobs["amd float16"].directory, tmp_path / "fast"))


def loaded(job: Job, folder: Path, driver: Driver) -> DriverLoaded:
    with fake_torch():
        return DriverLoaded(job.source, job.config, "fast", folder, 0, driver=driver)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: replace(d, threads=128), "256 threads a program, its description names 128"),
        (lambda d: replace(d, kernel="other"), "the binary holds no other"),
    ],
)
def test_a_wrong_description_is_never_launched(
    change: Any, words: str, jobs: dict[str, Job], copied: Path
) -> None:
    job, library = jobs["amd float16"], FakeHip.of_folder(copied)
    (copied / LAUNCH).write_text(change(read_description(copied)).to_json())
    with pytest.raises(ToolchainError, match=words):
        loaded(job, copied, HipDriver(library))
    assert library.count("hipModuleLoadData") == 0


def test_a_binary_that_takes_other_parameters(jobs: dict[str, Job], copied: Path) -> None:
    """The binary of the general variant, with strides in 64 bits, under the description of the fast one."""
    (path,) = copied.glob("*.hsaco")
    shutil.copyfile(jobs["amd general"].directory / path.name, path)
    with pytest.raises(ToolchainError, match="they differ from stride_qb on; build it again"):
        loaded(jobs["amd float16"], copied, HipDriver(FakeHip.of_folder(copied)))


def test_another_platform(jobs: dict[str, Job], copied: Path) -> None:
    cuda = Driver(FakeLibrary({}))
    with pytest.raises(ArtifactError, match="was built for hip, the GPU here needs cuda"):
        loaded(jobs["amd float16"], copied, cuda)
    job = jobs["pointers"]
    with pytest.raises(ArtifactError, match="was built for cuda, the GPU here needs hip"):
        loaded(job, job.directory, HipDriver(FakeHip({})))


def test_a_file_that_is_missing(jobs: dict[str, Job], copied: Path) -> None:
    (path,) = copied.glob("*.hsaco")
    path.unlink()
    with pytest.raises(ArtifactError, match="attend_forward.hsaco is missing; build the artifact"):
        loaded(jobs["amd float16"], copied, HipDriver(FakeHip({})))


def test_torch_decides_who_launches(jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs["amd float16"]
    made = HipDriver(FakeHip.of_folder(job.directory))
    monkeypatch.setattr(loading, "hip", lambda: made)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with fake_torch():
        given = job.source, job.config, "fast", job.directory, 0
        found = loading.load(*given)
    assert isinstance(found, DriverLoaded) and found.driver is made
