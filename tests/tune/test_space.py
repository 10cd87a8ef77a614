"""The space: conditions, one canonical name, enumeration and steps."""

from __future__ import annotations

import itertools
import random

import optuna
import pytest

from sparsegen.codegen.knobs import Knob, LaunchConfig
from sparsegen.errors import TuneError
from sparsegen.tune.space import Space
from tests.tune.standin import DEFAULT, KNOBS

SPACE = Space(KNOBS)


def changed(**values):
    return {**DEFAULT.as_dict(), **values}


def test_inactive_knobs_take_their_default_so_equal_configurations_are_one():
    assert SPACE.canonical(changed(grid_factor=2)) == DEFAULT
    assert SPACE.canonical(changed(grid_factor=2, persistent=True)) != SPACE.canonical(
        changed(grid_factor=1, persistent=True)
    )
    assert SPACE.canonical({}) == DEFAULT == SPACE.default


def test_enumerate_gives_each_configuration_once():
    configs = list(SPACE.enumerate())
    assert len(configs) == len(set(configs)) == SPACE.cardinality
    assert SPACE.cardinality == 4 * 3 * 2 * 4 * (1 + 2)
    every = itertools.product(*(knob.choices for knob in KNOBS))
    names = [knob.name for knob in KNOBS]
    assert {SPACE.canonical(dict(zip(names, values))) for values in every} == set(configs)


def test_suggest_asks_only_for_active_knobs_and_is_canonical():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    seen = set()
    for _ in range(40):
        trial = study.ask()
        config = SPACE.suggest(trial)
        assert config == SPACE.canonical(config.as_dict())
        assert trial.params == SPACE.parameters(config)
        assert ("grid_factor" in trial.params) == config["persistent"]
        seen.add(config)
        study.tell(trial, 1.0)
    assert len(seen) > 20


def test_enqueued_parameters_come_back_as_the_same_configuration():
    study = optuna.create_study()
    for config in list(SPACE.enumerate())[::37]:
        study.enqueue_trial(SPACE.parameters(config))
        trial = study.ask()
        assert SPACE.suggest(trial) == config
        study.tell(trial, 1.0)


def test_neighbours_are_one_step_away():
    near = SPACE.neighbours(DEFAULT)
    assert len(near) == len(set(near)) == 2 + 2 + 1 + 2 + 1
    for config in near:
        different = [n for n, v in config.values if v != DEFAULT[n]]
        assert len(different) == 1
    assert LaunchConfig.of(changed(block_m=256)) not in near


def test_draws_stay_inside():
    everything = set(SPACE.enumerate())
    rng = random.Random(3)
    drawn = {SPACE.draw(rng) for _ in range(300)}
    assert drawn <= everything and len(drawn) > 100


def test_chains_of_conditions_and_declaration_order():
    a = Knob("a", (False, True), False, "")
    b = Knob("b", (1, 2), 1, "", when=("a", True))
    c = Knob("c", ("x", "y"), "x", "", when=("b", 2))
    space = Space((c, b, a))
    assert [knob.name for knob in space.knobs] == ["a", "b", "c"]
    assert space.cardinality == 1 + 1 + 2
    assert space.canonical({"a": False, "b": 2, "c": "y"}) == space.default


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ((Knob("a", (1, 2), 3, ""),), "default 3 of a is not among"),
        ((Knob("a", (1, 1), 1, ""),), "a lists a choice twice"),
        ((Knob("a", (1,), 1, ""), Knob("a", (2,), 2, "")), "declared twice"),
        ((Knob("a", (1,), 1, "", when=("b", 1)),), "depends on b, which is not declared"),
        ((Knob("a", (1,), 1, ""), Knob("b", (1,), 1, "", when=("a", 2))), "which a never is"),
        (
            (Knob("a", (1,), 1, "", when=("b", 1)), Knob("b", (1,), 1, "", when=("a", 1))),
            "depend on each other",
        ),
    ],
)
def test_contradictions_are_named(knobs, words):
    with pytest.raises(TuneError, match=words):
        Space(knobs)


def test_unknown_knobs_and_values_are_errors():
    with pytest.raises(TuneError, match="unknown knob colour"):
        SPACE.canonical({"colour": 1})
    with pytest.raises(TuneError, match=r"block_m cannot be 48; choices: \(32, 64"):
        SPACE.canonical({"block_m": 48})
    with pytest.raises(TuneError, match="persistent cannot be 1"):
        SPACE.canonical({"persistent": 1})
