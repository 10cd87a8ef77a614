"""The rule of a GPU in the look-up: after what was measured, before what is near, and never outside of what it knows."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from sparsegen.codegen import load_template
from sparsegen.codegen.gradient_template import gradient_template
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem
from sparsegen.tune import store, untuned
from sparsegen.tune.features import MEANING, features_of
from sparsegen.tune.gradient_target import part_candidates
from sparsegen.tune.rule import Rule, path_of
from sparsegen.tune.schedules import candidates_of, labels_of

H200 = find_gpu("h200")
TEMPLATE = load_template()
CAUSAL = Pattern.from_dict({"name": "plain", "mask": "causal"})
WINDOW = Pattern.from_dict(
    {"name": "band", "mask": {"all_of": ["causal", {"window": {"size": 128}}]}}
)
PROBLEM = Problem(head_dim=64, heads=4, lengths=((2048, 2048),))
BASE = TEMPLATE.default(PROBLEM, H200).as_dict()
CONFIGS = {
    "A": LaunchConfig.of({**BASE, "STAGES": 2}),
    "B": LaunchConfig.of({**BASE, "BLOCK_N": 32}),
}
CODE = "if row_keys <= 200:\n    return A\nelse:\n    return B"
RULE = Rule(
    "nvidia-h200",
    "forward",
    TEMPLATE.digest,
    CODE,
    CONFIGS,
    {"dtype": ["bfloat16"], "head_dim": [64], "value_dim": [64]},
    {},
    {"triton": "none"},
    "2026-11-30",
)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(store, "_SAID", set())


def kept(root, rule=RULE, gpu="nvidia-h200"):
    path = path_of(root, gpu, "forward")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rule.text())
    return path


def find(root, pattern=CAUSAL, problem=PROBLEM, gpu=H200):
    labels = labels_of(candidates_of(pattern, problem))
    return store.lookup(pattern, problem, gpu, TEMPLATE, labels, root=root)


def row(length, pattern=CAUSAL, **values):
    measured = store.Measured.of(PROBLEM, length, length)
    config = {**BASE, **values}
    return store.Row(
        pattern.name,
        pattern.digest(),
        "forward",
        TEMPLATE.digest,
        measured,
        config,
        9.0,
        10.0,
        0.01,
        4,
        {},
        "d",
    )


def test_the_rule_chooses_for_what_was_not_measured(tmp_path):
    kept(tmp_path)
    assert find(tmp_path, WINDOW) == (CONFIGS["A"], "rule of the GPU (A)")
    assert find(tmp_path, CAUSAL) == (CONFIGS["B"], "rule of the GPU (B)")


def test_a_measured_problem_goes_first_and_a_near_one_after(tmp_path):
    store.write(tmp_path, H200, row(4096, HEAVY_FIRST=False))
    assert find(tmp_path)[1].startswith("exact GPU, nearest problem")
    kept(tmp_path)
    assert find(tmp_path)[1] == "rule of the GPU (B)"
    store.write(tmp_path, H200, row(2048, HEAVY_FIRST=False))
    config, step = find(tmp_path)
    assert step == "exact GPU" and config["HEAVY_FIRST"] is False


@pytest.mark.parametrize(
    "change", [{"head_dim": 128}, {"dtype": "float16"}, {"head_dim": 64, "value_dim": 128}]
)
def test_outside_of_what_was_measured_it_is_not_asked(tmp_path, change):
    kept(tmp_path)
    problem = Problem(**{"head_dim": 64, "heads": 4, "lengths": ((2048, 2048),), **change})
    assert find(tmp_path, problem=problem)[1] == "template default"


def test_it_is_of_one_gpu(tmp_path):
    kept(tmp_path)
    assert find(tmp_path, gpu=find_gpu("h100"))[1] == "template default"


def test_a_configuration_that_cannot_run_here_is_not_used(tmp_path):
    """The warp-specialised kernel where no launch is its own, and what the template refuses."""
    fixed = Pattern.from_yaml("sparse_transformer_fixed")
    hopper = {**BASE, "KERNEL": "hopper", "BLOCK_M": 64, "TMA": False}
    special = replace(RULE, configurations={**CONFIGS, "B": LaunchConfig.of(hopper)})
    kept(tmp_path, special)
    fits = features_of(CAUSAL, PROBLEM, 2048, 2048)["specialised"]
    assert fits and not features_of(fixed, PROBLEM, 2048, 2048)["specialised"]
    answer = untuned.configuration(
        tmp_path, fixed, PROBLEM, store.Measured.of(PROBLEM, 2048, 2048), H200, TEMPLATE
    )
    assert answer.name == "B" and answer.config is None and "launches" in answer.why
    refused = LaunchConfig.of({**BASE, "BLOCK_M": 32, "num_warps": 8})
    kept(tmp_path, replace(RULE, configurations={**CONFIGS, "B": refused}))
    assert find(tmp_path)[1] == "template default"


def test_a_rule_of_another_template_is_used_with_a_warning_and_reported(tmp_path):
    path = kept(tmp_path, replace(RULE, template_digest="f" * 64))
    with pytest.warns(store.StaleTuningWarning, match="made with template forward ffffffffffff"):
        assert find(tmp_path)[0] == CONFIGS["B"]
    (wrong,) = store.errors(
        tmp_path, "nvidia-h200", {}, {"forward": TEMPLATE.digest}, lambda row: ()
    )
    assert str(path) in wrong and "now it is" in wrong
    kept(tmp_path)
    assert not store.errors(
        tmp_path, "nvidia-h200", {}, {"forward": TEMPLATE.digest}, lambda row: ()
    )


def test_a_rule_with_a_knob_that_is_gone_is_not_used(tmp_path):
    gone = LaunchConfig.of({**BASE, "EDGE": 3})
    kept(tmp_path, replace(RULE, configurations={**CONFIGS, "B": gone}))
    with pytest.warns(store.StaleTuningWarning, match="unknown knob EDGE; .*it is not used"):
        assert find(tmp_path)[1] == "template default"


def test_a_damaged_rule_is_an_error_that_names_the_file(tmp_path):
    path = kept(tmp_path)
    path.write_text(path.read_text().replace("return B", "return exit()"))
    with pytest.raises(ArtifactError, match="restore or delete it"):
        find(tmp_path)
    (wrong,) = untuned.errors(tmp_path, "nvidia-h200", {"forward": TEMPLATE.digest})
    assert "damaged" in wrong


def test_no_warning_and_no_analysis_without_a_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(untuned, "features_of", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(tmp_path)[1] == "template default"


def test_features_are_what_the_words_say():
    found = features_of(WINDOW, PROBLEM, 2048, 2048)
    assert list(found) == list(MEANING)
    assert found["row_keys"] == pytest.approx(128 - 128 * 127 / 2 / 2048, abs=0.1)
    assert found["rows"] == 4 * 2048 and found["group"] == 1 and found["specialised"] is True
    strided = Pattern.from_yaml("sparse_transformer_strided")
    assert features_of(strided, strided.problem, 32768, 32768)["residues"] is True


@pytest.mark.parametrize("part", ["queries", "keys"])
def test_gradient_kernels_have_rules_of_their_own(tmp_path, part):
    """Asked by the name of the part's template; features are of the schedule that this part has."""
    template = gradient_template(part)
    base = template.default(PROBLEM, H200).as_dict()
    configs = {
        "A": LaunchConfig.of({**base, "BLOCK_N": 32}),
        "B": LaunchConfig.of({**base, "STAGES": 3}),
    }
    named = {"template": template.name, "template_digest": template.digest}
    made = replace(RULE, **named, configurations=configs)
    path = path_of(tmp_path, "nvidia-h200", template.name)
    path.parent.mkdir(parents=True)
    path.write_text(made.text())
    for pattern, name in ((WINDOW, "A"), (CAUSAL, "B")):
        labels = labels_of(part_candidates(pattern, PROBLEM, part))
        found = store.lookup(pattern, PROBLEM, H200, template, labels, root=tmp_path)
        assert found == (configs[name], f"rule of the GPU ({name})")
    assert find(tmp_path)[1] == "template default"  # of the forward kernel it says nothing
    assert untuned.errors(tmp_path, "nvidia-h200", {template.name: template.digest}) == []
