"""A small language model with a hybrid stack, trained beside the same model with dense masks.

The first layers see everything before, the later ones a window and the first tokens.  The text is the source of
Python's own standard library, read byte by byte: nothing is downloaded.

    python examples/train_lm.py --out runs/lm                              # compiled kernels; needs a GPU
    python examples/train_lm.py --small --backend reference --out runs/lm  # the dense reference, on the CPU

It writes loss.csv and loss.png, and says whether the loss lies inside the band of three dense runs.  docs/examples.md
explains both.
"""

from __future__ import annotations

import argparse
import csv
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparsegen
from sparsegen.nn import SparseAttention

SEEDS = (0, 1, 2)  # of the dense runs; the sparse one has the first
# Nats.  The sparse run shares its seed with a dense one, which is an edge of the band at times: what rounding alone
# may put between the two.
TOLERANCE = 0.005
MOST = 8 << 20  # bytes of text
SIZES = {"steps": 400, "length": 1024, "batch": 16, "width": 256, "layers": 6, "window": 128}
SMALL = {"steps": 20, "length": 96, "batch": 4, "width": 64, "layers": 3, "window": 24}
KINDS = {"triton": "compiled kernels, bfloat16,", "reference": "the dense reference, float32,"}
HEAD_DIM, FULL_LAYERS, SINKS = {False: 64, True: 32}, 2, 4


# ---- the model ----


class Rotary(nn.Module):
    """Rotary embeddings of q and k [B, H, S, D], in float32."""

    def __init__(self, head_dim: int, length: int):
        super().__init__()
        rate = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.arange(length)[:, None] * rate
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._turned(q), self._turned(k)

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        rows = slice(x.shape[2])
        return x * self.cos[rows] + torch.cat([-second, first], -1) * self.sin[rows]


class DenseAttention(SparseAttention):
    """The same layer on PyTorch's attention with the pattern as a dense mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **runtime: Any) -> Tensor:
        if not hasattr(self, "mask"):
            self.mask = self.pattern.dense_mask(q.shape[2], k.shape[2])[None].to(q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class Block(nn.Module):
    def __init__(self, width: int, attention: SparseAttention):
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    """Bytes [B, S] → logits [B, S, 256]."""

    def __init__(self, args: argparse.Namespace, dense: bool):
        super().__init__()
        layer = DenseAttention if dense else SparseAttention
        head_dim = HEAD_DIM[args.small]
        given = {"backend": "reference" if dense else args.backend, "bias": False}
        given |= {"head_dim": head_dim, "lengths": [args.length]}
        rotary = Rotary(head_dim, args.length)
        self.embed = nn.Embedding(256, args.width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(args.width, layer(args.width, args.width // head_dim, p, rotary=rotary, **given))
            for p in stack(args)
        )
        self.after, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(x))

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a byte, of text [B, S + 1]."""
        logits = self(text[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())


def stack(args: argparse.Namespace) -> list[sparsegen.Pattern]:
    """The pattern of each layer."""
    near = {"any_of": [{"window": {"size": args.window}}, {"sink": {"tokens": SINKS}}]}
    full = sparsegen.Pattern.from_dict({"name": "full", "mask": "causal"})
    local = {"name": f"window_{args.window}_sinks", "mask": {"all_of": ["causal", near]}}
    few = min(FULL_LAYERS, args.layers)
    return [full] * few + [sparsegen.Pattern.from_dict(local)] * (args.layers - few)


# ---- training ----


def read_text() -> Tensor:
    """The standard library's modules one after the other, as bytes."""
    folder, parts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts and size < MOST:
            parts.append(path.read_bytes())
            size += len(parts[-1])
    if size < 1 << 20:
        raise sparsegen.InputError(f"only {size} bytes of Python's library are in {folder}")
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def batches(text: Tensor, args: argparse.Namespace, seed: int) -> Tensor:
    """Where each sequence of each step begins, [steps, batch]: the same for every run of a seed."""
    g = torch.Generator().manual_seed(seed)
    last = len(text) - args.length - 1
    return torch.randint(last, (args.steps, args.batch), generator=g).to(text.device)


def train(text: Tensor, args: argparse.Namespace, seed: int, dense: bool) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = Model(args, dense).to(text.device)  # made on the CPU: a seed gives the same weights
    low = torch.bfloat16 if args.backend == "triton" else None
    if low is not None and not dense:
        for block in model.blocks:
            block.attention.prepare(low)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
    warm = max(1, args.steps // 20)
    rate = lambda step: min(1.0, (step + 1) / warm) * (1 - 0.9 * step / args.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    window, losses = torch.arange(args.length + 1, device=text.device), []
    for starts in batches(text, args, seed):
        part = text[starts[:, None] + window].long()
        with torch.autocast(text.device.type, low, enabled=low is not None):
            loss = model.loss(part)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())  # read at the end: no step waits for the GPU
    return torch.stack(losses).tolist()


# ---- the comparison ----


def smoothed(values: list[float], width: int) -> list[float]:
    """The mean of the last ``width`` values, of fewer at the beginning."""
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))
    ]


def compare(dense: list[list[float]], ours: list[float]) -> dict[str, Any]:
    """The band, our curve, both smoothed, and what can be said of them.

    The edges of the band are the least and the largest loss of the dense runs, step by step, smoothed after that.
    Judged are the steps from the first whole mean on.
    """
    width = max(min(5, len(ours)), len(ours) // 16)
    low, high = ([f(step) for step in zip(*dense)] for f in (min, max))
    low, high, curve, twin = (smoothed(x, width) for x in (low, high, ours, dense[0]))
    judged = list(zip(low, high, curve))[width - 1 :]
    outside = [max(a - x, x - b, 0.0) for a, b, x in judged]
    return {
        "width": width, "low": low, "high": high, "curve": curve, "twin": twin,
        "outside": max(outside), "steps_outside": sum(not x <= TOLERANCE for x in outside),
        "difference": max(abs(a - b) for a, b in zip(curve, twin)),
        "dense": [smoothed(x, width) for x in dense],
    }  # fmt: skip


def verdict(found: dict[str, Any]) -> str:
    """One line."""
    end = f"{found['curve'][-1]:.4f} at the end, the band {found['low'][-1]:.4f} to {found['high'][-1]:.4f}"
    same = f"at most {found['difference']:.4f} from the dense run of the same seed"
    if not found["steps_outside"]:
        return f"INSIDE the band at every step: {end}; {same}"
    return f"OUTSIDE the band at {found['steps_outside']} steps, by up to {found['outside']:.4f}: {end}; {same}"


def write(
    folder: Path, dense: list[list[float]], ours: list[float], found: dict[str, Any], title: str
) -> None:
    """loss.csv and loss.png."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        names = [f"dense_seed_{s}" for s in SEEDS]
        rows.writerow(["step", *names, "sparse_seed_0", "band_low", "band_high", "sparse_smoothed"])
        columns = (*dense, ours, found["low"], found["high"], found["curve"])
        rows.writerows([i, *(f"{x:.6f}" for x in row)] for i, row in enumerate(zip(*columns)))
    draw(folder / "loss.png", found, title)


def draw(path: Path, found: dict[str, Any], title: str) -> None:
    """The band, the three dense runs and ours."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=90)
    steps = range(len(found["curve"]))
    axes.fill_between(steps, found["low"], found["high"], color="0.85", label="dense, min to max")
    for i, curve in enumerate(found["dense"]):
        axes.plot(steps, curve, color="0.55", lw=0.8, label=None if i else "dense, three seeds")
    axes.plot(steps, found["curve"], color="tab:blue", lw=1.6, label="sparsegen, first seed")
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats a byte, mean of {found['width']} steps")
    axes.set_ylim(top=min(max(found["high"]), found["high"][-1] * 2.5))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All runs, their files, and what was found."""
    if args.backend == "triton" and not torch.cuda.is_available():
        cure = "--backend reference --small runs the dense reference on the CPU"
        raise sparsegen.ToolchainError(f"compiled kernels need a GPU, none is here; {cure}")
    text = read_text().to("cuda" if args.backend == "triton" else "cpu")
    where = torch.cuda.get_device_name() if args.backend == "triton" else "the CPU"
    sizes = ", ".join(f"{name} {getattr(args, name)}" for name in SIZES)
    print(f"{len(text):,} bytes of Python's library; {sizes}; {args.backend} on {where}, torch {torch.__version__}")  # fmt: skip

    def timed(seed: int, dense: bool) -> list[float]:
        start = time.perf_counter()
        losses = train(text, args, seed, dense)
        name = "dense" if dense else "sparse"
        seconds = time.perf_counter() - start
        print(f"{name:6} seed {seed}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {seconds:.1f} s", flush=True)  # fmt: skip
        return losses

    ours = timed(SEEDS[0], dense=False)  # first: what cannot be built is said at once
    dense = [timed(seed, dense=True) for seed in SEEDS]
    found = compare(dense, ours)
    write(args.out, dense, ours, found, f"{KINDS[args.backend]} on {where}")
    print(verdict(found))
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command; the exit code is 1 for an error and for a curve outside the band."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["triton", "reference"], default="triton")
    parser.add_argument("--out", type=Path, required=True, help="folder for loss.csv and loss.png")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    for name, value in SIZES.items():
        said = f"default {value}, small {SMALL[name]}"
        parser.add_argument(f"--{name}", type=int, help=said)
    args = parser.parse_args(arguments)
    for name, value in (SMALL if args.small else SIZES).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        found = run(args)
    except (sparsegen.SparsegenError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if found["steps_outside"] else 0


if __name__ == "__main__":
    sys.exit(main())
