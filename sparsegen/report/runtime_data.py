"""Run-time data from a file, for ``show --runtime FILE``: YAML or JSON, named as the keywords of a call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.errors import InputError
from sparsegen.spec.text_file import read_text

if TYPE_CHECKING:
    import torch

MOST_BYTES = 64 << 20
_MASK = 2**64 - 1


def read_runtime(path: Path) -> dict[str, Any]:
    """Run-time keywords for ``Pattern.dense_mask``.

    Values are numbers and nested lists, as a call takes them.  ``block_mask`` is nested lists of 0 and 1, or ``{rows,
    cols, percent, seed}``: cell (i, j) is then set when ``splitmix64(seed*1000003 + i*4099 + j) % 100 < percent``.
    Raises ``InputError``, naming the file, for what cannot be read; what the pattern does not take is found by it.
    """
    data = _parse(path, read_text(path, MOST_BYTES))
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: must be a mapping from run-time names to data")
    return {str(name): _value(path, str(name), value) for name, value in data.items()}


def _parse(path: Path, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """With each name of a mapping once."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _once(self.construct_object(key, deep=True) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        _once(name for name, _ in found)
        return dict(found)

    try:
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=pairs)
        return yaml.load(text, Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())  # YAML's own has a line for every place it names
        raise InputError(f"{path}: not readable as {path.suffix or 'YAML'}: {reason}") from error


def _once(names: Iterable[Any]) -> None:
    """ValueError for a name that is given twice: the last one would be taken silently."""
    seen: list[Any] = []
    for name in names:
        if name in seen:
            raise ValueError(f"{name!r} is given twice")
        seen.append(name)


def _value(path: Path, name: str, value: Any) -> Any:
    if name != "block_mask":
        return value
    if isinstance(value, Mapping):
        return _drawn_mask(path, value)
    import torch

    try:
        mask = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: block_mask: must be lists of 0 and 1 of equal length") from error
    if bool(((mask != 0) & (mask != 1)).any()):
        raise InputError(f"{path}: block_mask: must hold 0 and 1 only")
    return mask.bool()


def _drawn_mask(path: Path, spec: Mapping[str, Any]) -> torch.Tensor:
    """Bool [rows, cols] from ``{rows, cols, percent, seed}``."""
    import numpy as np
    import torch

    names = ("rows", "cols", "percent", "seed")
    if set(spec) != set(names) or not all(type(spec[n]) is int and spec[n] >= 0 for n in names):
        raise InputError(
            f"{path}: block_mask: needs {', '.join(names)}, integers >= 0; got {dict(spec)}"
        )
    rows, cols, percent, seed = (spec[n] for n in names)
    if percent > 100:
        raise InputError(f"{path}: block_mask: percent must be from 0 to 100, got {percent}")
    if not 0 < rows * cols <= 2**24 or seed > 2**40:
        raise InputError(
            f"{path}: block_mask: rows x cols must be 1 to {2**24} and seed up to {2**40}, got {dict(spec)}"
        )
    i, j = np.arange(rows, dtype=np.uint64)[:, None], np.arange(cols, dtype=np.uint64)[None]
    start = np.uint64(seed * 1000003 & _MASK) + i * np.uint64(4099) + j
    return torch.from_numpy(_splitmix64(start) % np.uint64(100) < percent)


def _splitmix64(x: Any) -> Any:
    """One step of the generator on an array of uint64: add the gamma, then mix; sums and products wrap."""
    import numpy as np

    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
