"""A prepared launch through a stand-in for the driver's library: every byte that a kernel would read."""

from __future__ import annotations

import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsegen.errors import ArtifactError, InputError, ToolchainError
from sparsegen.launch import Call, Job
from sparsegen.launch import signature as sig
from sparsegen.launch.description import LAUNCH, read_description
from sparsegen.launch.driver import Driver, DriverError
from sparsegen.launch.loading import DriverLoaded
from sparsegen.launch.packing import Packed, View
from tests.launch.described import compiled, launches
from tests.launch.fake_driver import FakeLibrary, fake_torch
from tests.launch.faked import Faked, call_of, launched, read, tensors

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
NAMES = ("pointers", "boxes of periods", "hopper", "everything")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return compiled(NAMES, tmp_path_factory.mktemp("binaries"))


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_reads_what_the_call_says(name: str, jobs: dict[str, Job]) -> None:
    job, kernel = jobs[name], Faked(jobs[name])
    given, call = tensors(job), call_of(job)
    with fake_torch(stream=0x77):
        assert kernel(*given, call, "fast") == "fast"
    for folder, seen in launched(job, kernel, given, call, stream=0x77):
        described(job, seen, kernel.library, dict(zip("QKV", given)), folder)


def described(job: Job, seen: Any, library: FakeLibrary, tensors: Any, folder: Path) -> None:
    """Every descriptor is of its tensor: sizes and strides of the driver are innermost first, strides in bytes."""
    found = [p for p in read_description(folder).parameters if p.box]
    assert bool(found) == sig.by_boxes(job.config)
    kinds = dict(job.source.parameters)
    for unit in (job.source, job.source.hopper):
        kinds |= dict(unit.parameters) if unit else {}
    for p in found:
        number, shape, strides = seen[p.name]
        t, (period, *_) = tensors[p.name[0]], sig.described(kinds[p.name])
        b, h, s, d = t.shape
        assert shape == ([b, h, s, d] if period == 1 else [b, h, s // period, period, d])
        rows = [t.stride(2)] if period == 1 else [t.stride(2) * period, t.stride(2)]
        assert strides == [t.stride(0), t.stride(1), *rows, 1]
        one, size = library.maps[number], t.element_size()
        assert (one.address, one.rank) == (t.data_ptr(), len(shape))
        assert one.sizes == tuple(reversed(shape))
        assert one.strides == tuple(n * size for n in reversed(strides[:-1]))
        assert one.box == tuple(reversed(p.box.shape)) and set(one.steps) == {1}
        assert one.rest == (0, p.box.swizzle, 2, 0)  # L2 promotion 128 bytes, zeros beyond the ends


def test_every_call_brings_its_own_addresses(jobs: dict[str, Job]) -> None:
    """Descriptors are written again where the address is another one, and only there."""
    job, kernel = jobs["hopper"], Faked(jobs["hopper"])
    first, second = tensors(job), tensors(job)
    mixed = (first[0], second[1], *first[2:])
    (_, folder, _) = launches(job)[0]
    with fake_torch():
        launch = kernel.prepare(*first[:4], call_of(job))
        for given in (first, first, second, mixed):
            launch(*given)
    library = kernel.library
    counts = {}
    for done, given in zip(library.launched, (first, first, second, mixed)):
        seen = read(job, folder, done.parameters)
        for name, t in zip(("Q", "K", "V", "OUT", "LSE"), given):
            assert seen[name] == t.data_ptr()
        for name, value in seen.items():
            if isinstance(value, tuple):
                assert library.maps[value[0]].address == given["QKV".index(name[0])].data_ptr()
                counts.setdefault(name[0], set()).add(value[0])
    assert [len(counts[n]) for n in "QKV"] == [3, 2, 3]
    assert library.count("cuModuleLoadData") == 1


def test_threads_do_not_mix_their_addresses(jobs: dict[str, Job]) -> None:
    job, kernel = jobs["hopper"], Faked(jobs["hopper"])
    sets = [tensors(job) for _ in range(4)]
    (_, folder, _) = launches(job)[0]
    with fake_torch():
        launch = kernel.prepare(*sets[0][:4], call_of(job))
        launch(*sets[0])

        def many(given: Any) -> None:
            for _ in range(50):
                launch(*given)

        threads = [threading.Thread(target=many, args=(given,)) for given in sets]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    addresses = {tuple(t.data_ptr() for t in given) for given in sets}
    for done in kernel.library.launched:
        seen = read(job, folder, done.parameters)
        assert tuple(seen[n] for n in ("Q", "K", "V", "OUT", "LSE")) in addresses
        for name in (n for n, value in seen.items() if isinstance(value, tuple)):
            assert kernel.library.maps[seen[name][0]].address == seen[name[0]]
    assert len(kernel.library.launched) == 201


@pytest.mark.parametrize("code", [201, 400])
def test_a_new_thread_is_bound_to_the_device(code: int, jobs: dict[str, Job]) -> None:
    """A thread that torch has not bound to a device yet has no context of the driver's."""
    kernel = Faked(jobs["pointers"], codes={"cuLaunchKernel": [code]})
    with fake_torch():
        kernel(*tensors(jobs["pointers"]), Call())
    assert len(kernel.library.launched) == 1 and kernel.library.count("cuCtxSetCurrent") == 2


def test_another_current_device_is_left_as_it_was(jobs: dict[str, Job]) -> None:
    kernel, given = Faked(jobs["pointers"]), tensors(jobs["pointers"])
    with fake_torch() as entered:
        launch = kernel.prepare(*given[:4], Call())
        launch(*given)
        with torch.cuda.device(5):
            launch(*given)
            assert entered[-1] == 5
    assert entered[-4:] == [5, 0, 5, 0] and len(kernel.library.launched) == 2


# ---------------------------------------------------------------------- what a driver refuses


def refused(job: Job, **settings: Any) -> str:
    kernel = Faked(job, **settings)
    with fake_torch(), pytest.raises(ToolchainError) as error:
        kernel(*tensors(job), call_of(job), "fast")
    assert not kernel.library.launched and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("cuModuleLoadData", "attend_forward_hopper cannot be loaded: FAKE_ERROR"),
        ("cuModuleGetFunction", "the binary holds no attend_forward_hopper"),
        ("cuFuncSetAttribute", "bytes of shared memory"),
        ("cuDevicePrimaryCtxRetain", "GPU 0 cannot be used"),
        ("cuTensorMapEncodeTiled", "no tensor descriptor for shape"),
        ("cuLaunchKernel", "cannot be launched as 8 programs: FAKE_ERROR"),
    ],
)
def test_each_failure_is_one_sentence(function: str, words: str, jobs: dict[str, Job]) -> None:
    assert words in refused(jobs["hopper"], codes={function: [1]})


def test_a_failed_descriptor_is_written_again(jobs: dict[str, Job]) -> None:
    job = jobs["hopper"]
    kernel, given = Faked(job, codes={"cuTensorMapEncodeTiled": [0, 0, 1]}), tensors(job)
    with fake_torch():
        launch = kernel.prepare(*given[:4], call_of(job))
        with pytest.raises(DriverError):
            launch(*given)
        launch(*given)
    assert len(kernel.library.launched) == 1 and len(kernel.library.maps) == 3


def test_a_driver_that_is_too_old(jobs: dict[str, Job]) -> None:
    assert "knows no tensor descriptors" in refused(
        jobs["hopper"], absent=("cuTensorMapEncodeTiled",)
    )
    with pytest.raises(ToolchainError, match="has no cuLaunchKernel: update it"):
        Driver(FakeLibrary({}, absent=("cuLaunchKernel",)))


def test_more_threads_than_the_gpu_gives(jobs: dict[str, Job]) -> None:
    assert "needs 384 threads a program, this GPU gives 256" in refused(jobs["hopper"], threads=256)


def test_a_binary_that_takes_other_parameters(jobs: dict[str, Job]) -> None:
    """The driver says what the binary declares; a driver before 12.4 cannot be asked."""
    job = jobs["pointers"]
    kernel = Faked(job)
    for sizes in kernel.library.sizes.values():
        sizes.append(4)
    with fake_torch(), pytest.raises(ToolchainError, match="parameters of .* build it again"):
        kernel(*tensors(job), Call())
    older = Faked(job, absent=("cuFuncGetParamInfo",))
    with fake_torch():
        older(*tensors(job), Call())
    assert len(older.library.launched) == 1


def test_a_description_of_other_arguments(jobs: dict[str, Job], tmp_path: Path) -> None:
    job = jobs["pointers"]
    for path in job.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = read_description(tmp_path)
    other = replace(found, parameters=(*found.parameters[1:], found.parameters[0]))
    (tmp_path / LAUNCH).write_text(other.to_json())
    with pytest.raises(ArtifactError, match="takes other arguments than this version gives"):
        DriverLoaded(job.source, job.config, "fast", tmp_path, 0, driver=Driver(FakeLibrary({})))
    (tmp_path / LAUNCH).unlink()
    with pytest.raises(ArtifactError, match="launch.json is missing; build the artifact again"):
        DriverLoaded(job.source, job.config, "fast", tmp_path, 0, driver=Driver(FakeLibrary({})))


def test_programs_that_run_at_once(jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    chip = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    with fake_torch():
        assert Faked(jobs["hopper"]).loaded("fast", 0, 0).resident == 264


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, 0.5, None])
def test_a_value_that_does_not_fit(value: Any, jobs: dict[str, Job]) -> None:
    description = read_description(jobs["pointers"].directory)
    values = [0 if p.kind != "float32" else 1.0 for p in description.parameters]
    names = [p.name for p in description.parameters]
    values[names.index("q_rows")] = value
    with pytest.raises(InputError, match="argument q_rows"):
        Packed(description).fill(values)


def test_a_view_that_does_not_fit(jobs: dict[str, Job]) -> None:
    description = read_description(jobs["hopper"].directory)
    good = View(0, (2, 4, 8, 128), (4096, 1024, 128, 1))
    for view in (View(0, (4, 8, 128), (1024, 128, 1)), replace(good, strides=(4096, 1024, 128, 2))):
        kinds = {"descriptor": view, "float32": 1.0}
        with pytest.raises(InputError, match="Q_DESC0: shape"):
            Packed(description).fill([kinds.get(p.kind, 0) for p in description.parameters])
    with pytest.raises(InputError, match="takes .* arguments, got 1"):
        Packed(description).fill([0])
    with pytest.raises(InputError, match="the first 7 arguments"):
        Packed(description).moving(7)


@pytest.mark.parametrize("name", ["boxes of periods", "everything"])
def test_a_launch_of_all_arguments_reads_the_same(name: str, jobs: dict[str, Job]) -> None:
    """``run`` takes everything anew each time; ``prepare`` keeps what does not change."""
    job, kernel, other = jobs[name], Faked(jobs[name]), Faked(jobs[name])
    given, call = tensors(job), call_of(job)
    asked: list[Any] = []

    def note(self: DriverLoaded, programs: int, args: Any, moving: int) -> Any:
        asked.append((self, programs, args))
        return prepare(self, programs, args, moving)

    prepare = DriverLoaded.prepare
    with fake_torch(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DriverLoaded, "prepare", note)
        kernel(*given, call, "fast")
    with fake_torch():
        binaries = [other.loaded("fast", 0, i) for i in range(len(asked))]
        for _ in range(2):
            for loaded, (_, programs, args) in zip(binaries, asked):
                views = [
                    replace(a, base=given[a.moves], moves=None) if isinstance(a, View) else a
                    for a in args[5:]
                ]
                loaded.run(programs, (*given, *views, *loaded.constants))
    numbers = range(len(asked))
    for i, (_, folder, _) in zip(numbers, launches(job)):
        wanted = read(job, folder, kernel.library.launched[i].parameters)
        for again in (0, len(asked)):
            seen = read(job, folder, other.library.launched[i + again].parameters)
            for n, value in wanted.items():
                if isinstance(value, tuple):
                    maps = kernel.library.maps[value[0]], other.library.maps[seen[n][0]]
                    assert maps[0] == maps[1] and seen[n][1:] == value[1:]
                elif not n.endswith("_LENGTHS") and n != "KV_STARTS":  # room of its own
                    assert seen[n] == value, n
