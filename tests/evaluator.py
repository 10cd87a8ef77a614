"""A second, independent reading of the pattern language: plain values → dense masks, cell by cell.

Written from the definition of the language alone; it shares no code with ``sparsegen``.  Positions are Python integers in
object arrays, so nothing can overflow.  Slow: for lengths of a few dozen.  It expects a valid pattern.
"""

from __future__ import annotations

import ast
import math
from typing import Any

import numpy as np

_WORD = 2**64 - 1


class OffGrid(Exception):
    """More keys than the grid of a grid node has cells: an error of the call."""


def evaluate(
    data: dict, q_len: int, kv_len: int, heads: int = 1, runtime: dict | None = None
) -> np.ndarray:
    """bool [B, heads, q_len, kv_len].  ``runtime``: keywords as nested lists, or arrays; B is 1 if none has a batch."""
    runtime = runtime or {}
    batch = max([1] + [len(runtime[n]) for n in ("kv_lengths", "prefix_lengths") if n in runtime])
    out = np.zeros((batch, heads, q_len, kv_len), bool)
    for b in range(batch):
        valid = int(runtime["kv_lengths"][b]) if "kv_lengths" in runtime else kv_len
        for head in range(heads):
            call = _Call(data, q_len, kv_len, valid, b, head, heads, runtime)
            mask = call.node(_mask_of(data, head), call.q, call.k)
            out[b, head] = np.broadcast_to(mask, (q_len, kv_len)) & (np.arange(kv_len) < valid)
    return out


def _mask_of(data: dict, head: int) -> Any:
    if "mask" in data:
        return data["mask"]
    rest = None
    for rule in data["heads"]:
        if rule["heads"] == "rest":
            rest = rule["mask"]
            continue
        named = rule["heads"] if isinstance(rule["heads"], list) else [rule["heads"]]
        for entry in named:
            first, _, last = str(entry).partition("-")
            if int(first) <= head <= int(last or first):
                return rule["mask"]
    return rest


def _range(low: int, high: int) -> np.ndarray:
    return np.array([*range(low, high), None], object)[:-1]


class _Call:
    def __init__(self, data, q_len, kv_len, valid, b, head, heads, runtime):
        self.q_len, self.kv_len, self.valid = q_len, kv_len, valid
        self.b, self.head, self.heads, self.runtime = b, head, heads, runtime
        self.offset = 0 if data.get("align") == "top_left" else valid - q_len
        self.q = _range(self.offset, self.offset + q_len)[:, None]
        self.k = _range(0, kv_len)[None, :]

    def node(self, node: Any, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """``q`` [q_len, 1 or kv_len] and ``k`` [1 or q_len, kv_len]: the positions that count here."""
        key, body = (node, None) if isinstance(node, str) else next(iter(node.items()))
        body = {} if body is None else body
        mask = getattr(self, "node_" + key)(body, q, k)
        return np.broadcast_to(np.asarray(mask).astype(bool), (self.q_len, self.kv_len))

    # ------------------------------------------------------------------ joining
    def node_all_of(self, parts, q, k):
        if any(_restarts(p) for p in parts):
            start_q = np.array([self.start(int(p)) for p in self.q[:, 0]] + [None], object)[:-1][
                :, None
            ]
            start_k = np.array([self.start(int(p)) for p in self.k[0]] + [None], object)[:-1][
                None, :
            ]
            q, k = q - start_q, k - start_k
        return np.logical_and.reduce([self.node(p, q, k) for p in parts])

    def node_any_of(self, parts, q, k):
        return np.logical_or.reduce([self.node(p, q, k) for p in parts])

    def node_not(self, part, q, k):
        return ~self.node(part, q, k)

    # ------------------------------------------------------------------ positions
    def node_full(self, body, q, k):
        return True

    def node_causal(self, body, q, k):
        return k <= q

    def node_window(self, body, q, k):
        left, right = _sides(body)
        return (-right <= q - k) & (q - k <= left)

    def node_dilated(self, body, q, k):
        d = body["dilation"]
        left, right = _sides(body)
        return ((q - k) % d == 0) & (-right * d <= q - k) & (q - k <= left * d)

    def node_sink(self, body, q, k):
        return k < body["tokens"]

    def node_prefix(self, body, q, k):
        n = body["tokens"]
        if n == "runtime":
            lengths = self.runtime["prefix_lengths"]
            n = int(lengths[self.b if len(lengths) > 1 else 0])
        return k < n

    def node_global(self, body, q, k):
        chosen = set(body["positions"]) if "positions" in body else None
        pick = lambda p: (0 <= p < body["tokens"]) if chosen is None else p in chosen
        is_global = np.frompyfunc(pick, 1, 1)
        rows = is_global(q).astype(bool) & body.get("rows", True)
        columns = is_global(k).astype(bool) & body.get("columns", True)
        return rows | columns

    def node_strided(self, body, q, k):
        return (q - k) % body["stride"] == 0

    def node_columns(self, body, q, k):
        return k % body["stride"] >= body["stride"] - body["width"]

    def node_chunks(self, body, q, k):
        return q // body["size"] == k // body["size"]

    def node_axial(self, body, q, k):
        return self.on_grid(
            body["shape"], q, k, lambda a, b: sum(x != y for x, y in zip(a, b)) <= 1
        )

    def node_neighborhood(self, body, q, k):
        near = lambda a, b: all(abs(x - y) <= r for x, y, r in zip(a, b, body["radius"]))
        return self.on_grid(body["shape"], q, k, near)

    def on_grid(self, shape, q, k, sees):
        cells = math.prod(shape)
        if self.kv_len > cells:
            raise OffGrid

        def cell(a, b):
            return (
                0 <= a < cells
                and 0 <= b < cells
                and sees(_coordinates(a, shape), _coordinates(b, shape))
            )

        return np.frompyfunc(cell, 2, 1)(q, k)

    def node_random_blocks(self, body, q, k):
        b, r, s = body["block"], body["per_row"], body["seed"]
        blocks = -(-self.valid // b)
        drawn = {}

        def cell(a, c):
            if a < 0 or c < 0:
                return False
            row = a // b
            if row not in drawn:
                chosen, t = set(), 0
                while len(chosen) < min(r, blocks):
                    chosen.add(_splitmix64((s << 40) ^ (row << 20) ^ t) % blocks)
                    t += 1
                drawn[row] = chosen
            return c // b in drawn[row]

        return np.frompyfunc(cell, 2, 1)(q, k)

    def node_predicate(self, text, q, k):
        names = {"q": q, "k": k, "q_len": self.q_len, "kv_len": self.valid}
        return _walk(ast.parse(text.strip(), mode="eval").body, names)

    # ------------------------------------------------------------------ run-time data
    def document(self, p: int) -> Any:
        if "document_ids" in self.runtime:
            ids = list(self.runtime["document_ids"])
            return ("id", int(ids[p])) if 0 <= p < len(ids) else None
        lengths = self.runtime.get("document_lengths")
        if lengths is None:
            cu = list(self.runtime["cu_seqlens"])
            lengths = [b - a for a, b in zip(cu, cu[1:])]
        start = 0
        for number, length in enumerate(lengths):
            if start <= p < start + length:
                return (number, start)
            start += length
        return None

    def start(self, p: int) -> int:
        document = self.document(p)
        if document is None:
            return 0
        return min(i for i in range(self.kv_len + 1) if self.document(i) == document)

    def node_documents(self, body, q, k):
        of_q = [self.document(int(p)) for p in self.q[:, 0]]
        of_k = [self.document(int(p)) for p in self.k[0]]
        return np.array([[a is not None and a == b for b in of_k] for a in of_q], bool).reshape(
            self.q_len, self.kv_len
        )

    def node_key_padding(self, body, q, k):
        return self.k < int(self.runtime["kv_lengths"][self.b])

    def own(self, name: str) -> np.ndarray:
        """The [rows, columns] (or [rows, most]) part of [B or 1, H or 1, …] data for this batch entry and head."""
        tensor = np.asarray(self.runtime[name])
        head = self.head * tensor.shape[1] // self.heads
        return tensor[self.b if tensor.shape[0] > 1 else 0, head]

    def blocks(self, chosen, bq, bk):
        row, column = np.arange(self.q_len) // bq, np.arange(self.kv_len) // bk
        return np.asarray(chosen, bool)[row][:, column]

    def node_block_mask(self, body, q, k):
        return self.blocks(self.own("block_mask"), *body["block"])

    def node_block_list(self, body, q, k):
        bq, bk = body["block"]
        chosen = np.zeros((-(-self.q_len // bq), -(-self.kv_len // bk)), bool)
        for row, (listed, count) in enumerate(
            zip(self.own("block_indices"), self.own("block_counts"))
        ):
            chosen[row, listed[:count]] = True
        return self.blocks(chosen, bq, bk)

    def node_top_blocks(self, body, q, k):
        b, scores = body["block"], self.own("block_scores")
        chosen = np.zeros(scores.shape, bool)
        for row in range(scores.shape[0]):
            last = self.offset + min((row + 1) * b, self.q_len) - 1
            open_ = [
                c
                for c in range(scores.shape[1])
                if c * b < self.valid and (body.get("future") or c * b <= last)
            ]
            if "threshold" in body:
                open_ = [c for c in open_ if scores[row, c] >= body["threshold"]]
            for c in sorted(open_, key=lambda c: (-scores[row, c], c))[: body["count"]]:
                chosen[row, c] = True
        return self.blocks(chosen, b, b)


def _restarts(node: Any) -> bool:
    return isinstance(node, dict) and (node.get("documents") or {}).get("positions") == "relative"


def _sides(body: dict) -> tuple[Any, Any]:
    if "size" in body:
        return body["size"] - 1, 0
    left, right = (
        (body["radius"],) * 2 if "radius" in body else (body.get("left", 0), body.get("right", 0))
    )
    return tuple(10**18 if side in ("inf", math.inf) else side for side in (left, right))


def _coordinates(p: int, shape: list) -> list:
    found = []
    for length in reversed(shape):
        found.append(p % length)
        p //= length
    return found[::-1]


def _splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


_BINARY = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_COMPARE = {
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
}


def _walk(node: ast.AST, names: dict) -> Any:
    """A predicate over Python integers, by Python's own grammar."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return names[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_walk(operand, names)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _walk(operand, names)
        case ast.UnaryOp(ast.Not(), operand):
            return np.logical_not(np.asarray(_walk(operand, names)).astype(bool))
        case ast.BinOp(left, operator, right):
            return _BINARY[type(operator)](_walk(left, names), _walk(right, names))
        case ast.BoolOp(operator, values):
            join = np.logical_and if isinstance(operator, ast.And) else np.logical_or
            parts = [np.asarray(_walk(v, names)).astype(bool) for v in values]
            for part in parts[1:]:
                parts[0] = join(parts[0], part)
            return parts[0]
        case ast.Compare(left, operators, comparators):
            sides = [_walk(n, names) for n in (left, *comparators)]
            whole = True
            for operator, a, b in zip(operators, sides, sides[1:]):
                whole = np.logical_and(
                    whole, np.asarray(_COMPARE[type(operator)](a, b)).astype(bool)
                )
            return whole
        case ast.Call(ast.Name(name), args):
            values = [_walk(a, names) for a in args]
            if name == "abs":
                return abs(values[0])
            pick = np.frompyfunc(min if name == "min" else max, 2, 1)
            for value in values[1:]:
                values[0] = pick(values[0], value)
            return values[0]
    raise TypeError(ast.dump(node))
