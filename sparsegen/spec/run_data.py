"""Run-time data of a call, checked: integers, batches and document boundaries.  torch, loaded by the caller's need."""

from __future__ import annotations

from typing import Any

from sparsegen.errors import InputError
from sparsegen.spec.fields import LIMIT, did_you_mean, show


def check_keywords(pattern: Any, given: dict[str, Any], also: tuple[str, ...]) -> None:
    """TypeError unless ``given`` has one keyword of each group that the pattern needs, and nothing unknown."""
    known = (*pattern.runtime_names, *also)
    for name in given:
        if name not in known:
            near = did_you_mean(name, known)
            takes = ", ".join(known) or "no run-time data"
            raise TypeError(f"{pattern.name}: unknown keyword {name!r}{near}; it takes {takes}")
    for group in pattern.runtime_needs:
        found = [name for name in group if given.get(name) is not None]
        if not found:
            raise TypeError(f"{pattern.name}: missing keyword {' or '.join(group)}")
        if len(found) > 1:
            raise TypeError(f"{pattern.name}: give only one of {' and '.join(found)}")


def check_floating(name: str, value: Any, dtypes: str) -> None:
    """InputError unless ``value`` is a tensor of real numbers; ``dtypes``: those that are allowed, in words."""
    import torch

    if not isinstance(value, torch.Tensor):
        kind = type(value)
        where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise InputError(
            f"{name} must be a torch.Tensor of {dtypes}, got {where}{kind.__qualname__}"
        )
    if not value.dtype.is_floating_point:
        raise InputError(f"{name} must be {dtypes}, got {str(value.dtype).removeprefix('torch.')}")


def integers(name: str, value: Any, device: Any) -> Any:
    """``value`` (number, nested list, array or tensor) as an int64 tensor."""
    import torch

    if isinstance(
        value, torch.Tensor
    ):  # nothing to read: what fails here is the device, not the value
        tensor = value.to(device)
    else:
        try:
            host = torch.as_tensor(value)
        except torch.AcceleratorError:
            raise  # a list of tensors on a GPU that failed before
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise InputError(f"{name} must be integers, got {show(value)}") from None
        tensor = host.to(device)
    whole = not (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex())
    if tensor.numel() and not whole:  # an empty list has no dtype of its own
        raise InputError(f"{name} must be integers, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.to(torch.int64)


def per_batch(name: str, value: Any, low: int, high: int, device: Any) -> Any:
    """An integer, or one for each batch entry, within [low, high]: int64 tensor [] or [B]."""
    tensor = integers(name, value, device)
    if tensor.dim() > 1:
        raise InputError(
            f"{name} must be one integer or a list [B], got shape {list(tensor.shape)}"
        )
    if tensor.numel() and not low <= int(tensor.min()) <= int(tensor.max()) <= high:
        worst = int(tensor.min()) if int(tensor.min()) < low else int(tensor.max())
        raise InputError(f"{name} must be from {low} to {high}, got {worst}")
    return tensor


def offsets(name: str, value: Any, device: Any) -> Any:
    """``cu_seqlens`` or ``document_lengths`` as offsets [1 or B, n + 1], starting at 0, never decreasing."""
    import torch

    if name == "document_lengths":
        tensor = _padded_lengths(name, value, device)
        if tensor.numel() and int(tensor.min()) < 0:
            raise InputError(f"document_lengths must be 0 or more, got {int(tensor.min())}")
        if tensor.numel() and int(tensor.max()) > LIMIT:  # so that no sum of them wraps
            raise InputError(f"document_lengths must be at most {LIMIT}, got {int(tensor.max())}")
        return torch.nn.functional.pad(tensor.cumsum(-1), (1, 0))
    tensor = integers(name, value, device)
    if tensor.dim() not in (1, 2):
        raise InputError(
            f"cu_seqlens must be [n + 1] or [B, n + 1], got shape {list(tensor.shape)}"
        )
    if tensor.shape[-1] < 2:
        raise InputError(f"cu_seqlens must have at least 2 offsets, got {tensor.shape[-1]}")
    tensor = _rows(name, tensor)
    if bool((tensor[:, 0] != 0).any()):
        raise InputError(f"cu_seqlens must start at 0, got {tensor[:, 0].tolist()[0]}")
    falls = tensor[:, 1:] < tensor[:, :-1]
    if bool(falls.any()):
        row, at = falls.nonzero()[0].tolist()
        before, after = tensor[row, at].item(), tensor[row, at + 1].item()
        raise InputError(f"cu_seqlens must never decrease, got {after} after {before}")
    return tensor


def _padded_lengths(name: str, value: Any, device: Any) -> Any:
    """Lengths [n], or [B, n]; shorter lists of a batch are filled with empty documents."""
    import torch

    if isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple)) for v in value):
        rows = [integers(name, v, device).reshape(-1) for v in value]
        longest = max(len(r) for r in rows)
        return torch.stack([torch.nn.functional.pad(r, (0, longest - len(r))) for r in rows])
    tensor = integers(name, value, device)
    if tensor.dim() not in (1, 2):
        raise InputError(f"{name} must be [n] or [B, n], got shape {list(tensor.shape)}")
    return _rows(name, tensor)


def _rows(name: str, tensor: Any) -> Any:
    """[n] or [B, n] as [1 or B, n]; n may be 0, B may not."""
    if tensor.dim() == 1:
        return tensor[None]
    if not tensor.shape[0]:
        raise InputError(
            f"{name} must have at least one batch entry, got shape {list(tensor.shape)}"
        )
    return tensor


class Documents:
    """Which document a position lies in, and where that document starts."""

    def __init__(self, name: str, value: Any, needed: int | None, device: Any):
        """``needed``: length of the key buffer, or None where the call places it itself (a shard)."""
        import torch

        self.cu, self.ids, self.starts = None, None, None
        if name == "document_ids":
            ids = integers(name, value, device)
            if ids.dim() not in (1, 2):
                raise InputError(
                    f"document_ids must be [kv_len] or [B, kv_len], got shape {list(ids.shape)}"
                )
            ids = _rows(name, ids)
            if needed is not None and ids.shape[-1] != needed:
                raise InputError(
                    f"document_ids must have kv_len = {needed} entries, got {ids.shape[-1]}"
                )
            self.batched = torch.as_tensor(value).dim() == 2
            self.ids = ids
            self.starts = _first_places(ids)
            return
        self.cu = offsets(name, value, device)
        self.batched = self.cu.shape[0] > 1 or (hasattr(value, "ndim") and value.ndim == 2)
        last = int(self.cu[:, -1].max())
        if needed is not None and last > needed:
            raise InputError(f"{name} ends at {last}, beyond the buffer of kv_len = {needed}")

    @property
    def batch(self) -> int:
        return (self.cu if self.cu is not None else self.ids).shape[0]  # type: ignore[union-attr]

    def find(self, positions: Any) -> tuple[Any, Any]:
        """(document, its first position) of positions [1 or B, n]; the document is -1 where there is none."""
        import torch

        rows = max(positions.shape[0], self.batch)
        p = positions.expand(rows, -1).contiguous()
        if self.cu is not None:
            cu = self.cu.expand(rows, -1).contiguous()
            found = torch.searchsorted(cu, p, right=True) - 1
            inside = (p >= 0) & (p < cu[:, -1:])
            document = torch.where(inside, found, -1)
            return document, torch.where(inside, cu.gather(1, found.clamp(0, cu.shape[1] - 1)), 0)
        n = self.ids.shape[-1]  # type: ignore[union-attr]
        inside = (p >= 0) & (p < n)
        if n == 0:
            return torch.full_like(p, -1), torch.zeros_like(p)
        # The first position of an id names the document: equal ids, equal names, whatever values ids have.
        start = self.starts.expand(rows, -1).gather(1, p.clamp(0, n - 1))  # type: ignore[union-attr]
        return torch.where(inside, start, -1), torch.where(inside, start, 0)


def _first_places(ids: Any) -> Any:
    """For each entry of ids [B, n], the first index in its row with the same id."""
    import torch

    out = torch.empty_like(ids)
    for row in range(ids.shape[0]):
        values, inverse = torch.unique(ids[row], return_inverse=True)
        index = torch.arange(ids.shape[1], device=ids.device)
        first = torch.full((len(values),), ids.shape[1], device=ids.device, dtype=torch.int64)
        out[row] = first.scatter_reduce(0, inverse, index, "amin")[inverse]
    return out
