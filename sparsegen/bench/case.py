"""One thing to measure: a pattern at one pair of lengths, its tensors, and how plainly its mask can be said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sparsegen.spec.pattern import Pattern
from sparsegen.spec.problem import Problem


@dataclass(frozen=True)
class Band:
    """-right <= q - k <= left, in absolute positions; None is no bound.  (None, None) sees everything."""

    left: int | None
    right: int | None


@dataclass(frozen=True)
class Case:
    """A pattern at q_len queries and kv_len keys; ``problem`` has exactly these lengths."""

    pattern: Pattern
    problem: Problem

    @classmethod
    def of(cls, pattern: Pattern, lengths: tuple[int, int]) -> Case:
        """The pattern's own problem (or the default one) at these lengths.

        Raises:
            InputError: the keys do not fit on a grid of the pattern.
        """
        pattern.check_lengths(*lengths)
        return cls(pattern, replace(pattern.problem or Problem(), lengths=(lengths,)))

    @property
    def q_len(self) -> int:
        """Queries."""
        return self.problem.lengths[0][0]

    @property
    def kv_len(self) -> int:
        """Keys."""
        return self.problem.lengths[0][1]

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.kv_len - self.q_len if self.pattern.align == "bottom_right" else 0

    @property
    def size(self) -> str:
        """The problem in a few words: ``B1 H8:2 D128:128 bfloat16 4096x4096``."""
        p = self.problem
        return (
            f"B{p.batch} H{p.heads}:{p.kv_heads} D{p.head_dim}:{p.value_dim} {p.dtype} "
            f"{self.q_len}x{self.kv_len}"
        )

    def band(self) -> Band | None:
        """The mask as one band of differences q - k, where all of it is one at these lengths; else None."""
        from sparsegen.schedule.forms import BIG, var
        from sparsegen.schedule.prepare import prepare

        classes = prepare(self.pattern.exprs, self.pattern.align, self.problem.lengths).classes
        if len(classes) != 1 or len(classes[0].cubes) != 1:
            return None
        (cube,) = classes[0].cubes
        if not cube:
            return Band(None, None)
        if len(cube) != 1 or cube[0].lin != var("q") - var("k"):
            return None
        lo, hi = cube[0].lo, cube[0].hi
        return Band(None if hi >= BIG else hi, None if lo <= -BIG else -lo)


@dataclass
class Inputs:
    """Random tensors of a case: q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], all of unit variance.

    ``extras`` are the keywords that the pattern asks for (``alibi_slopes``, ``sink_logits``, ``null_key``).
    ``shared`` keeps what several contenders of one peer use, a block mask say.
    """

    q: Any
    k: Any
    v: Any
    extras: dict[str, Any]
    shared: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, device: str) -> Inputs:
        """From torch's generator, seeded so that the same case has the same tensors."""
        import torch

        p, make = case.problem, torch.Generator(device=device).manual_seed(0)
        dtype = getattr(torch, p.dtype)
        draw = lambda *shape: torch.randn(*shape, generator=make, device=device, dtype=dtype)
        q = draw(p.batch, p.heads, case.q_len, p.head_dim)
        k = draw(p.batch, p.kv_heads, case.kv_len, p.head_dim)
        v = draw(p.batch, p.kv_heads, case.kv_len, p.value_dim)
        extras: dict[str, Any] = {}
        if case.pattern.alibi:
            steps = torch.arange(1, p.heads + 1, device=device, dtype=torch.float32)
            extras["alibi_slopes"] = torch.exp2(-8.0 * steps / p.heads)
        if case.pattern.sink_logits:
            extras["sink_logits"] = draw(p.heads).float()
        if case.pattern.null_key:
            extras["null_key"] = (draw(p.kv_heads, p.head_dim), draw(p.kv_heads, p.value_dim))
        return cls(q, k, v, extras)
