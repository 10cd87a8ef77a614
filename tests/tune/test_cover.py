"""Few configurations that lose little: the set, the rule, what it loses where it has not looked, and gaps."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsegen.cli import app
from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError, TuneError
from sparsegen.report.cover import cover_of
from sparsegen.tune import recording, rule
from sparsegen.tune.cover import HELD_OUT, cover, fewest, split
from sparsegen.tune.recorded_studies import of_studies
from sparsegen.tune.tree import Group, grouped
from sparsegen.tune.tree import named as pattern_tree
from sparsegen.tune.tuner import Budget, tune
from tests.tune.recordings import PLAIN, write_times
from tests.tune.standin import InProcessLane, StandInSource

GOLDEN = Path(__file__).parents[1] / "golden" / "tune" / "forward.rule.yaml"
KERNELS = {
    "wide": {"BLOCK_M": 128, "BLOCK_N": 128},
    "narrow": {"BLOCK_M": 64, "BLOCK_N": 64},
    "plain": {"BLOCK_M": 64, "BLOCK_N": 32},
    "middling": {"BLOCK_M": 128, "BLOCK_N": 64},
}
CONFIGS = {name: LaunchConfig.of(values) for name, values in KERNELS.items()}


def problems(patterns=("causal", "window", "axial", "local")):
    """Each pattern at four lengths; windows and local see few keys, axial has no specialised kernel."""
    keys = {"causal": lambda n: n / 2, "window": lambda n: 128.0, "axial": lambda n: 300.0}
    return {
        f"{pattern} {n}": {
            "row_keys": keys.get(pattern, lambda n: 96.0)(n),
            "specialised": pattern != "axial",
            "q_len": n,
            "kv_len": n,
            "rows": 8 * n,
        }
        for pattern in patterns
        for n in (2048, 4096, 8192, 16384)
    }


def times(problem, name):
    """wide wins where there are many keys, narrow where few, plain where no kernel is specialised."""
    best = {"causal": "wide", "window": "narrow", "local": "narrow", "axial": "plain"}[
        problem.split()[0]
    ]
    return 100.0 if name == best else 104.0 if name == "middling" else 140.0


def written(path, time=times, what=None, **of):
    return write_times(path, problems() if what is None else what, CONFIGS, time, **of)


def test_the_fewest_and_their_rule(tmp_path):
    found = cover(recording.read(written(tmp_path / "r.jsonl")))
    kept = set(found.rule.configurations.values())
    assert kept == {CONFIGS["wide"], CONFIGS["narrow"], CONFIGS["plain"]} and found.ok
    assert found.worst(False) == found.worst(True) == 0.0
    held = [one for one in found.losses if one.held_out]
    assert len(held) >= 0.3 * len(found.losses)
    assert {one.problem.split()[0] for one in held} == {"causal", "window", "axial", "local"}


def test_one_is_enough_where_the_limit_allows_it(tmp_path):
    found = cover(recording.read(written(tmp_path / "r.jsonl")), limit=0.07)
    assert list(found.rule.configurations.values()) == [CONFIGS["middling"]]
    assert found.rule.code == "return A"
    assert found.worst(True) == pytest.approx(0.04)


OWN = {  # what each configuration takes of problems that have the same features but for their lengths
    "odd": lambda n: {"wide": 100.0, "narrow": 110.0, "plain": 130.0, "middling": 110.0},
    "even": lambda n: {"wide": 130.0, "narrow": 100.0, "plain": 130.0, "middling": 110.0},
    "cut": lambda n: {"wide": 100.0 if n > 3300 else 120.0, "narrow": 140.0, "plain": 100.0 if n < 3300 else 125.0, "middling": 110.0},
}  # fmt: skip


def test_patterns_that_no_feature_tells_apart_have_rules_of_their_own(tmp_path):
    """Their names do: one configuration each, or one on either side of a length, and two problems on each side of it."""
    what = {
        f"{pattern} {n}": {"row_keys": 100.0, "q_len": n, "kv_len": n, "rows": 8 * n}
        for pattern in OWN
        for n in range(512, 6145, 512)
    }
    path = write_times(
        tmp_path / "r.jsonl", what, CONFIGS, lambda p, c: OWN[p.split()[0]](int(p.split()[1]))[c]
    )
    found = cover(recording.read(path), limit=0.05)
    named = found.rule.configurations
    asked = lambda pattern, n: named[
        found.rule.choose({**PLAIN, **what[f"{pattern} {n}"], "pattern": pattern})
    ]
    for n in range(512, 6145, 512):
        assert asked("odd", n) == CONFIGS["wide"] and asked("even", n) == CONFIGS["narrow"]
        assert asked("cut", n) == CONFIGS["wide" if n > 3300 else "plain"]
    assert 'if pattern == "cut":' in found.rule.code and "elif pattern" in found.rule.code
    assert found.ok


def test_one_problem_is_no_reason_for_a_question():
    """Of five problems one has a best configuration of its own: the pattern keeps what loses least, and the one is told."""
    features = {f"p {n}": {"pattern": "p", "q_len": n} for n in range(1, 6)}
    losses = {
        n: {
            CONFIGS["wide"]: 0.0 if n != "p 3" else 0.2,
            CONFIGS["narrow"]: 0.0 if n == "p 3" else 0.3,
        }
        for n in features
    }
    names, limit = list(features), 0.03
    filled = {n: {**PLAIN, **f} for n, f in features.items()}
    assert grouped(names, losses, filled, limit) == Group(tuple(names))
    costs = {n: {"A": x[CONFIGS["wide"]], "B": x[CONFIGS["narrow"]]} for n, x in losses.items()}
    assert pattern_tree(Group(tuple(names)), costs, ["A", "B"], limit) == "A"
    losses["p 4"] = losses["p 5"] = losses["p 3"]  # three of a kind are one
    (name, bound, yes, no) = grouped(names, losses, filled, limit)
    assert (name, bound) == ("q_len", 2.4) and yes.problems == ("p 1", "p 2")
    assert no.problems == ("p 3", "p 4", "p 5")


@pytest.mark.parametrize("common", [True, False])
def test_gaps_are_no_reason_against_a_question(tmp_path, common):
    """Each problem was tried with two configurations of its own, as studies do, and perhaps with one that all have: a question each."""
    what = {f"odd {n}": {"q_len": n, "rows": 8 * n} for n in range(1024, 7168, 1024)}
    configs = {f"{p} {i}": LaunchConfig.of({"n": f"{p} {i}"}) for p in what for i in (0, 1)}
    configs |= {"all": LaunchConfig.of({"n": "all"})} if common else {}

    def some(problem, name):
        if name == "all":
            return 150.0
        return (100.0 if name.endswith("0") else 130.0) if name[:-2] == problem else None

    found = cover(recording.read(write_times(tmp_path / "r.jsonl", what, configs, some)))
    seen = [one for one in found.losses if not one.held_out]
    assert len(seen) == 4 and [one.rule for one in seen] == [0.0] * 4
    assert all(one.rule is None for one in found.losses if one.held_out) and not found.ok


def test_a_pattern_that_the_tree_answers_alike_is_not_named(tmp_path):
    assert "pattern" not in cover(recording.read(written(tmp_path / "r.jsonl"))).rule.code


def test_the_file_of_the_rule_is_golden(tmp_path, request):
    path = written(tmp_path / "r.jsonl", synthetic=False)
    page = cover_of(str(path), keep=True, root=tmp_path)
    text = page.kept.read_text()
    if request.config.getoption("--update-golden"):
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert page.kept == tmp_path / "nvidia-h200" / "forward.rule.yaml"
    assert rule.read(page.kept) == page.found.rule


def test_a_gap_serves_nothing_and_is_counted(tmp_path):
    """What would be best is not measured at one problem: another must serve it, and the gap is told."""

    def gaps(problem, name):
        return None if (problem, name) == ("window 4096", "narrow") else times(problem, name)

    found = cover(recording.read(written(tmp_path / "r.jsonl", gaps)))
    assert found.missing == {"not tried": 1} and found.measured == found.pairs - 1
    (window,) = [one for one in found.losses if one.problem == "window 4096"]
    if window.held_out:
        assert window.rule is None and found.worst(True) is None and not found.ok
    else:  # the best that was measured there is middling
        assert CONFIGS["middling"] in found.rule.configurations.values()


def test_an_unknown_loss_is_never_kept(tmp_path):
    apart = split(list(recording.read(written(tmp_path / "a.jsonl")).problems.values()), HELD_OUT)
    hidden = next(iter(sorted(n for n in apart if n.startswith("causal"))))

    def gaps(problem, name):
        return None if (problem, name) == (hidden, "wide") else times(problem, name)

    path = written(tmp_path / "r.jsonl", gaps, synthetic=False)
    found = cover(recording.read(path))
    assert found.worst(True) is None and not found.ok
    with pytest.raises(TuneError, match=f"not kept: {hidden} loses an unknown share"):
        cover_of(str(path), keep=True, root=tmp_path)
    assert not (tmp_path / "nvidia-h200").exists()
    assert "an unknown share" in cover_of(str(path)).text()


def test_a_loss_on_what_was_held_out_is_said_and_not_kept(tmp_path):
    apart = split(list(recording.read(written(tmp_path / "a.jsonl")).problems.values()), HELD_OUT)
    odd = sorted(apart)[0]

    def surprising(problem, name):
        if problem == odd:
            return 100.0 if name == "middling" else 120.0
        return times(problem, name)

    path = written(tmp_path / "r.jsonl", surprising, synthetic=False)
    found = cover(recording.read(path))
    assert found.worst(False) == 0.0 and found.worst(True) == pytest.approx(0.2)
    with pytest.raises(TuneError, match=f"{odd} loses 20.0%.*the limit is 3.0%"):
        cover_of(str(path), keep=True, root=tmp_path)


def test_synthetic_times_are_never_kept(tmp_path):
    path = written(tmp_path / "r.jsonl")
    with pytest.raises(TuneError, match="synthetic times: no rule is kept"):
        cover_of(str(path), keep=True, root=tmp_path)


def test_too_little_is_one_sentence(tmp_path):
    path = written(tmp_path / "r.jsonl", what={"causal 1": {}})
    with pytest.raises(TuneError, match="1 problems are too few"):
        cover(recording.read(path))
    path = written(tmp_path / "s.jsonl", lambda p, n: None)
    with pytest.raises(TuneError, match="0 problems are too few"):
        cover(recording.read(path))
    path = written(tmp_path / "t.jsonl")
    last = list(recording.read(path).problems)[-1]
    wrong = [{**x, "time_us": None, "kind": "wrong result"} for x in of(path, last)]
    rest = [x for x in lines(path) if x.get("problem") != last]
    path.write_text("".join(json.dumps(x) + "\n" for x in [*rest, *wrong]))
    with pytest.raises(TuneError, match=f"nothing was measured of {last}"):
        cover(recording.read(path))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(path, problem):
    return [x for x in lines(path) if x.get("problem") == problem]


def test_problems_that_a_run_had_no_time_for_are_no_part_of_it(tmp_path):
    path = written(tmp_path / "r.jsonl")
    untouched = ["local 8192", "local 16384", "axial 16384"]
    rest = [x for x in lines(path) if x.get("problem") not in untouched]
    path.write_text("".join(json.dumps(x) + "\n" for x in rest))
    assert set(untouched) < set(recording.read(path).problems)
    found = cover(recording.read(path))
    assert found.ok and {one.problem for one in found.losses} == set(problems()) - set(untouched)


@pytest.mark.parametrize("limit", [0.0, -0.1])
def test_a_limit_that_nothing_meets_is_one_sentence(tmp_path, limit):
    """At 0 not even the best itself is within it, and the search for a set would never end."""
    with pytest.raises(TuneError, match="the limit must be above 0"):
        cover(recording.read(written(tmp_path / "r.jsonl")), limit=limit)


def test_more_configurations_than_names_are_one_sentence(tmp_path):
    many = {f"p{i} 2048": {"q_len": 1000 + i} for i in range(45)}
    configs = {name: LaunchConfig.of({"n": i}) for i, name in enumerate(many)}
    own = lambda problem, name: 100.0 if problem == name else 200.0
    path = write_times(tmp_path / "r.jsonl", many, configs, own)
    with pytest.raises(TuneError, match="more than 26 configurations are needed"):
        cover(recording.read(path))


@pytest.mark.parametrize("seed", range(8))
def test_the_set_is_the_smallest_there_is(seed):
    """Against every subset, on random matrices with gaps."""
    chance = random.Random(seed)
    names = [f"p{i}" for i in range(9)]
    configs = [LaunchConfig.of({"n": i}) for i in range(8)]
    table = {
        n: {c: chance.choice([100, 101, 102, 110, 120]) for c in configs if chance.random() < 0.8}
        for n in names
    }
    table = {n: row or {configs[0]: 100} for n, row in table.items()}
    found = next(fewest([(n,) for n in names], table, 0.03))
    sizes = [
        k
        for k in range(1, 9)
        for s in itertools.combinations(configs, k)
        if all(
            any(c in row and row[c] < min(row.values()) * 1.03 for c in s) for row in table.values()
        )
    ]
    assert len(found) == min(sizes)
    for row in table.values():
        assert any(c in row and row[c] < min(row.values()) * 1.03 for c in found)


def test_the_split_is_the_same_every_time_and_leaves_something(tmp_path):
    whole = list(recording.read(written(tmp_path / "r.jsonl")).problems.values())
    apart = split(whole, HELD_OUT)
    assert apart == split(whole[::-1], HELD_OUT)
    single = [p for p in whole if p.name.endswith(" 2048")]
    assert 2 <= len(split(single, HELD_OUT)) < len(single)


BROKEN = {
    "runs code": ("rule: |\n  __import__('os').system('true')\n", "only if, else and return"),
    "unknown feature": (
        "rule: |\n  if colour <= 3:\n      return A\n  else:\n      return A\n",
        "no feature",
    ),
    "unknown name": ("rule: |\n  return Z\n", "return one of A"),
    "falls through": ("rule: |\n  if q_len <= 3:\n      return A\n", "each block has one return"),
    "a call": (
        "rule: |\n  if q_len <= f(3):\n      return A\n  else:\n      return A\n",
        "no feature",
    ),
    "a name against a number": (
        "rule: |\n  if pattern == 3:\n      return A\n  else:\n      return A\n",
        "no pattern against a name",
    ),
    "a name that is compared": (
        'rule: |\n  if pattern <= "a":\n      return A\n  else:\n      return A\n',
        "no pattern against a name",
    ),
    "a number against a name": (
        'rule: |\n  if q_len == "a":\n      return A\n  else:\n      return A\n',
        "no feature against a number",
    ),
    "no python": ("rule: |\n  if if\n", "line 1"),
    "absent": ("", "damaged"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_rule_that_is_none_is_one_sentence(tmp_path, what):
    text, words = BROKEN[what]
    head = GOLDEN.read_text().split("rule: |")[0]
    path = tmp_path / "forward.rule.yaml"
    path.write_text(head + text)
    with pytest.raises(ArtifactError, match="restore or delete it") as caught:
        rule.read(path)
    assert words in str(caught.value)


def test_no_file_is_no_rule(tmp_path):
    assert rule.read(tmp_path / "absent") is None


def test_every_question_is_asked_as_it_is_written():
    """Walking the code and running it as Python agree."""
    one = rule.read(GOLDEN)
    body = (
        "def forward("
        + ", ".join(PLAIN)
        + "):\n"
        + "".join(f"    {x}\n" for x in one.code.splitlines())
    )
    space = {name: name for name in one.configurations}
    exec(body, space)
    for keys, special, n in itertools.product(
        (1.0, 96.0, 250.0, 4000.0), (True, False), (64, 4096)
    ):
        features = {**PLAIN, "row_keys": keys, "specialised": special, "q_len": n, "kv_len": n}
        assert one.choose(features) == space["forward"](**features)


def test_the_command_line(tmp_path):
    path = written(tmp_path / "r.jsonl")
    done = CliRunner().invoke(app, ["tune", "--cover", str(path)])
    assert done.exit_code == 0, done.output
    assert (
        "3 configurations for nvidia-h200" in done.stdout
        and "problems held out: loses at most 0.0%" in done.stdout
    )
    values = json.loads(CliRunner().invoke(app, ["tune", "--cover", str(path), "--json"]).stdout)
    assert values["ok"] and values["worst_held_out"] == 0.0 and "if " in values["rule"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a PATTERN"),
        (["causal", "--cover", "x"], "measures nothing"),
        (["causal", "--limit", "0.1"], "--limit goes with"),
        (["causal", "--gpu", "h200"], "--gpu goes with"),
        (["causal", "--replay", "x", "--keep"], "measures nothing that could be kept"),
    ],
)
def test_options_that_do_not_go_together(words, said):
    done = CliRunner().invoke(app, ["tune", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_studies_are_a_recording_too(tmp_path):
    path = tmp_path / "s.sqlite"
    first = recording.read(written(tmp_path / "r.jsonl"))
    for number, (name, problem) in enumerate(sorted(first.problems.items())[:3]):
        source = StandInSource(key=name)
        about = {"origin": origin_dict(first), "problem": problem.as_dict()}
        tune(
            source,
            budget=Budget(6 + number, 60),
            storage=path,
            lane=InProcessLane(source),
            about=about,
        )
    other = StandInSource(key="says nothing of itself")
    tune(other, budget=Budget(3, 600), storage=path, lane=InProcessLane(other))
    found = of_studies(path)
    assert sorted(len(found.times(n)) for n in found.problems) == [6, 7, 8]
    assert found.origin.gpu == "nvidia-h200"
    with pytest.raises(TuneError, match="one GPU .*none that say what they are of"):
        of_studies(path, "nvidia-b200")
    assert cover_of(str(path), limit=0.5).found.pairs > 0


def origin_dict(whole):
    from dataclasses import asdict

    return asdict(whole.origin)
