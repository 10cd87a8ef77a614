"""FlashInfer: causal, full and one-sided windows by its prefill kernel, one batch entry."""

from __future__ import annotations

from typing import Any

from sparsegen.bench.case import Band, Case, Inputs
from sparsegen.bench.interleaved import Launch


def arguments(band: Band) -> dict[str, Any] | None:
    """How a band is said to ``single_prefill_with_kv_cache``, or None where it cannot be."""
    if band.right not in (None, 0):
        return None
    said: dict[str, Any] = {"causal": band.right == 0}
    if band.left is not None:
        said["window_left"] = band.left
    return said


def launch_of(case: Case, inputs: Inputs) -> Launch:
    """A call on [S, H, D] copies of the inputs."""
    from flashinfer import single_prefill_with_kv_cache  # type: ignore[import-not-found]

    band = case.band()
    given = None if band is None else arguments(band)
    assert given is not None, "a peer is asked only for what it can do"
    if case.pattern.scale is not None:
        given["sm_scale"] = case.pattern.scale
    if case.pattern.softcap is not None:
        given["logits_soft_cap"] = case.pattern.softcap
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (inputs.q, inputs.k, inputs.v))
    return lambda: single_prefill_with_kv_cache(q, k, v, **given).transpose(0, 1)[None]
