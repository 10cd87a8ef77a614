"""The acceptance rule, the yardstick, and the check of a candidate with poisoned outputs."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from sparsegen.spec.pattern import Pattern  # noqa: E402
from sparsegen.spec.problem import Problem  # noqa: E402
from sparsegen.spec.reference import reference  # noqa: E402
from sparsegen.tune.accept import ulp, within_tolerance  # noqa: E402
from sparsegen.tune.check import check, fresh_inputs, sampled_rows, small_lengths  # noqa: E402
from sparsegen.tune.eager import eager_attention  # noqa: E402

HALF = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ulp_is_the_next_number(dtype):
    for value in (1.0, 1.5, 0.75, 3.0, 100.0, 0.0078):
        x = torch.tensor(value, dtype=dtype)
        up = torch.nextafter(x, torch.tensor(math.inf, dtype=dtype))
        assert ulp(x.item(), dtype) == (up.double() - x.double()).item()
    assert ulp(0.0, dtype) > 0


def test_twice_the_eager_error_plus_an_ulp_is_the_limit():
    want = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    eager = want + 1e-3
    one = ulp(1.0, torch.float64)
    assert within_tolerance(want + 2e-3, want, eager)
    assert not within_tolerance(want + 2e-3 + 4 * one + 1e-9, want, eager)
    verdict = within_tolerance(want + 3e-3, want, eager)
    assert verdict.reason.startswith("max-abs error 0.003 > 0.002 allowed; relative L2 error")


def test_one_spike_breaks_max_abs_and_a_broad_error_relative_l2():
    want = torch.zeros(1000, dtype=torch.float64)
    want[0] = 1.0
    eager = want.clone()
    eager[0] += 0.01
    broad = want + 0.015
    assert within_tolerance(broad, want, eager).reason.startswith("relative L2")
    spike = want.clone()
    spike[7] = 0.05
    assert within_tolerance(spike, want, eager).reason.startswith("max-abs")


def test_an_exact_eager_still_leaves_one_ulp_of_the_largest():
    want = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    out = want.to(HALF)
    assert within_tolerance(out, want, out)
    out[2] += ulp(1.0, HALF)
    verdict = within_tolerance(out, want, want.to(HALF))
    assert verdict and verdict.max_abs == verdict.max_abs_allowed == ulp(1.0, HALF)
    out[2] += ulp(1.0, HALF)
    assert not within_tolerance(out, want, want.to(HALF))


def test_nan_unwritten_and_misplaced_infinities_are_never_right():
    want = torch.tensor([0.0, 1.0, -math.inf], dtype=torch.float64)
    assert within_tolerance(want, want, want)
    for bad in ([math.nan, 1, -math.inf], [0, math.inf, -math.inf]):
        verdict = within_tolerance(torch.tensor(bad), want, want)
        assert verdict.reason == "1 of 2 values are NaN or infinite: not written, or overflowed"
    for bad in ([0, 1, 5], [0, 1, math.inf], [0, 1, math.nan]):
        assert "must be infinite" in within_tolerance(torch.tensor(bad), want, want).reason
    loose = torch.full((3,), math.nan)  # a yardstick that is itself NaN allows nothing
    assert not within_tolerance(want[:2] + 0.1, want[:2], loose[:2])


def test_all_zero_must_be_zero_and_shapes_must_agree():
    zero = torch.zeros(4, dtype=torch.float64)
    assert within_tolerance(zero.to(HALF), zero, zero.to(HALF))
    assert not within_tolerance(torch.full((4,), 1e-3, dtype=HALF), zero, zero)
    with pytest.raises(ValueError, match="must have one shape"):
        within_tolerance(zero, zero[:3], zero)


def test_the_rule_changes_no_argument():
    tensors = [torch.randn(10).double() for _ in range(3)]
    copies = [t.clone() for t in tensors]
    within_tolerance(*tensors)
    assert all(map(torch.equal, tensors, copies))


def pattern_of(**settings):
    return Pattern.from_dict({"name": "p", "mask": {"window": {"size": 40}}, **settings})


PATTERNS = {
    "plain": pattern_of(),
    "top_left": pattern_of(align="top_left"),
    "softcap": pattern_of(softcap=5.0, scale=0.3),
    "alibi": pattern_of(alibi=True),
    "sinks": pattern_of(sink_logits=True),
    "null key": pattern_of(null_key=True, softcap=5.0),
    "all": pattern_of(null_key=True, sink_logits=True, alibi=True, softcap=20.0),
    "per head": Pattern.from_dict(
        {
            "name": "h",
            "heads": [
                {"heads": [0], "mask": "causal"},
                {"heads": "rest", "mask": {"window": {"size": 9}}},
            ],
        }
    ),
}
SMALL = Problem(head_dim=16, value_dim=24, heads=4, kv_heads=2, batch=2, dtype="float32")


def inputs(pattern, q_len=70, kv_len=90, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return fresh_inputs(pattern, SMALL, q_len, kv_len, "cpu", generator, size)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("lengths", [(70, 90), (90, 70), (1, 50)], ids=str)
def test_the_yardstick_in_float64_is_the_reference(name, lengths):
    case = inputs(PATTERNS[name], *lengths)
    q, k, v = (t.double() for t in (case.q, case.k, case.v))
    words = dict(case.keywords)
    if "null_key" in words:
        words["null_key"] = tuple(t.double() for t in words["null_key"])
    for rows in (None, torch.tensor([0, lengths[0] - 1])):
        out, lse = eager_attention(PATTERNS[name], q, k, v, rows=rows, **words)
        want, want_lse = reference(PATTERNS[name], q, k, v, rows=rows, **words)
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse, want_lse.double(), rtol=1e-10, atol=1e-12)


class DenseKernel:
    """A stand-in for a kernel: the reference, rounded; ``fault`` breaks it in one way."""

    def __init__(self, pattern, fault=""):
        self.pattern, self.fault = pattern, fault
        self.buffer = None

    def __call__(self, q, k, v, out, lse, keywords):
        want, want_lse = reference(self.pattern, q, k, v, **keywords)
        if self.fault == "adds":
            out += want.to(out.dtype)
        elif self.fault == "skips":
            out[:, :, :-3] = want[:, :, :-3].to(out.dtype)
        elif self.fault == "wrong":
            out.copy_(want * 1.05)
        else:
            out.copy_(want)
        lse.copy_(want_lse + (0.1 if self.fault == "lse" else 0.0))
        if self.fault == "writes k":
            k[0, 0, 0, 0] += 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", ""),
        ("adds", "70 queries, 90 keys: 13440 output values are NaN or infinite"),
        ("skips", "70 queries, 90 keys: 576 output values are NaN or infinite"),
        ("wrong", "70 queries, 90 keys: out: max-abs error"),
        ("lse", "70 queries, 90 keys: lse: max-abs error"),
        ("writes k", "70 queries, 90 keys: the kernel changed its input k"),
    ],
)
def test_the_check_finds_what_a_broken_kernel_does(fault, words):
    pattern = PATTERNS["plain"]
    found = check(DenseKernel(pattern, fault), inputs(pattern), pattern)
    assert found.startswith(words) and bool(found) == bool(fault)


def test_sampled_rows_are_compared_and_the_rest_must_be_written():
    pattern = PATTERNS["all"]
    case = inputs(pattern, 300, 300)
    rows = sampled_rows(300, torch.Generator().manual_seed(1))
    case = type(case)(case.q, case.k, case.v, case.keywords, rows=rows)
    assert {0, 127, 128, 299} <= set(rows.tolist()) and len(rows) <= 64
    assert check(DenseKernel(pattern), case, pattern) == ""
    assert "576 output" in check(DenseKernel(pattern, "skips"), case, pattern)
    assert check(DenseKernel(pattern, "wrong"), case, pattern)
    assert sampled_rows(64, torch.Generator()) is None


def test_inputs_are_fresh_and_ragged_lengths_stay_inside():
    pattern = PATTERNS["null key"]
    generator = torch.Generator().manual_seed(0)
    first, second = (fresh_inputs(pattern, SMALL, 9, 9, "cpu", generator, 5.0) for _ in range(2))
    assert not torch.equal(first.q, second.q) and first.q.std() > 3
    assert first.keywords["null_key"][1].shape == (2, 24)
    assert small_lengths(4096, 4096) == [(129, 129, 1.0), (70, 201, 5.0), (1, 130, 1.0)]
    assert small_lengths(1, 100) == [(1, 100, 1.0), (1, 100, 5.0)]
