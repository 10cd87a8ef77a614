"""Masks and digit tilings that several tests share."""

from __future__ import annotations

from sparsegen.schedule.tree import Tiling

RUNS = Tiling()
STRIDED = "k <= q and (q - k < 128 or (q - k) % 128 == 0)"
FIXED = "k <= q and (q // 128 == k // 128 or k % 128 >= 120)"
AXIAL = "q // 64 == k // 64 or q % 64 == k % 64"
DILATED = "(q - k) % 8 == 0 and k <= q and q - k <= 1016"
GRID = "abs(q // 64 - k // 64) <= 8 and abs(q % 64 - k % 64) <= 8"
BLOCK = (
    "abs(q // 256 - k // 256) <= 1 and abs(q // 16 % 16 - k // 16 % 16) <= 4"
    " and abs(q % 16 - k % 16) <= 4"
)
FRAMES = "(k // 256) % 16 == 0"
NEAR = "k <= q and q - k <= "
MOD_4 = f"(q - k) % 4 == 0 and {NEAR} 1020 or (q - k) % 2 == 0 and {NEAR} 510 or {NEAR} 255"
PACKED = "(q - k) % 1024 == 0 and q - k >= 1024"


def on(cuts: tuple[int, ...], extent: tuple[int, ...], k_cuts: tuple[int, ...] = ()) -> Tiling:
    return Tiling(cuts, extent, k_cuts or cuts)
