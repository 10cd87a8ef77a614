"""Reading YAML: places, limits and everything that a hostile file may hold.  Each is one SpecError, of little work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsegen.errors import SpecError
from sparsegen.spec import Pattern
from sparsegen.spec.yaml_tree import LONGEST
from tests.work import at_most


def refused(text: str, calls: int = 100_000) -> str:
    with pytest.raises(SpecError) as error, at_most(calls):
        Pattern.from_yaml_text(text, "p.yaml")
    assert len(str(error.value)) < 20_000
    return str(error.value)


def accepted(text: str) -> Pattern:
    return Pattern.from_yaml_text(text, "p.yaml")


CASES = {
    "empty": ("", "p.yaml:1:1: is empty; a pattern file needs at least mask or heads"),
    "comment only": (
        "# nothing\n",
        "p.yaml:1:1: is empty; a pattern file needs at least mask or heads",
    ),
    "duplicate key": (
        "mask: full\nname: a\nmask: causal\n",
        "p.yaml:3:1: mask: is given twice, first in line 1",
    ),
    "duplicate inner key": (
        "mask:\n  window: {size: 3, size: 4}\n",
        "p.yaml:2:21: mask.window.size: is given twice, first in line 2",
    ),
    "two documents": (
        "mask: full\n---\nmask: causal\n",
        "p.yaml:2:1: a pattern file holds one document, here a second one starts",
    ),
    "tag": (
        "mask: !!python/name:os.system full\n",
        "p.yaml:1:7: mask: tags are not allowed, got tag:yaml.org,2002:python/name:os.system",
    ),
    "unknown alias": ("mask: *nowhere\n", "p.yaml:1:7: mask: the alias *nowhere has no anchor"),
    "alias of itself": (
        "mask: &a {not: *a}\n",
        "p.yaml:1:16: mask.not: the alias *a stands inside its own anchor",
    ),
    "number as key": ("mask: full\n3: 4\n", "p.yaml:2:1: a key must be a word, got 3"),
    "list as key": ("mask: full\n[a, b]: 4\n", "p.yaml:2:1: a key must be a word, got a list"),
    "null as key": ("mask: full\n~: 4\n", "p.yaml:2:1: a key must be a word, got None"),
    "tab": (
        "mask:\n\twindow: {size: 3}\n",
        "p.yaml:2:1: is not YAML: while scanning for the next token, found character '\\t' that cannot start any token",
    ),
    "unclosed": (
        "mask: {window: {size: 3}\n",
        "p.yaml:2:1: is not YAML: while parsing a flow mapping, expected ',' or '}', but got '<stream end>'",
    ),
    "nul": ("mask: full\nname: a\0b\n", "p.yaml:2:8: the character U+0000 is not allowed in YAML"),
    "surrogate": (
        "mask: full\nname: a\ud800\n",
        "p.yaml:2:8: the character U+D800 is not allowed in YAML",
    ),
    "long number": (
        "mask: {window: {size: " + "9" * 5000 + "}}\n",
        "p.yaml:1:23: mask.window.size: a number has at most 19 digits, got " + "9" * 59 + "…",
    ),
    "not a number": (
        "mask: {window: {size: .nan}}\n",
        "p.yaml:1:23: mask.window.size: must be an integer from 1 to 2147483648, got nan",
    ),
    "hexadecimal": (
        "mask: {window: {size: 0x10}}\n",
        "p.yaml:1:23: mask.window.size: must be an integer from 1 to 2147483648, got '0x10'",
    ),
    "leading zero": (
        "mask: {window: {size: 010}}\n",
        "p.yaml:1:23: mask.window.size: must be an integer from 1 to 2147483648, got '010'",
    ),
    "merge key": (
        "mask: full\n<<: {name: b}\n",
        "p.yaml:2:1: <<: unknown key; allowed: name, summary, mask, heads, align, scale, softcap, alibi, sink_logits, null_key, problem",
    ),
    "unicode look-alike": (
        "mask: саusal\n",
        "p.yaml:1:7: mask: unknown node 'саusal' (did you mean 'causal'?); as a plain word: causal, documents, full, key_padding",
    ),
    "too long": ("#" * (LONGEST + 1), f"p.yaml:1:1: is longer than {LONGEST} characters"),
    "deep lists": (
        "mask: " + "[" * 100_000,
        "p.yaml:1:56: mask" + "[0]" * 49 + ": is nested deeper than 50 levels",
    ),
}


@pytest.mark.parametrize(("text", "message"), CASES.values(), ids=CASES)
def test_a_file_that_is_refused(text: str, message: str) -> None:
    first = refused(text).split("\n")[0]
    assert first == message


def test_deep_masks_are_refused_before_they_hurt() -> None:
    deep = "mask: " + "{not: " * 45 + "causal" + "}" * 45 + "\n"
    assert (
        refused(deep)
        == "p.yaml:1:247: mask"
        + ".not" * 40
        + ": a mask with nodes nested deeper than 40 is not allowed"
    )
    assert accepted("mask: " + "{not: " * 39 + "causal" + "}" * 39).dense_mask(4, 4)[
        0, 0
    ].tolist() == [False, True, True, True]
    data: object = "causal"
    for _ in range(100_000):
        data = {"not": data}
    with pytest.raises(SpecError, match="is nested deeper than 50 levels"):
        Pattern.from_dict({"mask": data})


def test_an_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [causal, causal, causal, causal, causal, causal, causal, causal, causal]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, 12)]
    assert "holds more than 20000 values, aliases followed" in refused(
        "\n".join(lines) + "\nmask: {all_of: *a11}\n", calls=800_000
    )


def test_a_python_value_that_holds_itself_is_refused() -> None:
    data: dict = {"mask": {}}
    data["mask"]["not"] = data["mask"]
    with pytest.raises(SpecError, match="is nested deeper than 50 levels"):
        Pattern.from_dict(data)


def test_very_many_nodes_are_refused() -> None:
    text = "mask: {any_of: [" + ", ".join(["causal"] * 5000) + "]}\n"
    assert "a mask with more than 2000 nodes is not allowed" in refused(text, calls=2_500_000)


def test_aliases_share_a_node() -> None:
    text = "mask:\n  any_of:\n    - all_of: [causal, &w {window: {size: 3}}]\n    - not: *w\n"
    assert accepted(text) == Pattern.from_dict(
        {
            "mask": {
                "any_of": [
                    {"all_of": ["causal", {"window": {"size": 3}}]},
                    {"not": {"window": {"size": 3}}},
                ]
            }
        }
    )


def test_comments_order_and_style_do_not_change_the_digest() -> None:
    one = accepted("name: a\nmask: {window: {left: 3, right: 1}}\nsoftcap: 5\n")
    two = accepted(
        "# why\nsoftcap: 5.0\nsummary: b\nmask:\n  window:\n    right: 1   # one\n    left: 3\nname: b\nproblem: {heads: 2}\n"
    )
    assert one.digest() == two.digest() and one != two
    assert one.digest() != accepted("mask: {window: {left: 3, right: 2}}\nsoftcap: 5\n").digest()
    assert one.digest() != accepted("mask: {window: {left: 3, right: 1}}\nsoftcap: 6\n").digest()


def test_numbers_of_yaml() -> None:
    assert accepted("mask: {window: {size: 32_768}}").rules[0].mask.size == 32768
    assert accepted("mask: full\nscale: 1e-1\n").scale == 0.1
    assert accepted("mask: {window: {left: .inf}}") == accepted("mask: {window: {left: inf}}")


def test_byte_order_mark_and_windows_line_ends(tmp_path) -> None:
    path = tmp_path / "my pattern.yaml"
    path.write_bytes(b"\xef\xbb\xbfmask:\r\n  causal\r\n")
    assert Pattern.from_yaml(path).name == "my_pattern"


def test_a_pattern_knows_the_places_of_its_nodes() -> None:
    pattern = accepted("mask:\n  all_of:\n    - causal\n    - window: {size: 3}\n")
    assert pattern.place("mask.all_of[1]") == "p.yaml:4:7"
    assert [path for path, _ in pattern.nodes()] == ["mask", "mask.all_of[0]", "mask.all_of[1]"]
    assert Pattern.from_dict({"mask": "full"}).place("mask") == "mask"


@pytest.mark.parametrize("settings", ["", "scale: 0.5\n", "softcap: 30\nalign: top_left\n"])
def test_dataclasses_replace_keeps_all_other_settings(settings: str) -> None:
    """It gives every field to the constructor, those that the file leaves out as None."""
    pattern = accepted("mask: causal\n" + settings)
    renamed = replace(pattern, name="other")
    assert renamed.name == "other" and renamed.digest() == pattern.digest()
    assert replace(renamed, name=pattern.name) == pattern
    assert (
        replace(pattern, scale=None, softcap=None).to_dict().keys().isdisjoint({"scale", "softcap"})
    )
    with pytest.raises(SpecError, match="softcap: must be a finite number above 0, got -1"):
        replace(pattern, softcap=-1)
