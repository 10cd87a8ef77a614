"""One artifact with a decision for each pair of lengths: what is built, recorded, opened and replaced."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparsegen.artifact import fleet
from sparsegen.artifact.archive import export_archive, import_archive
from sparsegen.artifact.build import ask, ensure, load
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.key import installed
from sparsegen.artifact.lengths import by_lengths, decided_for
from sparsegen.artifact.manifest import DamagedError, Manifest
from sparsegen.artifact.store import Store
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError
from sparsegen.launch.buckets import BucketKernel, nearest
from sparsegen.launch.kernel import Kernel
from sparsegen.runtime.api import open_kernel
from sparsegen.spec.fields import LIMIT
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

needs_triton = pytest.mark.skipif(installed("triton") is None, reason="needs triton")
H200 = find_gpu("h200")
SHORT, MIDDLE, LONG = (128, 128), (1, 1024), (8192, 8192)
PROBLEM = Problem(head_dim=16, heads=2, dtype="float16", lengths=(SHORT, MIDDLE, LONG))
TINY = Pattern.from_dict({"name": "tiny", "mask": "causal"})
BLOCKS = {SHORT: 16, MIDDLE: 32, LONG: 16}  # BLOCK_N; two of three agree


def config(block: int) -> LaunchConfig:
    from sparsegen.codegen import load_template

    default = load_template().default(PROBLEM, H200).as_dict()
    return LaunchConfig.of(default | {"TMA": False, "BLOCK_N": block})


@pytest.fixture
def rows(monkeypatch):
    """``tuned/`` has a row for each pair; what a test changes here is what it has today."""
    blocks = dict(BLOCKS)

    def lookup(pattern, problem, gpu, which, labels, refused):
        return config(blocks[problem.lengths[0]]), "exact GPU"

    monkeypatch.setattr("sparsegen.tune.store.lookup", lookup)
    return blocks


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        lookup = lambda pattern, problem, *rest, refused: (
            config(BLOCKS[problem.lengths[0]]),
            "exact GPU",
        )
        patch.setattr("sparsegen.tune.store.lookup", lookup)
        return ensure(TINY, PROBLEM, H200, store=Store(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize(
    ("lengths", "pair"),
    [
        (SHORT, SHORT),
        ((150, 150), SHORT),
        ((1000, 1000), SHORT),  # 1024 is half way
        ((1050, 1050), LONG),
        ((1, 500), MIDDLE),
        ((1, 100_000), MIDDLE),
        ((0, 0), MIDDLE),
    ],
)
def test_the_nearest_in_powers_of_two(lengths, pair):
    assert nearest(lengths, (SHORT, MIDDLE, LONG)) == pair


def test_the_first_of_two_that_are_as_near():
    assert nearest((64, 64), ((32, 32), (128, 128))) == (32, 32)
    assert nearest((64, 64), ((128, 128), (32, 32))) == (128, 128)


def test_each_pair_is_asked_for_once_and_none_for_proofs_alone():
    def asked(*lengths):
        request = ask(TINY, replace(PROBLEM, lengths=lengths), H200)
        return [r.problem.lengths for r in by_lengths(request)]

    assert asked(SHORT) == [(SHORT,)]
    assert asked(SHORT, LONG) == [(SHORT, LONG), (LONG, SHORT)]
    assert asked(SHORT, (LIMIT, LIMIT)) == [(SHORT, (LIMIT, LIMIT))]
    assert asked((LIMIT, LIMIT)) == [((LIMIT, LIMIT),)]


@needs_triton
def test_what_is_in_the_artifact(built):
    decision = built.manifest.decision
    assert [(b.q_len, b.kv_len, b.folder, b.config["BLOCK_N"]) for b in decision.buckets] == [
        (*SHORT, "", 16),
        (*MIDDLE, "lengths1", 32),
        (*LONG, "", 16),
    ]
    assert (decision.config["BLOCK_N"], decision.problem["lengths"][0]) == (16, list(SHORT))
    for bucket in decision.buckets:
        for variant in bucket.variants:
            assert {n.rsplit("/", 1)[1] for n in variant.files} > {"launch.json"}
            assert set(variant.files) <= set(built.files)
    assert built.read("lengths1/kernel.py") == built.read("kernel.py")  # one schedule, one text
    assert Manifest.from_json(built.manifest.to_json()) == built.manifest
    assert decided_for(decision, (1, 2000))[1]["BLOCK_N"] == 32


@needs_triton
def test_what_agrees_is_built_once(rows, tmp_path):
    rows |= dict.fromkeys(rows, 16)
    made = ensure(TINY, PROBLEM, H200, store=Store(tmp_path))
    assert not made.manifest.decision.buckets
    assert not any(name.startswith("lengths") for name in made.files)
    assert type(open_kernel(TINY, PROBLEM, made)) is Kernel


@needs_triton
def test_a_call_takes_the_nearest(built):
    kernel = open_kernel(TINY, PROBLEM, built)
    assert isinstance(kernel, BucketKernel)
    assert kernel.of(1, 900).config["BLOCK_N"] == 32
    assert kernel.of(100, 100).config["BLOCK_N"] == kernel.of(9000, 9000).config["BLOCK_N"] == 16
    assert kernel.of(1, 900) is kernel.of(1, 700)
    assert kernel.source.text.encode() == built.read("kernel.py")
    q = torch.empty(1, 2, 1, 16, device="meta", dtype=torch.float16)
    k = torch.empty(1, 2, 900, 16, device="meta", dtype=torch.float16)
    from sparsegen.launch import Call

    launch = kernel.prepare(q, k, k, q, Call())
    assert launch._kernel is kernel.of(1, 900)
    folder = launch._kernel._directories["fast"]
    assert folder == built.path / "lengths1" / "fast" and (folder / "launch.json").is_file()


@needs_triton
def test_kernels_that_take_other_calls_are_refused(built):
    kernel = open_kernel(TINY, PROBLEM, built)
    other = open_kernel(TINY, PROBLEM, built)
    other.source = replace(other.source, max_position=5)
    kernel._opened[MIDDLE] = lambda: other
    with pytest.raises(ArtifactError, match="do not take the same calls"):
        kernel.of(1, 900)


@needs_triton
def test_it_is_carried_and_checked_as_a_whole(built, rows, tmp_path):
    export_archive(tmp_path / "a.tar.gz", [built])
    there = Store(tmp_path / "there")
    import_archive(tmp_path / "a.tar.gz", there)
    copy = load(TINY, PROBLEM, H200, store=there)
    assert open_kernel(TINY, PROBLEM, copy).of(1, 900).config["BLOCK_N"] == 32
    stated = Pattern.from_dict({"name": "tiny", "mask": "causal", "problem": _stated()})
    assert fleet.check(["h200"], [stated], store=there).results[0].state == "ok"
    (copy.path / "lengths1" / "fast" / "attend_forward.cubin").write_bytes(b"")
    assert fleet.check(["h200"], [stated], store=there).results[0].state == "damaged"


def _stated():
    return {
        "head_dim": 16,
        "heads": 2,
        "dtype": "float16",
        "lengths": [list(p) for p in PROBLEM.lengths],
    }


@needs_triton
def test_what_is_current(built, rows):
    def current(lengths=PROBLEM.lengths, tune="off", artifact=built):
        request = ask(TINY, replace(PROBLEM, lengths=lengths), H200, tune)
        return Compiler().is_current(request, artifact)

    assert current() and current((MIDDLE,)) and current((LONG, SHORT))
    rows[MIDDLE] = 64
    assert not current() and not current((MIDDLE,)) and current((LONG, SHORT))
    decision = replace(built.manifest.decision, tune="quick")
    tuned = replace(built, manifest=replace(built.manifest, decision=decision))
    assert current(tune="quick", artifact=tuned)
    more = (SHORT, (4096, 4096))
    assert not current(more, "quick", tuned)  # one of them was never measured


@needs_triton
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"folder": "../elsewhere"}, "leaves the entry"),
        ({"label": "mod 7"}, "none of the candidates"),
        ({"q_len": True}, "q_len must be int"),
        ({"config": {"BLOCK_N": None}}, "must map knobs"),
        ({"more": 1}, "bucket lacks or does not know"),
        ({"variants": [{"name": "fast"}]}, "variant lacks"),
    ],
)
def test_a_damaged_bucket_is_one_sentence(built, change, words):
    data = json.loads(built.manifest.to_json())
    data["decision"]["buckets"][1] |= change
    with pytest.raises(DamagedError, match=words):
        Manifest.from_json(json.dumps(data))
