"""Measured winners: ``tuned/<gpu>/<pattern>.json``, written only by the tuner; ``store`` looks them up.

A file is one object: the GPU, its architecture, and ``rows``, one problem a line, keys sorted, so that a change of
one winner is a change of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import Value
from sparsegen.errors import ArtifactError
from sparsegen.paths import write_whole

if TYPE_CHECKING:
    from sparsegen.spec.gpu import Gpu
    from sparsegen.spec.problem import Problem


@dataclass(frozen=True)
class Measured:
    """The problem that was measured: one pair of lengths."""

    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    batch: int
    dtype: str
    q_len: int
    kv_len: int

    @classmethod
    def of(cls, problem: Problem, q_len: int, kv_len: int) -> Measured:
        """The fields of ``problem`` with one pair of its lengths."""
        return cls(
            problem.head_dim,
            problem.value_dim or problem.head_dim,
            problem.heads,
            problem.kv_heads or problem.heads,
            problem.batch,
            str(problem.dtype),
            q_len,
            kv_len,
        )


@dataclass(frozen=True)
class Row:
    """One measured winner.

    ``time_us`` and ``baseline_us`` (the template's default) are medians of the same rounds; ``noise`` is how
    far their ratio strayed from round to round (``measure.Measurement``); ``trials`` counts measured configurations; ``versions`` are of torch, triton and the
    driver; ``date`` is ISO 8601.
    """

    pattern: str
    pattern_digest: str
    template: str
    template_digest: str
    problem: Measured
    config: Mapping[str, Value]
    time_us: float
    baseline_us: float
    noise: float
    trials: int
    versions: Mapping[str, str]
    date: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Row:
        """From JSON.

        Raises:
            TypeError, KeyError: a field is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            odd = sorted(names ^ set(values))
            raise KeyError(f"fields {', '.join(odd)} are missing or unknown")
        return cls(**{**values, "problem": Measured(**values["problem"])})


def read(root: Path, gpu: str, pattern: str) -> list[Row]:
    """The rows of one file; none if there is no file.

    Raises:
        ArtifactError: the file is damaged.
    """
    return read_file(root / gpu / f"{pattern}.json")[1]


def write(root: Path, gpu: Gpu, row: Row) -> Path:
    """Put ``row`` in its file, in place of an older one for the same problem and template.

    Several processes may write at once; a reader sees the old file or the new one, nothing between.
    """
    import filelock

    path = root / gpu.name / f"{row.pattern}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.parent / ".lock", timeout=60):
        kept = [
            old
            for old in read_file(path)[1]
            if (old.problem, old.template) != (row.problem, row.template)
        ]
        rows = sorted([*kept, row], key=lambda r: (r.template, order_of(r.problem)))
        header = {"arch": gpu.arch, "backend": gpu.backend, "gpu": gpu.name}
        write_whole(path, _text(header, rows).encode())
    return path


def order_of(problem: Measured) -> tuple[Any, ...]:
    """By which the rows of a template are sorted."""
    return tuple(asdict(problem).values())


def read_file(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What a file says of its GPU, and its rows; nothing if there is no file.

    Raises:
        ArtifactError: the file is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row.of(values) for values in content.pop("rows")]
    except FileNotFoundError:
        return {}, []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}); it is written by sparsegen tune only: restore or delete it"
        ) from error
    return content, rows


def _text(header: Mapping[str, Any], rows: list[Row]) -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(header[name])}," for name in sorted(header)]
    listed = ",\n".join(json.dumps(row.as_dict(), sort_keys=True) for row in rows)
    return "{\n" + "\n".join(lines) + '\n"rows": [\n' + listed + "\n]\n}\n"
