"""Mutated files: each is accepted and right, or one SpecError; never anything else, never slow, never large."""

from __future__ import annotations

import random
import resource
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsegen.errors import InputError, SpecError
from sparsegen.spec import Pattern
from sparsegen.spec.language import NODES
from tests.evaluator import OffGrid, evaluate
from tests.spec.random_patterns import LEAVES, random_pattern, runtime_for

FILES = 2000
SECONDS_A_FILE = 5
LENGTHS = [(12, 12), (5, 17), (17, 5), (1, 9), (20, 20)]


def test_the_random_patterns_know_every_node() -> None:
    assert set(LEAVES) | {"all_of", "any_of", "not"} == set(NODES)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_round_trips(seed: int) -> None:
    pattern = Pattern.from_dict(random_pattern(random.Random(seed)))
    assert (
        Pattern.from_dict(pattern.to_dict()) == pattern == Pattern.from_yaml_text(pattern.to_yaml())
    )
    assert hash(pattern) == hash(Pattern.from_dict(pattern.to_dict()))
    assert pattern.digest() == Pattern.from_yaml_text(pattern.to_yaml()).digest()


def test_unmutated_patterns_are_right() -> None:
    rng = random.Random(11)
    checked = sum(check(yaml.safe_dump(random_pattern(rng)), rng) == "right" for _ in range(300))
    assert checked >= 200


def test_mutated_files_are_right_or_one_error() -> None:
    rng = random.Random(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen: dict[str, int] = {}
    for _ in range(FILES):
        text = yaml.safe_dump(
            random_pattern(rng),
            sort_keys=rng.random() < 0.5,
            default_flow_style=rng.choice([None, True, False]),
        )
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            text = rng.choice(MUTATIONS)(text, rng)
        with time_limit(text):
            outcome = check(text, rng)
        seen[outcome] = seen.get(outcome, 0) + 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 300, f"{grown:.0f} MiB more"
    # A fuzz test that refuses all, or changes nothing, finds nothing.
    assert seen["refused"] > FILES / 4 and seen["right"] > FILES / 10, seen


@contextmanager
def time_limit(text: str):
    def late(*_):
        raise AssertionError(f"took longer than {SECONDS_A_FILE} s:\n{text[:2000]}")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_A_FILE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def check(text: str, rng: random.Random) -> str:
    """ "refused" by one SpecError; "right" by the evaluator; "large" or "apart": accepted, and not compared."""
    try:
        pattern = Pattern.from_yaml_text(text, "fuzz.yaml")
    except SpecError as error:
        lines = str(error).split("\n")
        assert 1 <= len(lines) == len(error.mistakes) and all(
            line.startswith("fuzz.yaml:") for line in lines
        )
        return "refused"
    assert Pattern.from_dict(pattern.to_dict()) == pattern, text
    data, (q_len, kv_len) = yaml.safe_load(text), rng.choice(LENGTHS)
    single = "mask" in data
    heads = pattern.problem.heads if pattern.problem and not single else 2
    if not single and not pattern.problem:
        heads = max([high for rule in pattern.rules for _, high in rule.heads or ()], default=1) + 1
    if heads > 16:
        return "large"
    blocks: dict[str, list[tuple[int, int]]] = {}
    for _, node in pattern.nodes():
        size = getattr(node, "block", None)
        for group in node.needs() if size is not None else ():
            blocks.setdefault(group[0], []).append(
                size if isinstance(size, tuple) else (size, size)
            )
    runtime = runtime_for(pattern.runtime_needs, blocks, q_len, kv_len, heads, rng)
    if runtime is None or pattern_needs_tensors(pattern):
        return "apart"
    try:
        wanted = evaluate(data, q_len, kv_len, heads, runtime)
    except OffGrid:
        with pytest.raises(InputError, match="cells, too few for kv_len"):
            pattern.dense_mask(q_len, kv_len, heads=heads, **runtime)
        return "off the grid"
    ours = pattern.dense_mask(q_len, kv_len, heads=heads, **runtime).numpy()
    ours = ours if ours.ndim == 4 else ours[None]
    assert (np.broadcast_to(ours, wanted.shape) == wanted).all(), text
    return "right"


def pattern_needs_tensors(pattern: Pattern) -> bool:
    """``top_blocks: {score: mean}`` is computed from q and k."""
    return any(node.keyword == "top_blocks" and not node.needs() for _, node in pattern.nodes())


# ---------------------------------------------------------------------- mutations: (text, rng) -> text
def _numbers(text: str, rng: random.Random) -> str:
    places = [i for i, c in enumerate(text) if c.isdigit()]
    if not places:
        return text
    at = rng.choice(places)
    end = at
    while end < len(text) and text[end].isdigit():
        end += 1
    new = [
        "0",
        "1",
        "2",
        "3",
        "7",
        "-1",
        "-3",
        "1.5",
        "1e3",
        ".nan",
        ".inf",
        "-.inf",
        "true",
        "null",
        "''",
        "2147483648",
        "2147483649",
    ]
    new += [
        "9223372036854775808",
        "9" * 400,
        "0x10",
        "010",
        "1_000",
        "1:30",
        "'4'",
        "[1]",
        "{}",
        "inf",
    ]
    return text[:at] + rng.choice(new) + text[end:]


def _words(text: str, rng: random.Random) -> str:
    words = [
        *NODES,
        "rest",
        "runtime",
        "relative",
        "size",
        "tokens",
        "block",
        "mask",
        "heads",
        "problem",
        "inf",
        "layers",
    ]
    found = [w for w in words if w in text]
    return text.replace(rng.choice(found), rng.choice(words), 1) if found else text


def _letters(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    new = rng.choice(
        list("{}[],:-#&*!|>'\"%@`\t\n \\?~")
        + ["é", "𝔸", "\u202e", "\u0000", "\ud800", "\ufeff", "\x85", "---\n", "<<: "]
    )
    return text[:at] + new + text[at + rng.randrange(2) :]


def _lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[a]
    elif kind == 1:
        lines.insert(b, lines[a])
    elif kind == 2:
        lines[a], lines[b] = lines[b], lines[a]
    else:
        lines[a] = rng.choice([" ", "  ", "\t"]) + lines[a]
    return "\n".join(lines)


def _predicate(text: str, rng: random.Random) -> str:
    terms = [
        "k",
        "q",
        "kv_len",
        "q_len",
        "3",
        "(q - k)",
        "abs(q - k)",
        "min(q, k)",
        "q * k",
        "-k",
        "k % 5",
        "q // 4",
        "k // (q % 3 + 1)",
        "q % k",
        "x",
        "(",
        "k.real",
        "9" * 30,
    ]
    signs = ["<", "<=", "==", "!=", "+", "*", "//", "%", "and", "or", "and not", "=", "**", "is"]
    words = f"{rng.choice(terms)} {rng.choice(signs)} {rng.choice(terms)} {rng.choice(signs)} {rng.choice(terms)}"
    if rng.random() < 0.05:
        words = rng.choice(
            [
                "(" * 3000,
                "not " * 900 + "k < q",
                "k + " * 400 + "k < q",
                "__import__('os').system('true')",
            ]
        )
    return text.replace("causal", f'{{predicate: "{words}"}}', 1)


def _hostile(text: str, rng: random.Random) -> str:
    bomb = "a: &a [causal, causal, causal, causal, causal, causal, causal, causal]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [" + ", ".join([f"*{chr(97 + i)}"] * 8) + "]\n"
        for i in range(9)
    )
    return rng.choice(
        [
            lambda: bomb + text,
            lambda: text.replace("causal", "{not: " * 200 + "causal" + "}" * 200, 1),
            lambda: text.replace("causal", "[" * 5000, 1),
            lambda: text.replace("causal", "&x {any_of: [causal, *x]}", 1),
            lambda: text.replace("causal", "&x {any_of: [causal, full]}", 1).replace(
                "full", "*x", 1
            ),
            lambda: text.replace("causal", "!!python/object/apply:os.system ['true']", 1),
            lambda: text + "---\n" + text,
            lambda: text + text,
            lambda: text[: rng.randrange(len(text) + 1)],
            lambda: text.replace("\n", "\r\n"),
            lambda: "? [a, b]\n: c\n" + text,
            lambda: text + "summary: " + "x" * 300_000 + "\n",
            lambda: text + "k" * 2000 + ": 1\n",
            lambda: text + "".join(f"key{i}: {i}\n" for i in range(3000)),
        ]
    )()


MUTATIONS = [
    _numbers,
    _numbers,
    _numbers,
    _words,
    _words,
    _letters,
    _lines,
    _predicate,
    _predicate,
    _hostile,
]
