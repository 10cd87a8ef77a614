"""Dense masks: a pattern's expressions evaluated cell by cell, some rows at a time."""

from __future__ import annotations

from typing import Any

from sparsegen.errors import InputError
from sparsegen.spec import expr
from sparsegen.spec.call import Call
from sparsegen.spec.pattern import POSITION_NAMES, Pattern
from sparsegen.spec.positions import find_positions
from sparsegen.spec.run_data import check_keywords, integers

_MOST_CELLS = 2**38  # 256 GiB of booleans
_CELLS_AT_ONCE = 2**22  # int64 temporaries of about 32 MB each


def dense_mask(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    *,
    device: Any,
    rows: Any,
    heads: int | None,
    runtime: dict[str, Any],
) -> Any:
    """See ``Pattern.dense_mask``."""
    scores = ("block_scores",) if any(n.keyword == "top_blocks" for _, n in pattern.nodes()) else ()
    check_keywords(pattern, runtime, POSITION_NAMES + scores)
    heads = heads or _default_heads(pattern)
    at = find_positions(
        q_len, kv_len, pattern.align, device, **{n: runtime.get(n) for n in POSITION_NAMES}
    )
    pattern.check_lengths(q_len, kv_len, at.k_start)
    chosen = None if rows is None else chosen_rows(rows, q_len, device)
    asked = q_len if chosen is None else len(chosen)
    if asked * kv_len > _MOST_CELLS:  # said before the memory of this machine is gone
        raise InputError(
            f"a mask of {asked} rows of {kv_len} keys is too large, at most {_MOST_CELLS} cells "
            "are made; ask for some of the rows with rows="
        )
    call = Call(pattern, at, heads, runtime)
    mask = visible(call, chosen_rows(None, q_len, device) if chosen is None else chosen)
    return mask if call.batch is not None else mask[0]


def chosen_rows(rows: Any, q_len: int, device: Any) -> Any:
    """Query rows as an int64 tensor [n]; all of them for None."""
    import torch

    if rows is None:
        return torch.arange(q_len, device=device)
    rows = integers("rows", rows, device).reshape(-1)
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < q_len:
        raise InputError(
            f"rows must be from 0 to {q_len - 1}, got {int(rows.min())} to {int(rows.max())}"
        )
    return rows


def visible(call: Call, rows: Any) -> Any:
    """bool [B or 1, heads or 1, len(rows), kv_len]; B and heads are 1 where nothing differs (and no batch was given)."""
    import torch

    pattern, kv_len = call.pattern, call.at.kv_len
    rules = (
        None
        if len(pattern.rules) == 1 and pattern.rules[0].heads is None
        else pattern.head_rule_of(call.heads)
    )
    step = max(_CELLS_AT_ONCE // max(kv_len * call.at.batch, 1), 1)
    parts = [_some_rows(call, part, rules) for part in rows.split(step)] if rows.numel() else []
    if not parts:
        shape = (_entries(call), len(rules) if rules else 1, 0, kv_len)
        return torch.zeros(shape, dtype=torch.bool, device=call.device)
    return torch.cat(parts, dim=2)


def _some_rows(call: Call, rows: Any, rules: list[int] | None) -> Any:
    import torch

    at = call.at_rows(rows)
    valid = at.q_valid & at.k_valid
    masks = []
    for _, visible_when in call.pattern.exprs:
        value = expr.evaluate(visible_when, at.env, at.term)
        value = torch.as_tensor(value, device=call.device) & valid
        # The batch is known only now: a block mask may be the only data that has one.
        masks.append(value.expand(_entries(call), *value.shape[1:3], call.at.kv_len))
    if rules is None:
        return masks[0]
    shape = (_entries(call), len(rules), len(rows), call.at.kv_len)
    out = torch.empty(shape, dtype=torch.bool, device=call.device)
    for head, rule in enumerate(rules):
        mask = masks[rule]
        out[:, head] = mask[:, head if mask.shape[1] > 1 else 0]
    return out


def _entries(call: Call) -> int:
    """Batch entries of the mask: 1 without a batch, none for a batch of none."""
    return 1 if call.batch is None else call.batch


def _default_heads(pattern: Pattern) -> int | None:
    """Query heads for a mask per head: the problem's, else those that the rules name (rest cannot be counted)."""
    if len(pattern.rules) == 1 and pattern.rules[0].heads is None:
        return None
    if pattern.problem is not None:
        return int(pattern.problem.heads)
    if any(rule.heads is None for rule in pattern.rules):
        raise InputError(
            f"{pattern.name}: heads: rest needs the number of heads; give heads= or problem.heads"
        )
    return 1 + max(high for rule in pattern.rules for _, high in rule.heads)
