"""The real builder: keys from schedules, and one real cross-compilation (no GPU is needed)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from sparsegen.artifact import fleet
from sparsegen.artifact.build import ask, ensure
from sparsegen.artifact.compiler import Compiler
from sparsegen.artifact.key import code_version, installed
from sparsegen.artifact.store import Store
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import InputError, UnsupportedError
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

H200 = find_gpu("h200")
WINDOW = {"all_of": ["causal", {"window": {"size": 100}}]}


def key(mask, problem=None, gpu=H200, **settings):
    return Compiler().key(
        ask(Pattern.from_dict({"name": "p", "mask": mask, **settings}), problem, gpu)
    )


def test_spelling_and_names_do_not_matter():
    same = [
        WINDOW,
        {"window": {"size": 100}},
        {"window": {"left": 99, "right": 0}},
        {"all_of": ["causal", "causal", {"window": {"left": 99, "right": 5}}]},
    ]
    assert len({key(mask).digest() for mask in same}) == 1
    assert key("causal", name="a").digest() == key("causal", name="b", summary="text").digest()
    heads = Pattern.from_dict(
        {
            "name": "h",
            "heads": [{"heads": ["0-3"], "mask": "causal"}, {"heads": "rest", "mask": "causal"}],
        }
    )
    assert Compiler().key(ask(heads, None, H200)).mask == key("causal").mask


@pytest.mark.parametrize(
    "field, other",
    [
        ("mask", key({"window": {"size": 101}})),
        ("align", key(WINDOW, align="top_left")),
        ("scale", key(WINDOW, scale=1)),
        ("softcap", key(WINDOW, softcap=30)),
        ("alibi", key(WINDOW, alibi=True)),
        ("sink_logits", key(WINDOW, sink_logits=True)),
        ("null_key", key(WINDOW, null_key=True)),
        ("head_dim", key(WINDOW, Problem(head_dim=64, value_dim=128))),
        ("value_dim", key(WINDOW, Problem(value_dim=64))),
        ("heads", key(WINDOW, Problem(heads=16, kv_heads=8))),
        ("kv_heads", key(WINDOW, Problem(kv_heads=2))),
        ("dtype", key(WINDOW, Problem(dtype="float16"))),
    ],
)
def test_what_is_asked_is_in_the_key(field, other):
    assert [name for name, _, _ in key(WINDOW).difference(other)] == [field]


def test_the_gpu_is_in_the_key():
    names = [name for name, _, _ in key(WINDOW).difference(key(WINDOW, gpu=find_gpu("mi300x")))]
    assert names == ["gpu", "backend", "arch"]


def test_a_window_beyond_all_lengths_is_none_but_remembers_for_which(store=None):
    short = key({"window": {"size": 5000}}, Problem(lengths=((4096, 4096),)))
    plain = key("causal", Problem(lengths=((4096, 4096),)))
    assert short.mask == plain.mask
    assert short.max_position is not None and short.digest() != plain.digest()


def test_versions_in_the_key():
    mine = key(WINDOW)
    assert mine.triton == installed("triton") and mine.code == code_version()
    assert mine.torch == ".".join(installed("torch").split(".")[:2])


def test_run_time_patterns_are_unsupported():
    with pytest.raises(UnsupportedError, match="documents"):
        key({"all_of": ["causal", "documents"]})


def test_a_head_without_a_rule_is_an_error():
    pattern = Pattern.from_dict({"name": "h", "heads": [{"heads": [0], "mask": "causal"}]})
    with pytest.raises(InputError, match="has no rule"):
        Compiler().key(ask(pattern, Problem(heads=2, kv_heads=2), H200))


@pytest.mark.parametrize(
    "stored, asked, block, label, current",
    [
        ("off", "off", 64, "runs", True),
        ("off", "off", 128, "runs", False),  # tuned/ has another row today
        ("off", "off", 64, "mod 8", False),  # it was built with another schedule
        ("quick", "off", 128, "mod 8", True),  # measured here counts for more than tuned/
        ("off", "quick", 64, "runs", False),
        ("full", "quick", 128, "mod 8", True),
    ],
)
def test_what_is_current(monkeypatch, stored, asked, block, label, current):
    config = LaunchConfig.of({"BLOCK_N": 64})
    now = LaunchConfig.of({"BLOCK_N": block})
    monkeypatch.setattr("sparsegen.tune.store.lookup", lambda *given, **refused: (now, "exact GPU"))
    decision = SimpleNamespace(tune=stored, config=config, label=label, buckets=(), problem={})
    artifact = SimpleNamespace(manifest=SimpleNamespace(decision=decision, files={}))
    request = ask(Pattern.from_dict({"name": "p", "mask": "causal"}), None, H200, asked)
    assert Compiler().is_current(request, artifact) is current


@pytest.mark.skipif(installed("triton") is None, reason="needs triton")
def test_cross_compile_load_and_check(tmp_path):
    store = Store(tmp_path)
    pattern = Pattern.from_dict({"name": "tiny", "mask": WINDOW, "problem": {"head_dim": 16}})
    built = ensure(pattern, None, H200, store=store)
    names = set(built.files)
    assert {"kernel.py", "schedule.txt", "pattern.yaml"} < names
    for variant in built.manifest.decision.variants:
        assert variant.files and variant.guard and variant.registers and variant.spill_bytes == 0
        assert any(name.endswith(".cubin") for name in variant.files)
    assert Pattern.from_yaml_text(built.read("pattern.yaml").decode()) == pattern
    assert ensure(pattern, None, H200, store=store) == built
    assert fleet.check(["h200"], [pattern], store=store).results[0].state == "ok"
    assert os.listdir(store.artifacts) == [built.path.name]
