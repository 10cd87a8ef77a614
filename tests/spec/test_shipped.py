"""The shipped files: patterns that load, say where they come from and mean what they say; and the JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from sparsegen.spec import Pattern, Problem, json_schema, shipped_patterns
from sparsegen.spec.language import NODES
from tests.spec.acceptance import FOLDER

SHIPPED = shipped_patterns()
RUNTIME = {"packed_documents", "block_mask", "moba"}


def test_at_least_seventeen() -> None:
    assert len(SHIPPED) >= 17


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pattern(name: str) -> None:
    pattern = Pattern.from_yaml(name)
    assert pattern.name == name and pattern == Pattern.from_yaml(SHIPPED[name])
    assert any(str(year) in pattern.summary for year in range(2019, 2027)), (
        "the source, with its year"
    )
    assert SHIPPED[name].read_text(encoding="utf-8").startswith("# "), "a comment that explains it"
    assert pattern.problem is not None and pattern.problem.dtype == "bfloat16"
    assert pattern.position_only == (name not in RUNTIME)
    for q_len, kv_len in pattern.problem.lengths:
        pattern.check_lengths(q_len, kv_len)


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - RUNTIME))
def test_every_query_sees_itself(name: str) -> None:
    pattern = Pattern.from_yaml(name)
    q_len, kv_len = pattern.problem.lengths[0]
    rows = [0, 1, q_len // 3, q_len - 1]
    mask = pattern.dense_mask(q_len, kv_len, rows=rows)
    assert all(mask[:, i, row + kv_len - q_len].all() for i, row in enumerate(rows))
    assert 0 < mask.float().mean() <= 1


def test_meaning_of_a_few_by_numbers() -> None:
    last = lambda name, n: int(Pattern.from_yaml(name).dense_mask(n, n, rows=[n - 1]).sum())
    assert last("mistral_window_4096", 8192) == 4096
    assert last("streaming_llm", 4096) == 1024 + 4
    assert (
        last("gpt_oss_window_128", 4096) == 128
        and Pattern.from_yaml("gpt_oss_window_128").sink_logits
    )
    assert last("llama4_chunks", 8192 + 5) == 5
    assert last("sparse_transformer_strided", 3072) == 128 + 3072 // 128 - 1
    assert last("sparse_transformer_fixed", 3072) == 128 + 32 * (3072 // 128 - 1)
    assert last("axial_image", 32768) == 128 + 256 - 1
    assert last("window_4096_global_8", 8192) == 4096 + 8


def test_digests_are_pinned() -> None:
    """Digests are part of every cache key: one that changes makes all artifacts of its pattern anew."""
    assert Pattern.from_dict({"mask": "causal"}).digest() == PINNED["causal"]
    assert Pattern.from_yaml("streaming_llm").digest() == PINNED["streaming_llm"]


PINNED = {
    "causal": "272ba7a698b8d82e250da93b970e69adc91486a804e5a0a48ff037b6e23f5349",
    "streaming_llm": "02a088d1f977b6c5db554eda6958cee927b8e8dea33ddbb9223bbc5e689c2fcf",
}


# ---------------------------------------------------------------------- JSON Schema
def test_the_shipped_schema_is_the_generated_one() -> None:
    path = SHIPPED["causal"].with_name("pattern.schema.json")
    shipped = json.loads(path.read_text(encoding="utf-8"))
    assert shipped == json_schema(), "run python -m sparsegen.spec.schema"


def test_the_schema_knows_every_node() -> None:
    nodes = json_schema()["$defs"]["node"]["anyOf"]
    assert {next(iter(n["properties"])) for n in nodes[1:]} == set(NODES)
    assert all(next(iter(n["properties"].values()))["description"] for n in nodes[1:])


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(json_schema())
    return jsonschema.Draft202012Validator(json_schema())


def test_the_schema_accepts_what_is_accepted(validator: Any) -> None:
    for path in [*SHIPPED.values(), *FOLDER.glob("patterns/*.yaml")]:
        assert not list(validator.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))), (
            path.name
        )
    assert validator.is_valid({"mask": {"window": {"left": "inf"}}, "scale": 0.5})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"mask": "casual"},
        {"mask": "full", "heads": []},
        {"mask": {"window": {"size": 0}}},
        {"mask": {"window": {"size": 1}, "sink": {"tokens": 1}}},
        {"mask": {"strided": {}}},
        {"mask": {"all_of": []}},
        {"mask": {"not": {"sink": {"token": 1}}}},
        {"mask": "full", "layers": 1},
        {"mask": "full", "softcap": 0},
        {"mask": "full", "problem": {"dtype": "int8"}},
        {"heads": [{"heads": "2-x", "mask": "full"}]},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_refused(validator: Any, data: dict) -> None:
    assert not validator.is_valid(data)


# ---------------------------------------------------------------------- problems
def test_problem() -> None:
    from dataclasses import replace

    problem = Problem(head_dim=64, heads=6)
    assert (problem.value_dim, problem.kv_heads, problem.lengths) == (64, 6, ((4096, 4096),))
    assert replace(problem, lengths=[5, [1, 9]]).lengths == ((5, 5), (1, 9))
    assert hash(problem) == hash(Problem(head_dim=64, heads=6, kv_heads=6)) and problem == Problem(
        head_dim=64, heads=6, value_dim=64
    )
    assert problem.to_data() == {"head_dim": 64, "heads": 6}
