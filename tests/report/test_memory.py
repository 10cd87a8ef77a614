"""The bytes that ``show`` prints: those of the real plan of a backward pass, and what is alive while one runs."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from sparsegen.cli import app
from sparsegen.codegen.backward import KEYS, QUERIES, default_config, render_backward
from sparsegen.launch import backward_rooms
from sparsegen.launch.backward import Plan, Saved
from sparsegen.launch.kernel import Call
from sparsegen.report.memory import memory_of
from sparsegen.report.show import TILE, look
from sparsegen.schedule.build import build
from sparsegen.schedule.transpose import transpose
from sparsegen.spec.gpu import find_gpu
from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem

SMALL = {"head_dim": 16, "value_dim": 32, "heads": 4, "kv_heads": 2}
GLOBAL = {"any_of": [{"window": {"radius": 16}}, {"global": {"positions": [0, 300]}}]}
STRIDED = {
    "all_of": ["causal", {"any_of": [{"window": {"size": 64}}, {"strided": {"stride": 64}}]}]
}
THREE = [{"window": {"size": 128}}, {"strided": {"stride": 128}}, {"strided": {"stride": 96}}]
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "one sweep": ("causal", SMALL, {}),
    "learned terms": ("causal", SMALL, {"sink_logits": True, "null_key": True}),
    "split rows": (GLOBAL, SMALL, {}),
    "two sweeps": (STRIDED, {"head_dim": 32, "heads": 2}, {}),
    "three sweeps": ({"all_of": ["causal", {"any_of": THREE}]}, {"head_dim": 32, "heads": 2}, {}),
    "two sweeps in float32": (STRIDED, {"head_dim": 32, "heads": 2, "dtype": "float32"}, {}),
    "a batch": (GLOBAL, SMALL | {"batch": 3, "dtype": "float16"}, {}),
}
LENGTHS = (8192, 8192)


def case_of(name: str) -> tuple[Pattern, Problem]:
    mask, dims, settings = CASES[name]
    pattern = Pattern.from_dict({"name": "p", "mask": mask, **settings})
    return pattern, Problem(**dims, lengths=(LENGTHS,))


def pass_of(pattern: Pattern, problem: Problem) -> tuple[Plan, Saved]:
    """The plan that a callable would make, and tensors for it."""
    turned = transpose(pattern, problem)
    sources = {
        QUERIES: render_backward(pattern, build(pattern, problem), problem),
        KEYS: render_backward(pattern, turned.schedule, problem, KEYS, turned.shift),
    }
    dtype, (q_len, kv_len) = getattr(torch, problem.dtype), LENGTHS
    q, out, dout = (
        torch.zeros(problem.batch, problem.heads, q_len, n, dtype=dtype)
        for n in (problem.head_dim, problem.value_dim, problem.value_dim)
    )
    k, v = (
        torch.zeros(problem.batch, problem.kv_heads, kv_len, n, dtype=dtype)
        for n in (problem.head_dim, problem.value_dim)
    )
    null = tuple(torch.zeros(problem.kv_heads, x.shape[3], dtype=dtype) for x in (k, v))
    saved = Saved(q, k, v, out, torch.zeros(q.shape[:3]), dout)
    call = Call(
        relative=1,
        scale=1.0,
        sink_logits=torch.zeros(problem.heads) if pattern.sink_logits else None,
        null_key=null if pattern.null_key else None,
    )
    block = int(default_config(problem, find_gpu("h200"))["BLOCK_M"])
    return Plan(sources, lambda source, launch: block, saved, call), saved


class Alive(TorchDispatchMode):
    """The most bytes of tensors that are alive behind any operation, beside those that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._before = 0, set(self._storages())

    def __enter__(self) -> Any:
        gc.freeze()  # what is there already is not looked through again at each operation
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        gc.unfreeze()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        now = self._storages()
        self.most = max(self.most, sum(n for at, n in now.items() if at not in self._before))
        return out

    @staticmethod
    def _storages() -> dict[int, int]:
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        storages = [t.untyped_storage() for t in tensors]
        return {s.data_ptr(): s.nbytes() for s in storages}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_what_a_pass_holds(name: str) -> None:
    """Tensors that a real plan makes, counted while it runs; launches write nothing here."""
    pattern, problem = case_of(name)
    plan, saved = pass_of(pattern, problem)
    gc.collect()
    with Alive() as alive:
        plan.run(saved, lambda step, number, memory: None)
    found = memory_of(pattern, problem, build(pattern, problem), TILE)
    given = (saved.q, saved.k, saved.v, saved.out, saved.lse, saved.dout)
    here = sum(t.untyped_storage().nbytes() for t in given)
    few = 1024 if name == "learned terms" else 0  # their own gradients, a few hundred bytes
    assert 0 <= here + alive.most - found.peak <= few
    parts = found.at_peak
    assert ("split rows" in found.schedules[1]) == (name in ("split rows", "a batch"))
    assert (parts["partial sums"] > 0) == ("split rows" in found.schedules[1])
    assert (parts["parts of sinks and null key"] > 0) == (name == "learned terms")
    # dK and dV; two sweeps add to them in their own dtype
    assert parts["float32 sums"] == (4 * 2 * 2 * 8192 * 32 if name == "three sweeps" else 0)


def test_causal_by_hand() -> None:
    """16 heads of 128 at 16,384: inputs, outputs and gradients of 64 MiB each, 4 + 16 bytes a row beside them."""
    pattern = Pattern.from_dict({"name": "p", "mask": "causal", "problem": {"heads": 16}})
    tensor, rows = 16 * 16384 * 128 * 2, 16 * 16384
    found = look(pattern, (16384, 16384)).as_dict()["gradients"]
    assert found["unsupported"] is None and found["schedule"] == "dQ runs; dK, dV runs"
    assert found["for"] == "16 heads of 128 in bfloat16, batch 1"
    assert found["forward_bytes"] == 4 * tensor + 4 * rows
    assert found["peak_parts_bytes"] == {
        "inputs": 3 * tensor,
        "outputs and LSE": tensor + 4 * rows,
        "gradients": 4 * tensor,
        "LSE and delta": 16 * rows,
        "float32 sums": 0,
        "partial sums": 0,
        "parts of sinks and null key": 0,
    }
    assert found["peak_bytes"] == 8 * tensor + 20 * rows


def test_partial_sums_are_bounded_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB of them at most, from the number that launches keep to."""
    pattern, problem = case_of("split rows")

    def partials() -> int:
        long = replace(problem, lengths=((1 << 20, 1 << 20),), batch=8)
        found = memory_of(pattern, long, build(pattern, long), TILE)
        return found.at_peak["partial sums"]

    before = partials()
    assert 0 < before <= 64 << 20
    monkeypatch.setattr(backward_rooms, "MOST_PARTIALS", before // 2)
    assert 0 < partials() <= before // 2


def test_nothing_grows_with_cells() -> None:
    pattern, problem = case_of("three sweeps")
    peaks = [
        memory_of(pattern, one, build(pattern, one), TILE).peak
        for one in (replace(problem, lengths=((n, n),)) for n in (1 << 15, 1 << 16))
    ]
    assert peaks[1] == 2 * peaks[0]


def test_what_show_prints(tmp_path: Any) -> None:
    """A line that names both schedules, the bytes, and what they are for; a reason where there are no gradients."""
    file = tmp_path / "p.yaml"
    file.write_text("mask: causal\nproblem: {heads: 16}\n")
    done = CliRunner().invoke(app, ["show", str(file), "--length", "16384"])
    (paragraph,) = (p for p in done.output.split("\n\n") if p.startswith("visible"))
    assert paragraph.splitlines()[-3:] == [
        "gradients dQ over runs; dK and dV over runs",
        "memory    542,113,792 bytes at most in forward and backward (16 heads of 128 in bfloat16, batch 1):",
        "          inputs 201,326,592, outputs and LSE 68,157,440, gradients 268,435,456, LSE and delta 4,194,304",
    ]
    file.write_text("mask: causal\nproblem: {head_dim: 512}\n")
    why = "head_dim or value_dim 512: kernels take up to 256 columns of a head"
    done = CliRunner().invoke(app, ["show", str(file), "--length", "64"])
    assert f"\ngradients none: {why}\n" in done.output
    done = CliRunner().invoke(app, ["show", str(file), "--length", "64", "--json"])
    assert json.loads(done.output)["gradients"] == {"unsupported": why}
    data = tmp_path / "data.yaml"
    data.write_text("document_lengths: [64]\n")
    words = ["show", "packed_documents", "--length", "64", "--runtime", str(data)]
    done = CliRunner().invoke(app, words)
    assert "no kernel yet: " in done.output and "memory " not in done.output
    seen = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert seen["gradients"] == {"unsupported": seen["unsupported"]} and seen["unsupported"]
