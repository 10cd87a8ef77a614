"""Artifacts for an AMD GPU: built without one, loaded and launched by a stand-in for HIP's runtime, without Triton."""

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
from sparsegen.artifact.key import installed
from sparsegen.artifact.store import Store
from sparsegen.launch import code_object
from sparsegen.launch.description import LAUNCH, read_description
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="artifacts need triton")
ROOT = Path(__file__).parents[2]
MI300X = find_gpu("mi300x")
PATTERN = """
name: sinks
mask: {all_of: [causal, {any_of: [{window: {size: 100}}, {sink: {tokens: 4}}]}]}
sink_logits: true
null_key: true
problem: {head_dim: 64, heads: 4, kv_heads: 2, dtype: float16, lengths: [[512, 512]]}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("cache"))


LAUNCHED = """
    import sys
    sys.modules["triton"] = None  # importing it fails from here on
    from pathlib import Path
    import torch
    torch.version.hip = "7.1"
    import sparsegen
    import sparsegen.runtime.attend as runtime
    from sparsegen.launch import kernel, loading
    from sparsegen.launch.hip import HipDriver
    from sparsegen.spec.gpu import find_gpu
    from tests.launch.fake_driver import FakeHip, fake_torch
    from tests.launch.faked import on_16_bytes

    library = FakeHip.of_folder(Path(sys.argv[1]) / "artifacts")
    loading.hip = lambda made=HipDriver(library): made
    runtime.check_device = lambda q: None

    class Index:  # torch.device("cpu") has no number
        def __get__(self, launch, kind): return 0
        def __set__(self, launch, value): pass
    kernel.Launch._device = Index()

    half = torch.float16
    attend = sparsegen.load(sparsegen.Pattern.from_yaml(sys.argv[2]), gpu=find_gpu("mi300x"))
    make = lambda *shape: on_16_bytes(*shape, dtype=half)
    q, k, v, out = make(1, 4, 192, 64), make(1, 2, 320, 64), make(1, 2, 320, 64), make(1, 4, 192, 64)
    extras = {"sink_logits": torch.ones(4), "null_key": (make(2, 64), make(2, 64))}
    with fake_torch(stream=7):
        attend(q, k, v, out=out, **extras)
        attend(q, k, v, out=out, **extras)
    assert sys.modules["triton"] is None
    for done in library.launched:
        first = [int.from_bytes(p, "little") for p in done.parameters[:4]]
        assert first == [t.data_ptr() for t in (q, k, v, out)], (first, done)
        assert done.stream == 7 and done.grid[0] > 0 and done.block[0] % 64 == 0
    assert len(library.launched) == 2 * len(attend.kernel.source.grids)
    print("launched", len(library.launched))
"""


def test_load_reaches_hip_without_triton(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "sinks.yaml"
    file.write_text(PATTERN)
    built = ensure(Pattern.from_yaml(file), None, MI300X, store=store)
    assert any(name.endswith(LAUNCH) for name in built.files)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LAUNCHED), str(store.root), str(file)],
        env={
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": "/nowhere",
            "SPARSEGEN_CACHE": str(store.root),
        },
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("launched") and "Traceback" not in done.stderr


@pytest.mark.skipif(
    (installed("triton") or "").startswith("3.6."),
    reason="issue 6: Triton 3.6 does not translate the general kernel of keys for gfx942",
)
def test_gradient_binaries_are_described(store: Store) -> None:
    causal = Pattern.from_yaml_text(PATTERN.replace("null_key: true", ""))
    built = ensure(causal, None, MI300X, store=store, builder=GradientCompiler())
    found = sorted(built.path.rglob("*.hsaco"))
    assert len(found) >= 8
    for path in found:
        description = read_description(path.parent)
        assert (description.platform, description.kernel) == ("hip", path.stem)
        code_object.check(path.read_bytes(), description)
