"""Templates on disk: their declared knobs, and which configurations can work at all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import SparsegenError
from sparsegen.paths import data_dir
from sparsegen.spec.gpu import Gpu
from sparsegen.spec.problem import Problem

LAUNCH_OPTIONS = ("num_warps",)  # knobs that Triton takes
CHOICES = ("KERNEL",)  # knobs that choose a text; every other knob is a tl.constexpr


@dataclass(frozen=True)
class Template:
    """One folder under ``templates/``: ``template.yaml`` declares the knobs, ``kernel.py.jinja`` is the kernel."""

    name: str
    summary: str
    entry: str
    knobs: tuple[Knob, ...]
    digest: str  # sha256 over the files of its folders
    folder: Path
    imports: tuple[Path, ...] = ()  # folders of the templates whose macros it uses

    @property
    def constexprs(self) -> tuple[str, ...]:
        return tuple(k.name for k in self.knobs if k.name not in LAUNCH_OPTIONS + CHOICES)

    def default(self, problem: Problem, gpu: Gpu) -> LaunchConfig:
        """What is launched where nothing was measured.

        Starts from the declared defaults, the best over several patterns on an H200 (docs/performance.md): two
        programs of 64 rows on a multiprocessor hide each other's softmax.
        """
        values = {k.name: k.default for k in self.knobs}
        values["TMA"] = has_tma(gpu)
        widest = max(problem.head_dim, problem.value_dim)
        if problem.dtype == "float32":
            # IEEE float32 dots run on the plain units and keep whole tiles in registers
            values |= {"BLOCK_M": 32, "BLOCK_N": 16, "STAGES": 2}
        elif widest > 192 or gpu.shared_bytes < 120_000:
            small = problem.head_dim + problem.value_dim > 256 and gpu.shared_bytes < 80_000
            values |= {"BLOCK_N": 16 if small else 32, "STAGES": 2}
        elif not has_tma(gpu):
            values |= {"STAGES": 2}
        return LaunchConfig.of(values)

    def invalid(self, config: LaunchConfig, problem: Problem, gpu: Gpu) -> str | None:
        """Why this configuration cannot work for the problem on the GPU, or None."""
        v = config.as_dict()
        for knob in self.knobs:
            if v.get(knob.name) not in knob.choices:
                return f"{knob.name}={v.get(knob.name)} is not one of {list(knob.choices)}"
        if v["KERNEL"] == "hopper":
            from sparsegen.codegen.hopper import unfit

            return unfit(v, problem, gpu)
        if v["TMA"] and not (
            gpu.backend == "cuda" and isinstance(gpu.arch, int) and gpu.arch >= 90
        ):
            return f"TMA needs sm_90 or newer, {gpu.name} has none"
        if v["num_warps"] == 8 and v["BLOCK_M"] != 128:
            return "8 warps need 128 query rows: fewer leave a warpgroup without rows of its own"
        element = 4 if problem.dtype == "float32" else 2
        stages, rows = int(v["STAGES"]), int(v["BLOCK_N"])
        tiles = rows * (problem.head_dim + problem.value_dim) * element * stages
        if tiles > gpu.shared_bytes:
            return f"key and value tiles take {tiles} bytes of shared memory, {gpu.name} has {gpu.shared_bytes}"
        return None


def has_tma(gpu: Gpu) -> bool:
    """Whether the GPU loads tiles through tensor descriptors."""
    return gpu.backend == "cuda" and isinstance(gpu.arch, int) and gpu.arch >= 90


@cache
def load_template(name: str = "forward") -> Template:
    """The template of that name; an unknown one is an error that lists those there are."""
    root = data_dir("templates")
    folder = root / name
    if not (folder / "template.yaml").is_file():
        known = sorted(p.parent.name for p in root.glob("*/template.yaml"))
        raise SparsegenError(f"no template {name!r}; there are {', '.join(known)}")
    declared = yaml.safe_load((folder / "template.yaml").read_text())
    knobs = tuple(
        Knob(
            name=knob,
            choices=tuple(d["choices"]),
            default=d["default"],
            summary=d["summary"],
            when=tuple(d["when"]) if "when" in d else None,
        )
        for knob, d in declared["knobs"].items()
    )
    imports = tuple(root / other for other in declared.get("imports", ()))
    digest = hashlib.sha256()
    for path in (x for where in (folder, *imports) for x in sorted(where.iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    named = name, declared["summary"], declared["entry"]
    return Template(*named, knobs, digest.hexdigest(), folder, imports)
