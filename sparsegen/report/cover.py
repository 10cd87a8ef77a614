"""``sparsegen tune --cover``: few configurations for many problems, the rule, and what it loses, for a person."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsegen.errors import TuneError
from sparsegen.report import files
from sparsegen.tune.cover import LIMIT, Cover, cover
from sparsegen.tune.rule import path_of

_SQLITE = b"SQLite format 3\0"  # how every SQLite file begins


@dataclass(frozen=True)
class CoverPage:
    """A cover and where its rule was written, if it was."""

    found: Cover
    kept: Path | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        rule = self.found.rule
        return {
            "gpu": rule.gpu,
            "template": rule.template,
            "limit": self.found.limit,
            "ok": self.found.ok,
            "configurations": {n: c.as_dict() for n, c in rule.configurations.items()},
            "rule": rule.code,
            "worst_training": self.found.worst(False),
            "worst_held_out": self.found.worst(True),
            "problems": [asdict(loss) for loss in self.found.losses],
            "without_a_time": dict(self.found.missing),
            "kept": None if self.kept is None else str(self.kept),
        }

    def text(self) -> str:
        """For a person: configurations, rule, and problems that lose most."""
        found, rule = self.found, self.found.rule
        lines = [
            f"{len(rule.configurations)} configurations for {rule.gpu}, template {rule.template}"
        ]
        lines += [f"  {name}: {config}" for name, config in rule.configurations.items()]
        lines += ["", *rule.code.splitlines(), ""]
        for held_out in (False, True):
            part = [one for one in found.losses if one.held_out is held_out]
            what = "problems held out" if held_out else "problems that it was made for"
            lines.append(f"{len(part)} {what}: loses at most {_share(found.worst(held_out))}")
        for one in sorted(found.losses, key=lambda x: -(9.9 if x.rule is None else x.rule))[:5]:
            part_name = ", held out" if one.held_out else ""
            lines.append(f"  {one.problem}{part_name}: {one.chosen} loses {_share(one.rule)}")
        gaps = ", ".join(f"{count} {kind}" for kind, count in found.missing.items()) or "none"
        lines.append(f"{found.measured} of {found.pairs} pairs have a time; without one: {gaps}")
        if self.kept is not None:
            lines.append(f"written to {self.kept}")
        return "\n".join(lines)


def cover_of(
    source: str,
    *,
    limit: float | None = None,
    gpu: str | None = None,
    keep: bool = False,
    root: Path | None = None,
) -> CoverPage:
    """Find few configurations in a recording (a file of JSON lines) or in the studies of a storage.

    Args:
        source: a recording, a SQLite file of studies, or a database URL.
        limit: the share of the best time that may be lost; default 0.03.
        gpu: which one, where a storage has studies of several; its name or alias.
        keep: write the rule to ``tuned/`` (``root``; default the folder that comes with the package).

    Raises:
        TuneError: a problem is known to lose more than the limit, or its loss is not known, and ``keep`` was asked; the
            times are synthetic and ``keep`` was asked; or the source has too little.
    """
    from sparsegen.paths import data_dir
    from sparsegen.spec.gpu import all_gpus
    from sparsegen.tune import recording
    from sparsegen.tune.recorded_studies import of_studies
    from sparsegen.tune.storage import address_of

    limit = LIMIT if limit is None else limit
    root = root or data_dir("tuned")
    if keep:
        files.check_kept(root)
    names = {n: g.name for g in all_gpus() for n in (g.name, *g.aliases)}
    wanted = None if gpu is None else names.get(gpu, gpu)
    found_at = address_of(source)
    if isinstance(found_at, Path) and _begins_like_json(found_at):
        record = recording.read(found_at)
    else:
        record = of_studies(source, wanted)
    if wanted not in (None, record.origin.gpu):
        raise TuneError(f"{source} was measured on {record.origin.gpu}, and not on {wanted}")
    found = cover(record, limit)
    if not keep:
        return CoverPage(found, None)
    if record.origin.synthetic:
        raise TuneError(f"{source} has synthetic times: no rule is kept of them")
    if not found.ok:
        worst = max(found.losses, key=lambda one: 9.9 if one.rule is None else one.rule)
        raise TuneError(
            f"the rule is not kept: {worst.problem} loses {_share(worst.rule)} with {worst.chosen}, "
            f"the limit is {limit:.1%}; measure more, or allow more with --limit"
        )
    path = path_of(root, found.rule.gpu, found.rule.template)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, found.rule.text().encode())
    return CoverPage(found, path)


def _begins_like_json(path: Path) -> bool:
    """Whether a file is a recording rather than a SQLite file of studies.

    Raises:
        TuneError: there is no such file, or it is neither.  Nothing else may open it: an empty file would become a
            SQLite file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_SQLITE))
    except OSError as error:
        raise TuneError(f"--cover {path}: {(error.strerror or str(error)).lower()}") from error
    if not start.startswith((b"{", _SQLITE)):
        raise TuneError(f"--cover {path}: is neither a recording nor a SQLite file of studies")
    return start.startswith(b"{")


def _share(loss: float | None) -> str:
    return "an unknown share (not measured)" if loss is None else f"{loss:.1%}"
