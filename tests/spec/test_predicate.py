"""The language of predicates: grammar, types, and what is proven before anything runs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sparsegen.errors import SpecError
from sparsegen.spec import Pattern
from sparsegen.spec.predicate import PredicateError, parse
from tests.evaluator import evaluate


def visible(text: str, q_len: int = 13, kv_len: int = 17) -> np.ndarray:
    return Pattern.from_dict({"mask": {"predicate": text}}).dense_mask(q_len, kv_len)[0].numpy()


VALID = [
    "k <= q",
    "0 <= q - k < 5",
    "0 <= q - k < 5 <= q_len == q_len",
    "not q < k or k % 3 == 1 and q > 2",
    "not (q < k or k % 3 == 1) and q > 2",
    "-q // 2 <= -k % 5",
    "(q - k) // 3 == -1",
    "abs(q - k) <= 3 or min(q, k, 4) == 4",
    "max(q, k) - min(q, k) < 1_0",
    "k * 2 - q * 3 + 1 != +4",
    "k < kv_len // 2 or q % q_len == 0",
    "q // max(k, 1) == 2",
    "q - k - 1 == 2",
    "not not k == q",
    "((((k)))) <= q",
]


@pytest.mark.parametrize("text", VALID)
@pytest.mark.parametrize("lengths", [(13, 17), (17, 5), (1, 9)])
def test_meaning(text: str, lengths: tuple[int, int]) -> None:
    assert (
        visible(text, *lengths) == evaluate({"mask": {"predicate": text}}, *lengths)[0, 0]
    ).all()


INVALID = {
    "": "ends where a number, a name or '(' is needed",
    "k": "uses the number 'k' at character 1 as a truth value; the whole predicate must be a condition",
    "k <": "ends where a number, a name or '(' is needed",
    "k <= q q": "has 'q' at character 8 where an operator or the end is needed",
    "k <= (q": "ends where ')' for the '(' at character 6 is needed",
    "x <= q": "has an unknown name 'x' at character 1; names are q, k, q_len, kv_len",
    "k < kvlen": "has an unknown name 'kvlen' at character 5 (did you mean 'kv_len'?); names are q, k, q_len, kv_len",
    "k ** 2 < q": "has '*' at character 4 where a number, a name or '(' is needed",
    "k / 2 < q": "has '/' at character 3, which is not part of the language",
    "k < 1.5": "has '.' at character 6, which is not part of the language",
    "k = q": "has '=' at character 3, which is not part of the language",
    "q[0] == k": "has '[' at character 2, which is not part of the language",
    "__import__('os')": 'has "\'" at character 12, which is not part of the language',
    "q.real < k": "has '.' at character 2, which is not part of the language",
    "k < q and q": "uses the number 'q' at character 11 as a truth value; each side of 'and' must be a condition",
    "not q": "uses the number 'q' at character 5 as a truth value; what follows 'not' must be a condition",
    "(k < q) + 1 == 2": "uses the condition '(k < q)' at character 1 as a number; each side of '+' must be a number",
    "(k < q) == (q < k)": "uses the condition '(k < q)' at character 1 as a number; each side of a comparison must be a number",
    "-(k < q) < 1": "uses the condition '(k < q)' at character 2 as a number; what follows '-' must be a number",
    "abs(k < q) < 1": "uses the condition 'k < q' at character 5 as a number; what abs is given must be a number",
    "abs(k, q) < 1": "gives abs 2 argument(s) at character 1; it takes exactly one argument",
    "min(k) < 1": "gives min 1 argument(s) at character 1; it takes at least two arguments",
    "max() < 1": "has ')' at character 5 where a number, a name or '(' is needed",
    "abs < 1": "has '<' at character 5 where '(' after abs is needed",
    "k % 0 == 1": "divides by '0' at character 5, which can be 0 or less; a divisor must be at least 1 for every q, k and length",
    "q // (k + 1) == 1": "divides by '(k + 1)' at character 6, which can be 0 or less; a divisor must be at least 1 for every q, k and length",
    "q % -3 == 1": "divides by '-3' at character 5, which can be 0 or less; a divisor must be at least 1 for every q, k and length",
    "q * k * 3 > 0": "can overflow: 'q * k * 3' at character 1 may need 65 bits; 64 are allowed, for |q|, |k| and lengths up to 2147483648",
    "9223372036854775808 > k": "has a number beyond 64 bits at character 1",
    "k < 010": "has '010' at character 5; a number starts with no zero",
    "00 < k": "has '00' at character 1; a number starts with no zero",
    "k < " + "9" * 1000: "has a number beyond 64 bits at character 5",
    "(" * 61 + "k<q" + ")" * 61: "is nested deeper than 60 levels",
    "(" * 900: "is nested deeper than 60 levels",
    "not " * 100 + "k<q": "is nested deeper than 60 levels",
    "-" * 100 + "k<q": "is nested deeper than 60 levels",
    "+".join(["q"] * 100) + "<k": "is nested deeper than 60 levels",
    "k<q or " * 300 + "k<q": "is 2103 characters long; at most 2000 are allowed",
}


@pytest.mark.parametrize(
    ("text", "message"), INVALID.items(), ids=[t[:20] or "empty" for t in INVALID]
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Pattern.from_dict({"mask": {"predicate": text}})
    assert str(error.value) == f"<dict>: mask.predicate: {message}"


def test_bounds_are_tight_enough_for_what_people_write() -> None:
    for text in (
        "q * k < 0",
        "(q + k) * (q_len - kv_len) < 0",
        "q * 4294967295 > k",
        "q // (abs(k) + 1) == 0",
        "k % (q % 5 + 1) == 0",
    ):
        parse(text)
    with pytest.raises(PredicateError, match="can overflow"):
        parse("(q * k) * 4 > 0")


def test_exactly_at_64_bits() -> None:
    """2^31 * (2^32 - 1) fits; 2^31 * 2^32 is one more than the largest 64-bit integer."""
    parse("q * 4294967295 - 1 > k")
    with pytest.raises(PredicateError, match="may need 65 bits"):
        parse("q * 4294967296 > k")


def test_random_predicates_mean_what_python_means() -> None:
    rng = random.Random(7)
    for _ in range(150):
        text = _condition(rng, 3)
        try:
            parse(text)
        except PredicateError as error:
            assert "divides by" in str(error) or "overflow" in str(error), text
            continue
        assert (visible(text, 7, 9) == evaluate({"mask": {"predicate": text}}, 7, 9)[0, 0]).all(), (
            text
        )


def _condition(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(4) if depth else 0
    if kind == 0:
        return f"{_number(rng, depth)} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {_number(rng, depth)}"
    if kind == 1:
        return "not (" + _condition(rng, depth - 1) + ")"
    return (
        f"({_condition(rng, depth - 1)}) {rng.choice(['and', 'or'])} {_condition(rng, depth - 1)}"
    )


def _number(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(5) if depth else rng.randrange(2)
    if kind == 0:
        return str(rng.choice([0, 1, 2, 3, 7, 100]))
    if kind == 1:
        return rng.choice(["q", "k", "q_len", "kv_len"])
    inner = [_number(rng, depth - 1) for _ in range(2)]
    if kind == 2:
        return rng.choice(["abs({0})", "min({0}, {1})", "max({0}, {1})", "-({0})"]).format(*inner)
    if kind == 3:
        return f"({inner[0]}) {rng.choice(['//', '%'])} {rng.choice(['2', '3', '5', 'q_len', '(abs(k) + 1)'])}"
    return f"{inner[0]} {rng.choice(['+', '-', '*'])} {inner[1]}"
