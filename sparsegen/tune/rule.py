"""``tuned/<gpu>/<template>.rule.yaml``: which configuration for a problem that was not measured, as code to read.

The code is ``if``, ``else`` and ``return`` over the features of a problem, in Python's words; it is parsed and walked, never
run as Python.  ``sparsegen tune --cover`` writes it (``cover``), ``store.lookup`` asks it.
"""

from __future__ import annotations

import ast
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsegen.codegen.knobs import LaunchConfig
from sparsegen.errors import ArtifactError
from sparsegen.tune.features import MEANING, Feature

if TYPE_CHECKING:
    from sparsegen.tune.store import Measured

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.Eq: operator.eq,
}
_HEADER = """\
# Which configuration for a problem that was not measured: few configurations that lose little anywhere.
# Written by sparsegen tune --cover from measured trials; not by hand (docs/tuning.md).
"""


@dataclass(frozen=True)
class Rule:
    """A rule and what it came from.

    ``configurations`` by the names that ``code`` returns; ``measured``: values of dtype, head_dim and value_dim outside of
    which nothing is known.  ``losses``: what ``cover`` found, shares of the best time, for people.
    """

    gpu: str
    template: str
    template_digest: str
    code: str
    configurations: Mapping[str, LaunchConfig]
    measured: Mapping[str, Sequence[str | int]]
    losses: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str

    def __post_init__(self) -> None:
        for wrong in _mistakes(_parsed(self.code), set(self.configurations)):
            raise ValueError(wrong)

    def choose(self, features: Mapping[str, Feature]) -> str:
        """The name of the configuration for a problem with these features."""
        return _walk(_parsed(self.code), features)

    def outside(self, problem: Measured) -> str | None:
        """Why the rule knows nothing of a problem, or None."""
        for name, values in self.measured.items():
            if getattr(problem, name) not in values:
                return f"{name} {getattr(problem, name)} is none of {list(values)}"
        return None

    def text(self) -> str:
        """The file."""
        import yaml

        def dump(name: str, value: Any) -> str:
            plain = {name: dict(value) if isinstance(value, Mapping) else value}
            flow = None if isinstance(value, Mapping) else False
            return yaml.safe_dump(plain, sort_keys=False, width=1000, default_flow_style=flow)

        parts = [dump(n, getattr(self, n)) for n in ("gpu", "template", "template_digest", "date")]
        parts.append(dump("versions", self.versions))
        parts.append(dump("measured", {n: list(v) for n, v in self.measured.items()}))
        parts.append(dump("losses", self.losses))
        parts.append(
            dump("configurations", {n: c.as_dict() for n, c in self.configurations.items()})
        )
        asked = _names(_parsed(self.code))
        parts += [f"# {name}: {MEANING[name]}\n" for name in MEANING if name in asked]
        return "".join([_HEADER, *parts, "rule: |\n", textwrap.indent(self.code, "  "), "\n"])


def path_of(root: Path, gpu: str, template: str) -> Path:
    """Where the rule of a GPU and a template is kept."""
    return root / gpu / f"{template}.rule.yaml"


def read(path: Path) -> Rule | None:
    """The rule in a file, None where there is no file.

    Raises:
        ArtifactError: the file is damaged.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        values = yaml.safe_load(text)
        configurations = {
            str(name): LaunchConfig.of(config) for name, config in values["configurations"].items()
        }
        return Rule(
            **{k: v for k, v in values.items() if k not in ("configurations", "rule")},
            configurations=configurations,
            code=values["rule"].rstrip("\n"),
        )
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}); it is written by sparsegen tune --cover only: restore or delete it"
        ) from error


def _parsed(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except SyntaxError as error:
        raise ValueError(f"rule: line {error.lineno}: {error.msg}") from error


def _walk(body: Sequence[ast.stmt], features: Mapping[str, Feature]) -> str:
    for statement in body:
        if isinstance(statement, ast.Return):
            assert isinstance(statement.value, ast.Name)
            return statement.value.id
        assert isinstance(statement, ast.If)
        return _walk(
            statement.body if _holds(statement.test, features) else statement.orelse, features
        )
    raise AssertionError("checked when the rule was made")


def _holds(test: ast.expr, features: Mapping[str, Feature]) -> bool:
    if isinstance(test, ast.Name):
        return bool(features[test.id])
    assert isinstance(test, ast.Compare) and isinstance(test.left, ast.Name)
    assert isinstance(test.comparators[0], ast.Constant)
    return _COMPARE[type(test.ops[0])](features[test.left.id], test.comparators[0].value)


def _mistakes(body: Sequence[ast.stmt], configurations: set[str]) -> list[str]:
    """What is no rule: each block is one return, or one if with an else."""
    if len(body) != 1:
        return ["rule: each block has one return, or one if with an else"]
    (statement,) = body
    line = f"rule: line {statement.lineno}"
    if isinstance(statement, ast.Return):
        known = isinstance(statement.value, ast.Name) and statement.value.id in configurations
        return [] if known else [f"{line}: return one of {', '.join(sorted(configurations))}"]
    if not isinstance(statement, ast.If):
        return [f"{line}: only if, else and return are allowed"]
    wrong = (
        []
        if _is_test(statement.test)
        else [f"{line}: the test is no feature against a number, and no pattern against a name"]
    )
    both = statement.body, statement.orelse
    return [*wrong, *(w for block in both for w in _mistakes(block, configurations))]


def _is_test(test: ast.expr) -> bool:
    if isinstance(test, ast.Name):
        return test.id in MEANING
    return (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and type(test.ops[0]) in _COMPARE
        and isinstance(test.left, ast.Name)
        and test.left.id in MEANING
        and isinstance(test.comparators[0], ast.Constant)
        and isinstance(
            test.comparators[0].value, str if test.left.id == "pattern" else (int, float)
        )
        and (test.left.id != "pattern" or isinstance(test.ops[0], ast.Eq))
    )


def _names(body: Sequence[ast.stmt]) -> set[str]:
    tests = [n.test for s in body for n in ast.walk(s) if isinstance(n, ast.If)]
    return {n.id for test in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
