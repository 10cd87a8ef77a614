"""Edited templates beside those that ship: the same cases, checked, timed in turns in one process.

    python benchmarks/variants.py EDIT[+EDIT] | NAME=DIR ... [--pass forward|backward [--parts PART,PART]] [--cases NAME,NAME] [--peers cudnn,fa4|none]
                                  [--knobs JSON] [--idle SECONDS] [--out FILE.json] [--dry] [--unchecked]

For whoever changes a kernel's template, to learn what the change does before it lands: a variant is some of the edits of ``edits.py``, joined by
+, or an edited copy of the folder templates/.  Every case (those of forward.py or backward.py) is rendered from the shipped templates and from each variant, and compiled in the hopper
configurations of that benchmark, or in those of ``--knobs``, a JSON list of objects.  Each is checked as there, wrong ones are said and left
out, and the fastest configuration of every variant is timed in turns with the others (``--idle`` seconds before a turn), then back to back.
Backward times the kernels (``--parts``, by default of queries and of keys) apart, without peers: what a change does to one of them.  ``--dry`` compiles for an H200, tells registers, spills and
serialised products, and needs no GPU.  What a planner says is the same for all variants.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import contender
import gradient_contender
import turn
from beforehand import compile_many, gpu_here
from edits import EDITS, WITHOUT

from sparsegen.codegen import template
from sparsegen.codegen.backward_planner import FUSED, KEYS, QUERIES
from sparsegen.launch.binary import _tool
from sparsegen.launch.sass import listing_of
from sparsegen.paths import data_dir
from sparsegen.spec.gpu import find_gpu
from sparsegen.tune.measure import PUBLISHED

SHIPPED = "shipped"


@contextmanager
def templates_of(folder: Path) -> Iterator[None]:
    """Templates are read from ``folder`` inside, and from their own place again behind."""
    own = template.data_dir
    template.data_dir = lambda _: folder  # type: ignore[assignment]
    template.load_template.cache_clear()
    try:
        yield
    finally:
        template.data_dir = own
        template.load_template.cache_clear()


def edited(name: str) -> Path:
    """A copy of the shipped templates with the edits of ``name``, joined by +."""
    folder = Path(tempfile.mkdtemp()) / name
    shutil.copytree(data_dir("templates"), folder)
    for edit in name.split("+"):
        (EDITS | WITHOUT)[edit](folder)
    return folder


@dataclass(frozen=True)
class Variant:
    """One folder of templates at one case; ``choices``: what is timed, with its compiled job under ``.job`` or itself a job."""

    name: str
    made: Any
    choices: list[Any]


def main() -> None:
    options = _options()
    gpu = find_gpu("h200") if options.dry else gpu_here()
    assert gpu is not None, "a GPU is needed; --dry needs none"
    if options.unchecked:
        contender.within_tolerance = lambda *_: True  # type: ignore[assignment]
        gradient_contender.LIMIT = math.inf
        print("UNCHECKED: results may be wrong", flush=True)
    folder, started = Path(tempfile.mkdtemp()), time.time()
    does = Forward(options, gpu) if options.direction == "forward" else Backward(options, gpu)
    cases: dict[str, list[Variant]] = {}
    for name, root in options.variants.items():
        with templates_of(root):
            for case in does.cases(options.cases):
                made = does.variant(case, name, folder / name)
                cases.setdefault(case, []).append(made)
    jobs = {j.directory: j for some in cases.values() for v in some for j in does.jobs(v)}
    does.compiled = {o.job.directory: o for o in compile_many(list(jobs.values()))}
    print(f"compiled {len(jobs)} kernels in {time.time() - started:.0f} s", flush=True)
    turn.take()
    results: dict[str, Any] = {}
    for case, some in cases.items():
        print(f"== {case}", flush=True)
        results[case] = _told(does, some) if options.dry else does.timed(some)
        Path(options.out).write_text(json.dumps(results, indent=1))


def _told(does: Any, variants: list[Variant]) -> dict[str, Any]:
    """Registers and spills of every kernel, or the compiler's complaint."""
    said = {}
    for v in variants:
        for choice in v.choices:
            job = getattr(choice, "job", choice)
            outcome = does.compiled[job.directory]
            b, facts = outcome.binary, outcome.error
            if b is not None:
                facts = f"{b.registers} registers, spills {b.spill_bytes}, {b.shared_bytes} B"
                facts += _serialised(job.directory)
            said[f"{v.name}: {does.label(v, choice)}"] = facts
            print(f"    {facts}  {v.name}: {does.label(v, choice)}", flush=True)
    return said


def _serialised(folder: Path) -> str:
    """Says so where the assembler waits after every tensor-core instruction, as it does where it runs out of registers."""
    for cubin in folder.rglob("*.cubin"):
        listing = listing_of(cubin, _tool("nvdisasm"))
        if 0 < listing.count("HGMMA") <= listing.count("WARPGROUP.DEPBAR"):
            return ", SERIALISED"
    return ""


def _tried(variant: Variant, fastest: Callable[[], Any]) -> Any:
    """What ``fastest`` finds; None, and said, for an edit that has no right configuration: the others go on."""
    try:
        return fastest()
    except AssertionError as error:
        if variant.name == SHIPPED:
            raise
        print(f"    LEFT OUT {variant.name}: {error}", flush=True)
        return None


class Forward:
    """The forward kernel, beside peers."""

    def __init__(self, options: argparse.Namespace, gpu: Any):
        import forward

        self.bench, self.options, self.gpu = forward, options, gpu
        self.compiled: dict[Path, Any] = {}

    def cases(self, asked: str) -> list[str]:
        return [m for n in asked.split(",") if n for m in self.bench.GROUPS.get(n, [n])]

    def variant(self, case: str, name: str, folder: Path) -> Variant:
        mask, heads, dims, length = self.bench.CASES[case]
        made = contender.Contender(case, mask, length, heads, dims)
        hopper = [c for c in self.bench.CONFIGS if c.get("KERNEL") == "hopper"]
        return Variant(name, made, made.jobs(self.gpu, self.options.knobs or hopper, folder))

    def jobs(self, variant: Variant) -> list[Any]:
        return variant.choices

    def label(self, variant: Variant, job: Any) -> str:
        labels = {id(s): label for label, s in variant.made.sources.items()}
        return f"{labels[id(job.source)]}: {job.config}"

    def timed(self, variants: list[Variant]) -> dict[str, Any]:
        """The fastest configuration of every variant, and the peers, in turns."""
        from sparsegen.bench.interleaved import in_turns
        from sparsegen.tune.measure import CudaClock

        clock, made = CudaClock(self.gpu.l2_bytes), variants[0].made
        inputs = made.tensors(made.length, made.length)
        launches, configs = {}, {}
        for v in variants:
            print(f"  {v.name}", flush=True)
            # the compiled job is a copy that came back from another process
            done = [replace(self.compiled[j.directory], job=j) for j in v.choices]
            found = _tried(v, partial(v.made.fastest, done, self.gpu, clock, inputs))
            if found is not None:
                kernel, configs[v.name] = found
                launches[v.name] = v.made.launcher(kernel, *inputs)
        launches |= self._peers(made, inputs)
        times = in_turns(launches, clock, replace(PUBLISHED, idle_s=self.options.idle))
        return _rows(times, made.flop, configs)

    def _peers(self, made: Any, inputs: Any) -> dict[str, Any]:
        from sparsegen.bench import torch_peers

        found: dict[str, Any] = {}
        if "cudnn" in self.options.peers and made.name.startswith("causal"):
            found |= {n: x for n, x in torch_peers.sdpa(*inputs).items() if n == "cudnn"}
        if "fa4" in self.options.peers:
            found |= self.bench.fa4(made, inputs)
        return found


class Backward:
    """Gradient kernels, each alone but for the launch that prepares."""

    def __init__(self, options: argparse.Namespace, gpu: Any):
        import backward

        self.bench, self.options, self.gpu = backward, options, gpu
        self.parts: list[str] = options.parts.split(",")
        self.compiled: dict[Path, Any] = {}

    def cases(self, asked: str) -> list[str]:
        return [m for n in asked.split(",") if n for m in self.bench.GROUPS.get(n, [n])]

    def variant(self, case: str, name: str, folder: Path) -> Variant:
        made = gradient_contender.GradientContender(case, *self.bench.CASES[case], schedules_each=1)
        hopper = [{"KERNEL": "hopper", "num_warps": 4} | c for c in self.options.knobs]
        given = dict.fromkeys((QUERIES, *self.parts), hopper)
        found = [c for c in made.choices(self.gpu, given, folder) if c.part in given]
        first = next(c for c in found if c.part == QUERIES)  # prepares for all others
        mine = [c for c in found if c.part in self.parts and self._asked(c)]
        return Variant(name, made, [first, *(c for c in mine if c is not first)])

    def _asked(self, choice: Any) -> bool:
        """A hopper configuration that agrees with one of ``--knobs``, where these are given."""
        knobs = choice.config.as_dict()
        wanted = self.options.knobs or [{}]
        return knobs["KERNEL"] == "hopper" and any(w.items() <= knobs.items() for w in wanted)

    def jobs(self, variant: Variant) -> list[Any]:
        return [*(c.job for c in variant.choices), self._forward(variant)]

    def _forward(self, variant: Variant) -> Any:
        return variant.made.forward_job(self.gpu, variant.choices[0].job.directory.parents[2])

    def label(self, variant: Variant, choice: Any) -> str:
        return str(choice)

    def timed(self, variants: list[Variant]) -> dict[str, Any]:
        """For each kernel the fastest configuration of every variant, in turns."""
        import torch
        from gradient_contender import GIVES, keep_facts, launcher
        from gradient_judge import Samples

        from sparsegen.bench.clock import QueuedClock
        from sparsegen.bench.interleaved import in_turns
        from sparsegen.launch import Kernel
        from sparsegen.tune.check import sampled_rows

        for outcome in self.compiled.values():
            keep_facts(outcome)
        clock, made = QueuedClock(self.gpu.l2_bytes), variants[0].made
        job = self._forward(variants[0])
        forward = Kernel(job.source, job.config, {"fast": job.directory})
        torch.manual_seed(0)
        saved, call = given = made.saved(made.length, made.length, forward)
        make = torch.Generator("cuda").manual_seed(1)
        rows = [sampled_rows(made.length, make) for _ in range(2)]
        samples = Samples(made.pattern, saved, made.problem.head_dim**-0.5, *rows)
        results = {}
        for part in self.parts:
            launches, configs = {}, {}
            for v in variants:
                print(f"  {v.name}, {part}", flush=True)
                base = next(c for c in v.choices if c.part == QUERIES)
                mine = [c for c in v.choices if c.part == part and self._fits(c)]
                how = (base,), given, samples, clock, lambda _: None, 0
                best = _tried(v, partial(v.made.fastest, part, mine, *how))
                if best is None:
                    continue
                used = {c.part: c for c in (base, best)}.values()
                kernel = v.made.kernel(*used, workspace=0)
                launches[v.name] = launcher(kernel, saved, call, GIVES[part])
                configs[v.name] = str(best)
            times = in_turns(launches, clock, replace(PUBLISHED, idle_s=self.options.idle))
            results[part] = _rows(times, made.flop, configs)
        return results

    def _fits(self, choice: Any) -> bool:
        from gradient_contender import useless

        why = useless(choice.job)
        if why:
            print(f"    left out {choice}: {why}", flush=True)
        return not why


def _rows(times: Any, flop: int, configs: dict[str, str]) -> dict[str, Any]:
    """Times beside those of the shipped templates, printed and to be written."""
    own, rows = times[SHIPPED], {}
    for name, t in times.items():
        rows[name] = {
            "us": t.us,
            "spread_us": t.spread_us,
            "tflops": flop / t.us / 1e6,
            "speedup": own.us / t.us,
            "sustained_us": t.sustained_us,
            "sustained_speedup": own.sustained_us / t.sustained_us,
            "config": configs.get(name, ""),
        }
        print(
            f"  {name:18s} {t.us:9.1f} us ±{t.spread_us:6.1f} {flop / t.us / 1e6:5.0f} TF/s  x{own.us / t.us:.3f}  "
            f"sustained x{own.sustained_us / t.sustained_us:.3f}  {configs.get(name, '')}",
            flush=True,
        )
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", metavar="EDIT[+EDIT] or NAME=DIR")
    parser.add_argument(
        "--pass", dest="direction", choices=["forward", "backward"], default="forward"
    )
    parser.add_argument("--cases", default="causal_16k")
    parser.add_argument("--parts", default=f"{QUERIES},{KEYS}", help=f"of backward; or {FUSED}")
    parser.add_argument("--peers", default="none", help="of forward: cudnn, fa4; or none")
    parser.add_argument("--knobs", type=json.loads, default=[], help="a JSON list of objects")
    parser.add_argument("--idle", type=float, default=PUBLISHED.idle_s)
    parser.add_argument("--out", default="variants.json")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument(
        "--unchecked", action="store_true", help="time wrong kernels, too: what a part costs"
    )
    options = parser.parse_args()
    import backward
    import forward

    bench = forward if options.direction == "forward" else backward
    for option, words, known in (
        ("cases", options.cases, {*bench.CASES, *bench.GROUPS}),
        ("parts", options.parts, {QUERIES, KEYS, FUSED}),
        ("peers", options.peers, {"cudnn", "fa4", "none"}),
    ):
        if odd := [word for word in words.split(",") if word not in known]:
            parser.error(f"--{option}: no {odd[0]!r}; there are {', '.join(sorted(known))}")
    given = {SHIPPED: data_dir("templates")}
    for text in options.variants:
        name, _, root = text.partition("=")
        if name in given:
            parser.error(f"{text}: each name once, and none of them {SHIPPED}")
        known = EDITS | WITHOUT if options.unchecked else EDITS
        if unknown := [e for e in name.split("+") if not root and e not in known]:
            parser.error(
                f"{text}: no edit {unknown[0]!r}; there are {', '.join(known)}; or NAME=DIR"
            )
        given[name] = Path(root).resolve() if root else edited(name)
        if not (given[name] / "forward" / "template.yaml").is_file():
            parser.error(
                f"{text}: {root} is no copy of templates/, it has no forward/template.yaml"
            )
    options.variants = given
    return options


if __name__ == "__main__":
    main()
