"""Every kind of mistake, by its full text: place, path, what is allowed, what was found."""

from __future__ import annotations

from typing import Any

import pytest

from sparsegen.errors import InputError, SpecError
from sparsegen.spec import Pattern, Problem

TOP = "name, summary, mask, heads, align, scale, softcap, alibi, sink_logits, null_key, problem"
BIG = 2147483648


def mistakes(text: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        Pattern.from_yaml_text(text, "p.yaml")
    return str(error.value).split("\n")


def of_mask(mask: Any) -> list[str]:
    with pytest.raises(SpecError) as error:
        Pattern.from_dict({"mask": mask})
    return str(error.value).split("\n")


def test_all_mistakes_of_a_file_at_once_with_their_places() -> None:
    text = """\
name: two words
mask:
  all_of:
    - casual
    - any_of:
        - window: {size: 0}
        - sink: {token: -1, tokens: -1}
softcap: .nan
problem:
  heads: 6
  kv_heads: 4
sumary: x
"""
    assert mistakes(text) == [
        "p.yaml:1:7: name: must be 1 to 100 letters, digits, '_', '-' or '.', the first a letter or digit, got 'two words'",
        "p.yaml:4:7: mask.all_of[0]: unknown node 'casual' (did you mean 'causal'?); as a plain word: causal, documents, full, key_padding",
        f"p.yaml:6:26: mask.all_of[1].any_of[0].window.size: must be an integer from 1 to {BIG}, got 0",
        "p.yaml:7:18: mask.all_of[1].any_of[1].sink.token: unknown key (did you mean 'tokens'?); allowed: tokens",
        f"p.yaml:7:37: mask.all_of[1].any_of[1].sink.tokens: must be an integer from 0 to {BIG}, got -1",
        "p.yaml:8:10: softcap: must be a finite number above 0, got nan",
        "p.yaml:10:3: problem: heads must be a multiple of kv_heads, got 6 and 4",
        f"p.yaml:12:1: sumary: unknown key (did you mean 'summary'?); allowed: {TOP}",
    ]


RANGES = [  # mask, path of the value, what is allowed, value in words
    ({"window": {"size": 0}}, "window.size", f"an integer from 1 to {BIG}", "0"),
    ({"window": {"size": -1}}, "window.size", f"an integer from 1 to {BIG}", "-1"),
    ({"window": {"size": True}}, "window.size", f"an integer from 1 to {BIG}", "true"),
    ({"window": {"size": 8.0}}, "window.size", f"an integer from 1 to {BIG}", "8.0"),
    ({"window": {"size": "8"}}, "window.size", f"an integer from 1 to {BIG}", "'8'"),
    ({"window": {"size": None}}, "window.size", f"an integer from 1 to {BIG}", "nothing"),
    ({"window": {"size": BIG + 1}}, "window.size", f"an integer from 1 to {BIG}", "2147483649"),
    (
        {"window": {"size": 10**4000}},
        "window.size",
        f"an integer from 1 to {BIG}",
        "an integer of 13288 bits",
    ),
    ({"window": {"left": -1}}, "window.left", f"an integer from 0 to {BIG} or inf", "-1"),
    (
        {"window": {"radius": float("-inf")}},
        "window.radius",
        f"an integer from 0 to {BIG} or inf",
        "-inf",
    ),
    (
        {"dilated": {"size": 4, "dilation": 0}},
        "dilated.dilation",
        f"an integer from 1 to {BIG}",
        "0",
    ),
    ({"sink": {"tokens": -1}}, "sink.tokens", f"an integer from 0 to {BIG}", "-1"),
    (
        {"prefix": {"tokens": "run"}},
        "prefix.tokens",
        f"an integer from 0 to {BIG} or runtime",
        "'run'",
    ),
    (
        {"global": {"positions": [0, -1]}},
        "global.positions",
        f"a list of 1 to 4096 integers from 0 to {BIG}",
        "[0, -1]",
    ),
    (
        {"global": {"positions": []}},
        "global.positions",
        f"a list of 1 to 4096 integers from 0 to {BIG}",
        "[]",
    ),
    ({"global": {"tokens": 1, "rows": "yes"}}, "global.rows", "true or false", "'yes'"),
    ({"strided": {"stride": 0}}, "strided.stride", f"an integer from 1 to {BIG}", "0"),
    ({"chunks": {"size": 0}}, "chunks.size", f"an integer from 1 to {BIG}", "0"),
    (
        {"axial": {"shape": [0, 4]}},
        "axial.shape",
        f"a list of 1 to 16 integers from 1 to {BIG}",
        "[0, 4]",
    ),
    (
        {"random_blocks": {"block": 0, "per_row": 1, "seed": 0}},
        "random_blocks.block",
        f"an integer from 1 to {BIG}",
        "0",
    ),
    (
        {"random_blocks": {"block": -1, "per_row": 1, "seed": 0}},
        "random_blocks.block",
        f"an integer from 1 to {BIG}",
        "-1",
    ),
    (
        {"random_blocks": {"block": 8, "per_row": 0, "seed": 0}},
        "random_blocks.per_row",
        "an integer from 1 to 65536",
        "0",
    ),
    (
        {"random_blocks": {"block": 8, "per_row": 1, "seed": 2**24}},
        "random_blocks.seed",
        "an integer from 0 to 16777215",
        "16777216",
    ),
    (
        {"block_mask": {"block": [16]}},
        "block_mask.block",
        f"a list of 2 integers from 1 to {BIG}",
        "[16]",
    ),
    (
        {"block_mask": {"block": [0, 16]}},
        "block_mask.block",
        f"a list of 2 integers from 1 to {BIG}",
        "[0, 16]",
    ),
    (
        {"documents": {"positions": "restart"}},
        "documents.positions",
        "absolute or relative",
        "'restart'",
    ),
    (
        {"top_blocks": {"block": 8, "count": -1}},
        "top_blocks.count",
        f"an integer from 0 to {BIG}",
        "-1",
    ),
    (
        {"top_blocks": {"block": 8, "count": 1, "score": "max"}},
        "top_blocks.score",
        "mean or runtime",
        "'max'",
    ),
    ({"predicate": 5}, "predicate", "a text of at most 1000000 characters", "5"),
]


@pytest.mark.parametrize(
    ("mask", "path", "allowed", "found"), RANGES, ids=[f"{r[1]}={r[3]}" for r in RANGES]
)
def test_a_value_out_of_range(mask: Any, path: str, allowed: str, found: str) -> None:
    assert of_mask(mask) == [f"<dict>: mask.{path}: must be {allowed}, got {found}"]


RULES = [
    ({"window": {}}, "window: needs one of: size, radius, or left and/or right; got none of them"),
    (
        {"window": {"size": 4, "left": 2}},
        "window: needs one of: size, radius, or left and/or right; got more than one",
    ),
    (
        {"columns": {"stride": 4, "width": 5}},
        "columns: width must be at most stride, got width 5, stride 4",
    ),
    ({"global": {}}, "global: needs one of: tokens, positions; got neither"),
    (
        {"global": {"tokens": 1, "positions": [1]}},
        "global: needs one of: tokens, positions; got both",
    ),
    (
        {"global": {"tokens": 1, "rows": False, "columns": False}},
        "global: rows and columns are both false: nothing would be global",
    ),
    (
        {"axial": {"shape": [65536, 65536]}},
        f"axial: shape must have at most {BIG} cells, got 4294967296",
    ),
    (
        {"neighborhood": {"shape": [4, 4], "radius": [1]}},
        "neighborhood: needs one radius for each axis of shape, got 1 for 2",
    ),
    ({"strided": {}}, f"strided.stride: is missing; it must be an integer from 1 to {BIG}"),
    ("window", ": window needs its settings; write {window: …}"),
    ({"strided": 4}, "strided: strided needs a mapping of its settings (stride), got 4"),
    ({"causal": 3}, "causal: causal needs a mapping of its settings, got 3"),
    ({"causal": {"of": 1}}, "causal.of: unknown key; allowed: none"),
    ({"all_of": []}, "all_of: must be a list of at least one mask node, got []"),
    (
        {"any_of": {"causal": 1}},
        "any_of: must be a list of at least one mask node, got {causal: …}",
    ),
    (
        {"sink": {"tokens": 1}, "window": {"size": 2}},
        ": a mask node is a word or a mapping with one key, got 2 keys",
    ),
    ({}, ": a mask node is a word or a mapping with one key, got no key"),
    (None, ": a mask node is a word or a mapping with one key, got nothing"),
    ([{"sink": 1}], ": a mask node is a word or a mapping with one key, got [{sink: …}]"),
    (
        {"any_of": [{"documents": {"positions": "relative"}}]},
        "any_of[0]: documents: {positions: relative} must stand in an all_of, beside the nodes that it restarts",
    ),
    (
        {"not": {"documents": {"positions": "relative"}}},
        "not: documents: {positions: relative} must stand in an all_of, beside the nodes that it restarts",
    ),
]


@pytest.mark.parametrize(("mask", "message"), RULES, ids=[r[1][:40] for r in RULES])
def test_a_broken_rule(mask: Any, message: str) -> None:
    assert of_mask(mask) == ["<dict>: mask" + ("" if message[0] == ":" else ".") + message]


def test_scope_of_relative_positions() -> None:
    relative = {"documents": {"positions": "relative"}}
    random = {"random_blocks": {"block": 4, "per_row": 1, "seed": 0}}
    assert of_mask(
        {"all_of": [relative, {"any_of": ["causal", random]}, {"all_of": [relative, "causal"]}]}
    ) == [
        "<dict>: mask.all_of[1].any_of[1]: cannot stand beside documents: {positions: relative}: it draws from the blocks of the whole call",
        "<dict>: mask.all_of[2].all_of[0]: positions already restart here; write positions: relative once",
    ]


TOPS = [
    ({}, "a pattern has one of: mask, heads; got neither"),
    ({"mask": "full", "heads": []}, "a pattern has one of: mask, heads; got both"),
    ({"mask": "full", "layers": 3}, "layers: is reserved and cannot be used yet"),
    ({"mask": "full", "align": "left"}, "align: must be bottom_right or top_left, got 'left'"),
    ({"mask": "full", "scale": float("inf")}, "scale: must be a finite number, got inf"),
    ({"mask": "full", "softcap": 0}, "softcap: must be a finite number above 0, got 0"),
    ({"mask": "full", "scale": None}, "scale: must be a finite number, got nothing"),
    ({"mask": "full", "softcap": None}, "softcap: must be a finite number above 0, got nothing"),
    ({"mask": "full", "alibi": 1}, "alibi: must be true or false, got 1"),
    ({"mask": "full", "sink_logits": "true"}, "sink_logits: must be true or false, got 'true'"),
    ({"mask": "full", "null_key": []}, "null_key: must be true or false, got []"),
    ({"mask": "full", "summary": 3}, "summary: must be a text of at most 2000 characters, got 3"),
    ({"mask": "full", 3: 4}, f"3: unknown key; allowed: {TOP}"),
    ({"heads": "rest"}, "heads: must be a list of 1 to 1024 rules {heads: …, mask: …}, got 'rest'"),
    ({"heads": [3]}, "heads[0]: must be a mapping {heads: …, mask: …}, got 3"),
    ({"heads": [{"mask": "full"}]}, "heads[0]: heads is missing; a rule has heads and mask"),
    (
        {"heads": [{"heads": "3-1", "mask": "full"}]},
        "heads[0].heads: must be a head from 0 to 65535, a range such as \"2-3\", or a list of them, or rest, got '3-1'",
    ),
    (
        {"heads": [{"heads": [0, -2], "mask": "full"}]},
        'heads[0].heads[1]: must be a head from 0 to 65535, a range such as "2-3", or a list of them, or rest, got -2',
    ),
    (
        {"heads": [{"heads": [], "mask": "full"}]},
        "heads[0].heads: must name at least one head, got an empty list",
    ),
    (
        {"heads": [{"heads": "0-4", "mask": "full"}, {"heads": 4, "mask": "causal"}]},
        "heads[1].heads: head 4 already has a mask, in heads[0]",
    ),
    (
        {"heads": [{"heads": "rest", "mask": "full"}, {"heads": "rest", "mask": "causal"}]},
        "heads[1].heads: heads[0] already has the rest of the heads",
    ),
    (
        {"heads": [{"heads": "0-8", "mask": "full"}], "problem": {"heads": 8}},
        "heads[0].heads: names head 8, but problem.heads is 8",
    ),
    (
        {"heads": [{"heads": 0, "mask": "full"}], "problem": {"heads": 2}},
        "heads: head 1 has no mask; problem.heads is 2; add a rule for heads: rest",
    ),
    (
        {"mask": "full", "problem": []},
        "problem: problem needs a mapping of its settings (head_dim, value_dim, heads, kv_heads, batch, dtype, lengths, passes), got []",
    ),
    (
        {"mask": "full", "problem": {"head_dim": 0}},
        "problem.head_dim: must be an integer from 1 to 4096, got 0",
    ),
    (
        {"mask": "full", "problem": {"dtype": "int8"}},
        "problem.dtype: must be bfloat16 or float16 or float32, got 'int8'",
    ),
    (
        {"mask": "full", "problem": {"lengths": [0]}},
        f"problem.lengths: must be a list of lengths from 1 to {BIG}, each one number or [q_len, kv_len], got [0]",
    ),
    (
        {"mask": "full", "problem": {"passes": ["sideways"]}},
        "problem.passes: must be a list of some of forward, backward, decode, got ['sideways']",
    ),
]


@pytest.mark.parametrize(("data", "message"), TOPS, ids=[t[1][:50] for t in TOPS])
def test_a_mistake_beside_the_mask(data: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Pattern.from_dict(data)
    assert str(error.value) == "<dict>: " + message


def test_a_file_that_is_no_mapping() -> None:
    assert mistakes("- causal\n") == [
        "p.yaml:1:1: a pattern is a mapping with at least mask or heads, got ['causal']"
    ]


def test_objects_made_in_python_speak_the_same_way() -> None:
    with pytest.raises(SpecError) as error:
        Problem(head_dim=0, dtype="int8")
    assert str(error.value) == (
        "<Problem>: dtype: must be bfloat16 or float16 or float32, got 'int8'\n"
        "<Problem>: head_dim: must be an integer from 1 to 4096, got 0"
    )
    with pytest.raises(SpecError) as error:
        Problem(heds=8)  # type: ignore[call-arg]
    assert "<Problem>: heds: is not a setting here (did you mean 'heads'?)" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Any) -> None:
    with pytest.raises(SpecError) as error:
        Pattern.from_yaml("streaming_lm")
    assert str(error.value).startswith(
        "streaming_lm: cannot be read: no such file or directory (did you mean 'streaming_llm'?); shipped patterns: axial_image,"
    )
    with pytest.raises(SpecError, match="cannot be read: is a directory"):
        Pattern.from_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: a\nsummary: caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin.yaml:2:13: is not UTF-8: byte 0xe9$"):
        Pattern.from_yaml(tmp_path / "latin.yaml")
    with pytest.raises(SpecError, match="cannot be read: embedded null byte"):
        Pattern.from_yaml("nul\0byte")
    (tmp_path / "long.yaml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(SpecError, match=r"long.yaml: is longer than 1048576 bytes$"):
        Pattern.from_yaml(tmp_path / "long.yaml")


def test_one_fault_is_one_mistake() -> None:
    """No second sentence about a value that the first one replaced; an unknown key is a fault of its own."""
    number = "9" * 25
    assert mistakes(f"mask: {{window: {{size: {number}}}}}\n") == [
        f"p.yaml:1:23: mask.window.size: a number has at most 19 digits, got {number}"
    ]
    assert mistakes("mask: *a\n") == ["p.yaml:1:7: mask: the alias *a has no anchor"]
    assert len(mistakes("mask: !!python/name:os [causal]\n")) == 1
    assert len(mistakes("mask: causal\nmsk: *a\n")) == 2


@pytest.mark.parametrize("value", [None, 3, {"mask": "causal"}, b"causal"], ids=repr)
def test_what_is_no_name_of_a_pattern(value: Any) -> None:
    with pytest.raises(InputError, match="a pattern must be a sparsegen.Pattern, a file or"):
        Pattern.from_yaml(value)


@pytest.mark.parametrize(
    ("value", "got"), [("", "an empty name"), ("name: x\nmask: causal\n", "from_yaml_text reads")]
)
def test_a_text_or_nothing_in_place_of_a_name(value: str, got: str) -> None:
    with pytest.raises(SpecError, match=got) as error:
        Pattern.from_yaml(value)
    assert "\n" not in str(error.value)


def test_arguments_of_the_wrong_kind() -> None:
    with pytest.raises(InputError, match="the text of a pattern must be a str, got bytes"):
        Pattern.from_yaml_text(b"mask: causal")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="rules must hold at least one HeadRule"):
        Pattern(rules=())
