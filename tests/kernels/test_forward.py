"""The forward kernel equals the float64 reference: every position-only pattern, all dims, every feature."""

from __future__ import annotations

import json

import pytest

from tests.kernels.cases import (
    ACCEPTANCE,
    ON_GPU,
    Case,
    acceptance,
    acceptance_names,
    compare,
    compile_all,
    extras_of,
    once,
    pattern_of,
)

SINKS = {"all_of": ["causal", {"any_of": [{"window": {"size": 40}}, {"sink": {"tokens": 4}}]}]}


def _patterns() -> list[Case]:
    lengths: dict[str, list[tuple[int, int]]] = {}
    for case in json.loads((ACCEPTANCE.parent / "expected.json").read_text()):
        lengths.setdefault(case["pattern"].removesuffix(".yaml"), []).append(
            (case["q_len"], case["kv_len"])
        )
    out = []
    for name in acceptance_names():
        pairs = lengths[name]
        if not ON_GPU:  # the interpreter takes a minute for 1,024 rows: the shorter lengths there
            pairs = [p for p in pairs if p[0] * p[1] < 128 * 128] or [(100, 100)]
        dims = {"dtype": "bfloat16", "head_dim": 128, "value_dim": 128} if ON_GPU else {}
        for i, (q_len, kv_len) in enumerate(pairs):
            variant = ("fast", "general")[i % 2]
            heads, kv_heads = (6, 2) if ON_GPU or name == "per_head" else (2, 1)
            out.append(
                Case(
                    name,
                    acceptance(name),
                    q_len,
                    kv_len,
                    heads=heads,
                    kv_heads=kv_heads,
                    variant=variant,
                    **dims,
                )
            )
        if ON_GPU:
            out += [
                Case(name, acceptance(name), q, k, batch=2, heads=8, **dims)
                for q, k in [(240, 240), (200, 233)]
            ]
    return out


def _dims() -> list[Case]:
    causal = pattern_of("causal")
    pairs = [(16, 16), (24, 40), (48, 48), (72, 80), (96, 96), (64, 128)]
    dtypes = ["float32", "float16"]
    if ON_GPU:
        pairs += [
            (40, 24),
            (64, 64),
            (80, 80),
            (88, 88),
            (128, 64),
            (160, 160),
            (192, 128),
            (192, 192),
            (200, 104),
            (256, 256),
        ]
        dtypes.append("bfloat16")
    out = []
    for d, dv in pairs:
        for dtype in dtypes:
            if (
                dtype == "float32" and d + dv > 256
            ):  # a minute to compile each; the one below stands for them
                continue
            for variant in ("fast", "general") if ON_GPU else ("fast",):
                lengths = (300, 433) if ON_GPU else (65, 100)
                dims = {"dtype": dtype, "head_dim": d, "value_dim": dv, "variant": variant}
                out.append(Case("causal", causal, *lengths, heads=2, kv_heads=1, **dims))
    if ON_GPU:
        out.append(Case("causal", causal, 100, 133, head_dim=256, value_dim=256))
    return out


def _lengths() -> list[Case]:
    """Ragged tails, one row, one key, no key to see, top-left (CASES B02, B06, B09, B32)."""
    out = []
    masks = {"full": "full", "causal": "causal", "window": {"window": {"size": 40}}, "sinks": SINKS}
    for name, mask in masks.items():
        for n in (1, 15, 63, 65, 127, 129) + ((143, 257, 1025) if ON_GPU else ()):
            out.append(Case(name, pattern_of(mask), n, n, heads=2))
        out += [
            Case(name, pattern_of(mask), q, k, heads=2)
            for q, k in ((1, 100), (5, 2), (2, 5), (33, 16), (3, 1))
        ]
    out += [Case("top_left", acceptance("top_left"), q, k) for q, k in ((5, 33), (33, 5))]
    return out


def _knobs() -> list[Case]:
    """Every choice of every knob that changes the program's structure."""
    pattern = pattern_of(SINKS)
    some = [
        {"PERSISTENT": True},
        {"HEAVY_FIRST": False},
        {"GROUP_HEADS": 1},
        {"GROUP_HEADS": 16},
        {"STAGES": 3},
        {"BLOCK_M": 128, "num_warps": 8},
        {"BLOCK_N": 32},
        {"BLOCK_N": 128},
    ]
    if ON_GPU:
        some.append({"TMA": False})
    dims = {"dtype": "bfloat16", "head_dim": 64, "value_dim": 64} if ON_GPU else {}
    return [
        Case("sinks", pattern, 97, 110, batch=2, heads=2, knobs=tuple(k.items()), **dims)
        for k in some
    ]


ONCE, EACH = _patterns() + _lengths(), _dims() + _knobs()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if ON_GPU:
        compile_all(ONCE + EACH)


@pytest.mark.parametrize("case", once(ONCE) + EACH, ids=str)
def test_equals_reference(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("size", [5.0, 10.0])
@pytest.mark.parametrize("dtype", ["float16", "float32"] + ["bfloat16"] * ON_GPU)
def test_large_scores(size: float, dtype: str) -> None:
    """Scores of several hundred: no overflow, rounding as eager (CASES B31)."""
    compare(Case("causal", pattern_of("causal"), 100, 100, dtype=dtype, size=size))


FEATURES = [
    {"softcap": 3.0},
    {"alibi": True},
    {"sink_logits": True},
    {"null_key": True},
    {"scale": 0.5},
    {"scale": -0.5},
    {"scale": 0},
    {"softcap": 2.0, "alibi": True, "sink_logits": True, "null_key": True, "scale": 0.3},
]


@pytest.mark.parametrize("settings", FEATURES, ids=lambda s: "-".join(s))
@pytest.mark.parametrize("lengths", [(70, 90), (40, 25)], ids=str)
def test_features(settings: dict, lengths: tuple[int, int]) -> None:
    """Score modifications and extra terms, also on rows that see no key (40 queries, 25 keys)."""
    case = Case("-".join(settings), pattern_of(SINKS, **settings), *lengths)
    compare(case, **extras_of(case))
