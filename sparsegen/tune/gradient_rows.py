"""Some rows of gradients by their formula: what long inputs are judged by, where no dense autograd fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sparsegen.launch.backward import Saved
    from sparsegen.spec.pattern import Pattern

_STEP = 2048  # query rows at a time


class GradientRows:
    """Gradients as docs/backward.md writes them, from the OUT and LSE that a kernel is given too, in ``dtype``.

    float64 is the judge; the dtype of the inputs rounds after every step, as a model's own eager backward does.
    """

    def __init__(
        self,
        pattern: Pattern,
        saved: Saved,
        scale: float,
        dtype: torch.dtype,
        alibi_slopes: torch.Tensor | None = None,
    ):
        self._pattern, self._saved, self._scale, self._dtype = pattern, saved, scale, dtype
        self._slopes = alibi_slopes
        self._group = saved.q.shape[1] // saved.k.shape[1]
        self._q, self._dout = saved.q.to(dtype), saved.dout.to(dtype)
        self._k, self._v = (
            t.to(dtype).repeat_interleave(self._group, 1) for t in (saved.k, saved.v)
        )
        wide = dtype if dtype.itemsize == 8 else saved.lse.dtype
        self._lse = saved.lse.to(wide)
        self._delta = (saved.dout.to(wide) * saved.out.to(wide)).sum(-1)

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """dQ [B, H, rows, D] of query rows (int64 [rows])."""
        _, ds = self._cells(rows, None)
        return self._scale * (ds @ self._k)

    def keys(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dK [B, Hkv, keys, D] and dV [B, Hkv, keys, Dv] of key rows (int64 [keys])."""
        import torch

        dk: Any = 0.0
        dv: Any = 0.0
        wide = self._lse.dtype  # sums of parts are not rounded: a product's own are not
        for rows in torch.arange(self._q.shape[2], device=self._q.device).split(_STEP):
            p, ds = self._cells(rows, keys)
            dk = dk + (ds.transpose(-1, -2) @ self._q[:, :, rows]).to(wide)
            dv = dv + (p.transpose(-1, -2) @ self._dout[:, :, rows]).to(wide)
        dk, dv = (t.unflatten(1, (-1, self._group)).sum(2) for t in (self._scale * dk, dv))
        return dk.to(self._dtype), dv.to(self._dtype)

    def _cells(self, rows: Any, keys: Any) -> tuple[Any, Any]:
        """P and dS [B, H, rows, keys]; every key for None."""
        import torch

        pattern, q = self._pattern, self._q
        q_len, kv_len = q.shape[2], self._k.shape[2]
        chosen = torch.arange(kv_len, device=q.device) if keys is None else keys
        k, v = (t if keys is None else t[:, :, keys] for t in (self._k, self._v))
        mask = pattern.dense_mask(q_len, kv_len, device=q.device, rows=rows, heads=q.shape[1])
        scores = self._scale * (q[:, :, rows] @ k.transpose(-1, -2))
        slope: Any = 1.0
        if pattern.softcap is not None:
            t = torch.tanh(scores / pattern.softcap)
            scores, slope = pattern.softcap * t, 1 - t * t
        if self._slopes is not None:
            offset = kv_len - q_len if pattern.align == "bottom_right" else 0
            distance = (rows[:, None] + offset - chosen).abs()
            scores = scores - (self._slopes[:, None, None] * distance).to(scores.dtype)
        p = torch.exp(scores.to(self._lse.dtype) - self._lse[:, :, rows, None])
        p = p.masked_fill(~mask[..., chosen], 0.0).to(self._dtype)
        dp = self._dout[:, :, rows] @ v.transpose(-1, -2)
        ds = p * (dp - self._delta[:, :, rows, None].to(self._dtype)) * slope
        return p, ds.to(self._dtype)
