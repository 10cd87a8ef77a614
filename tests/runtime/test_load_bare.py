"""A loaded artifact in a process that has no Triton, no C compiler, no home and no folder that can be written.

Without a GPU the calls end in a stand-in for the driver's library, which reads what a kernel would; with one they run and
are compared with the float64 reference (CASES B12, B33).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparsegen.artifact.build import ensure
from sparsegen.artifact.gradients import GradientCompiler
from sparsegen.artifact.store import Store
from sparsegen.spec.gpu import current_gpu, find_gpu
from sparsegen.spec.pattern import Pattern

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="artifacts need triton")
ROOT = Path(__file__).parents[2]
SOMEONE = 54_321  # a user that no machine knows
PROBLEM = "problem: {head_dim: 64, heads: 4, kv_heads: 2, dtype: float16, lengths: [[512, 512]]}\n"
PATTERNS = {
    "causal": "mask: causal\n",
    "columns": "mask: {all_of: [causal, {any_of: [{window: {size: 64}}, {strided: {stride: 64}}]}]}\n",
    "sinks": "mask: {all_of: [causal, {any_of: [{window: {size: 100}}, {sink: {tokens: 4}}]}]}\nsink_logits: true\n",
}

START = """
    import sys
    sys.modules["triton"] = None  # importing it fails from here on
    from pathlib import Path
    import shutil
    assert not any(map(shutil.which, ("cc", "gcc", "clang")))
    import torch
    import sparsegen
    from sparsegen.spec.gpu import find_gpu

    file, gpu = Path(sys.argv[1]), find_gpu(sys.argv[2])
    pattern = sparsegen.Pattern.from_yaml(file)
    attend = sparsegen.load(pattern, gpu=gpu)
    extras = {"sink_logits": torch.tensor([0.1, 0.2, 0.3, 0.4], device=sys.argv[3])} \\
        if pattern.sink_logits else {}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("patterns")
    for name, text in PATTERNS.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}{PROBLEM}")
    return {name: folder / f"{name}.yaml" for name in PATTERNS}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Path:
    """A cache with the artifacts of all patterns for the GPU here, or for an H200."""
    store = Store(tmp_path_factory.mktemp("cache"))
    gpu = current_gpu() or find_gpu("h200")
    for file in files.values():
        ensure(Pattern.from_yaml(file), None, gpu, store=store)
    if current_gpu() is not None:
        ensure(
            Pattern.from_yaml(files["causal"]), None, gpu, store=store, builder=GradientCompiler()
        )
    return store.root


def child(
    code: str, *words: object, cache: Path, user: int | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """``code`` in a process with no HOME and an empty PATH; ``user``: as whom, root alone can."""
    kept = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "NVIDIA_VISIBLE_DEVICES")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "PATH": "/nowhere", "SPARSEGEN_CACHE": str(cache)}
    who = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, words)],
        env=env | {"PYTHONDONTWRITEBYTECODE": "1"} | more,
        capture_output=True,
        text=True,
        timeout=250,
        **who,
    )


def starts(user: int, cache: Path) -> bool:
    """Whether somebody else can run this Python: it may lie in its owner's home."""
    try:
        return child("import torch", cache=cache, user=user).returncode == 0
    except PermissionError:
        return False


FAKED = (
    START
    + """
    import sparsegen.runtime.attend as runtime
    import sparsegen.launch.kernel as kernels
    from sparsegen.launch import driver
    from tests.launch.fake_driver import FakeLibrary, fake_torch

    library = FakeLibrary.of_folder(Path(sys.argv[4]) / "artifacts")
    import sparsegen.launch.loading as loading
    loading.cuda = lambda made=driver.Driver(library): made
    runtime.check_device = lambda q: None

    def aligned(*shape):
        room = torch.zeros(torch.Size(shape).numel() + 32, dtype=torch.float16)
        first = -room.data_ptr() % 64 // 2
        return room[first:][: torch.Size(shape).numel()].view(shape)

    class Index:  # torch.device("cpu") has no number
        def __get__(self, launch, kind): return 0
        def __set__(self, launch, value): pass
    kernels.Launch._device = Index()
    q, k, v = aligned(1, 4, 192, 64), aligned(1, 2, 320, 64), aligned(1, 2, 320, 64)
    out = aligned(1, 4, 192, 64)
    with fake_torch(stream=7):
        attend(q, k, v, out=out, **extras)
        attend(q, k, v, out=out, **extras)
    assert sys.modules["triton"] is None
    launches = len(attend.kernel.source.grids)
    assert len(library.launched) == 2 * launches, library.launched
    for done in library.launched:
        first = [int.from_bytes(p, "little") for p in done.parameters[:4]]
        assert first == [t.data_ptr() for t in (q, k, v, out)], (first, done)
        assert done.stream == 7 and done.grid[0] > 0
    assert all(m.address in {t.data_ptr() for t in (q, k, v)} for m in library.maps)
    print("launched", len(library.launched), "maps", len(library.maps))
"""
)


@pytest.mark.parametrize("name", PATTERNS)
def test_load_reaches_the_driver_without_triton(
    name: str, files: dict[str, Path], filled: Path
) -> None:
    if current_gpu() is not None:
        pytest.skip("the GPU here is asked in its place")
    done = child(FAKED, files[name], "h200", "cpu", filled, cache=filled)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("launched") and "Traceback" not in done.stderr


RUN = (
    START
    + """
    import math
    from sparsegen import reference

    assert all(not Path(p).exists() for p in ("/nowhere",))
    g = torch.Generator("cuda").manual_seed(1)
    make = lambda *s: torch.randn(s, generator=g, device="cuda", dtype=torch.float16)
    for q_len, kv_len in ((192, 320), (193, 307), (1, 77), (500, 500)):
        q, k, v = make(2, 4, q_len, 64), make(2, 2, kv_len, 64), make(2, 2, kv_len, 64)
        tries = {"contiguous": (q, k, v)}
        wide = make(2, kv_len, 2, 3, 64)
        tries["strided"] = (q.transpose(1, 2).contiguous().transpose(1, 2),
                            wide[:, :, :, 0].transpose(1, 2), wide[:, :, :, 2].transpose(1, 2))
        odd = make(2 * 2 * kv_len * 64 + 1)[1:].view(2, 2, kv_len, 64)
        tries["misaligned"] = (q, odd, v)
        for what, (q_, k_, v_) in tries.items():
            out = torch.full((2, 4, q_len, 64), math.nan, device="cuda", dtype=torch.float16)
            _, lse = attend(q_, k_, v_, out=out, return_lse=True, **extras)
            want, want_lse = reference(pattern, q_, k_, v_, **extras)
            right = torch.allclose(out.double(), want, atol=5e-3, rtol=5e-3)
            assert right, (what, q_len, kv_len, (out.double() - want).abs().max().item())
            assert torch.allclose(lse.double(), want_lse, atol=2e-3), (what, q_len, kv_len)
    a = attend(*tries["contiguous"], **extras)
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        b = attend(*tries["contiguous"], **extras)
    s.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = attend(*tries["contiguous"], **extras)
    c.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(a, b) and torch.equal(a, c)
    import threading
    found = []
    thread = threading.Thread(target=lambda: found.append(attend(*tries["contiguous"], **extras)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], a)
    assert sys.modules["triton"] is None
    print("right")
"""
)


def sealed(cache: Path) -> None:
    """Nobody may write below the cache; all may read."""
    for folder, _, names in os.walk(cache):
        for name in names:
            os.chmod(os.path.join(folder, name), 0o444)
        os.chmod(folder, 0o555)
    for above in cache.parents[:2]:
        above.chmod(above.stat().st_mode | 0o055)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("user", [None, SOMEONE], ids=["same user", "random user"])
def test_results_without_triton_compiler_or_home(
    name: str, user: int | None, files: dict[str, Path], filled: Path
) -> None:
    """Right results, on streams, in a CUDA graph and in a new thread; nothing is written anywhere."""
    if user is not None and os.geteuid():
        pytest.skip("only root can be somebody else")
    if user is not None and not starts(user, filled):
        pytest.skip("others may not read this Python")
    sealed(filled)
    sealed(files[name].parent)
    before = sorted(p for p in filled.rglob("*"))
    gpu = current_gpu()
    assert gpu is not None
    done = child(RUN, files[name], gpu.name, "cuda", cache=filled, user=user)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right" and sorted(p for p in filled.rglob("*")) == before


GRADIENTS = (
    START
    + """
    from sparsegen import reference

    make = lambda *s: torch.randn(s, device="cuda", dtype=torch.float16).requires_grad_()
    q, k, v = make(1, 4, 192, 64), make(1, 2, 320, 64), make(1, 2, 320, 64)
    attend(q, k, v).float().square().sum().backward()
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    reference(pattern, *inputs)[0].square().sum().backward()
    for mine, want in zip((q, k, v), inputs):
        error = (mine.grad.double() - want.grad).abs().max() / want.grad.abs().max()
        assert error < 1e-2, error
    assert sys.modules["triton"] is None
    print("right")
"""
)


@pytest.mark.gpu
def test_gradients_without_triton(files: dict[str, Path], filled: Path) -> None:
    gpu = current_gpu()
    assert gpu is not None
    done = child(GRADIENTS, files["causal"], gpu.name, "cuda", cache=filled)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"
