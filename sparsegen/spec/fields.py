"""Field types of the language, and how a wrong value is put into words.

Every type says in one phrase what it allows.  A mistake reads "must be <phrase>, got <value>", whichever rule of
the type was broken, so that one reading is enough to mend it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from sparsegen.errors import Mistake, SpecError

LIMIT = (
    2**31
)  # positions, lengths and sizes: |position| <= 2^31 is what every 64-bit proof starts from
SEED_LIMIT = 2**24 - 1  # a seed is shifted left by 40 bits in a 64-bit word
MAX_ENTRIES = 4096  # entries of a list in a pattern file

T = TypeVar("T")


def wrong(allowed: str) -> PydanticCustomError:
    """The error of a value that is not ``allowed`` ("an integer from 1 to 8")."""
    return PydanticCustomError("wrong_value", "must be {allowed}", {"allowed": allowed})


def rule(message: str) -> PydanticCustomError:
    """The error of a rule between fields; ``message`` is the whole sentence."""
    return PydanticCustomError("broken_rule", "{message}", {"message": message})


def _checked(
    kind: Any,
    allowed: str,
    check: Callable[[Any], Any],
    schema: dict[str, Any],
    *,
    optional: bool = False,
) -> Any:
    """A field type: ``check`` returns the value to keep, or ``None`` if it is not allowed.

    ``optional``: in Python the field may be None as well, which says that it is not set; files leave it out instead.
    """

    def validate(value: Any) -> Any:
        if optional and value is None:
            return None
        kept = check(value)
        if kept is None:
            raise wrong(allowed)
        return kept

    words = Field(description=allowed[0].upper() + allowed[1:] + ".")
    whole = kind | None if optional else kind
    return Annotated[whole, BeforeValidator(validate), WithJsonSchema(schema), words]


def integer(low: int, high: int = LIMIT) -> Any:
    """An integer in [low, high]; neither a boolean nor a float that happens to be whole."""

    def check(value: Any) -> Any:
        return value if type(value) is int and low <= value <= high else None

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return _checked(int, f"an integer from {low} to {high}", check, schema)


def reach() -> Any:
    """A distance: an integer >= 0, or ``inf`` (no limit); ``inf`` is kept as the word."""
    return integer_or("inf")


def integer_or(other: str, low: int = 0, high: int = LIMIT) -> Any:
    """An integer in [low, high], or one word; infinity counts as the word ``inf``."""

    def check(value: Any) -> Any:
        if type(value) is float and value == math.inf:
            value = "inf"
        if type(value) is int:
            return value if low <= value <= high else None
        return value if isinstance(value, str) and value == other else None

    number = {"type": "integer", "minimum": low, "maximum": high}
    schema = {"anyOf": [number, {"const": other}]}
    return _checked(Any, f"an integer from {low} to {high} or {other}", check, schema)


def number(*, positive: bool = False, optional: bool = False) -> Any:
    """A finite number (an integer is one too), kept as a float; see ``_checked`` for ``optional``."""

    def check(value: Any) -> Any:
        if type(value) not in (int, float) or not abs(value) <= 1e30 or (positive and value <= 0):
            return None
        return float(value)

    schema = {"type": "number", **({"exclusiveMinimum": 0} if positive else {})}
    allowed = "a finite number" + " above 0" * positive
    return _checked(float, allowed, check, schema, optional=optional)


def truth() -> Any:
    """true or false, and nothing that merely looks like it."""
    return _checked(
        bool, "true or false", lambda v: v if type(v) is bool else None, {"type": "boolean"}
    )


def word(*words: str) -> Any:
    """One of a few words."""
    schema: dict[str, Any] = {"enum": list(words)} if len(words) > 1 else {"const": words[0]}
    check = lambda v: v if isinstance(v, str) and v in words else None
    return _checked(str, " or ".join(words), check, schema)


def integers(low: int, high: int = LIMIT, *, least: int = 1, most: int = MAX_ENTRIES) -> Any:
    """A list of integers in [low, high], kept as a tuple."""

    def check(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            return None
        return tuple(value) if all(type(v) is int and low <= v <= high for v in value) else None

    count = f"{least}" if least == most else f"{least} to {most}"
    item = {"type": "integer", "minimum": low, "maximum": high}
    schema = {"type": "array", "items": item, "minItems": least, "maxItems": most}
    return _checked(
        tuple[int, ...], f"a list of {count} integers from {low} to {high}", check, schema
    )


def text(longest: int) -> Any:
    """A string of at most ``longest`` characters."""
    check = lambda v: v if isinstance(v, str) and len(v) <= longest else None
    schema = {"type": "string", "maxLength": longest}
    return _checked(str, f"a text of at most {longest} characters", check, schema)


def show(value: Any) -> str:
    """A value as a person would write it in the file, cut to 60 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(show(v) for v in value[:8]) + (", …" if len(value) > 8 else "")
        return _cut(f"[{inner}]")
    if isinstance(value, dict):
        return _cut("{" + ", ".join(f"{show_key(k)}: …" for k in list(value)[:8]) + "}")
    return _cut(repr(value))


def show_key(key: Any) -> str:
    """A mapping's key in words; strings without their quotes."""
    return _cut(key) if isinstance(key, str) else show(key)


def _cut(words: str) -> str:
    return words if len(words) <= 60 else words[:57] + "…" + words[-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'window'?)`` or nothing."""
    near = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def as_mistakes(error: ValidationError, allowed: dict[str, str], file: str) -> list[Mistake]:
    """pydantic's errors as Mistakes whose paths start at the model's own fields; no positions yet."""
    mistakes = []
    for item in error.errors(include_url=False):
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in item["loc"]).lstrip(".")
        if item["type"] == "wrong_value":
            message = f"{item['msg']}, got {show(item['input'])}"
        elif item["type"] == "missing":
            message = "is missing; it must be " + allowed.get(path, "given")
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            near = did_you_mean(path, allowed)
            message = f"is not a setting here{near}; allowed: {', '.join(allowed) or 'none'}"
        else:
            message = item["msg"]
        mistakes.append(Mistake(file, 0, 0, path, message))
    return mistakes


def allowed_words(cls: Any) -> dict[str, str]:
    """Field name → the phrase of what it allows, for a model or a pydantic dataclass."""
    fields = cls.model_fields if hasattr(cls, "model_fields") else cls.__pydantic_fields__
    return {n: _phrase(f.description) for n, f in fields.items() if not n.startswith("_")}


def _phrase(description: str | None) -> str:
    words = (description or "given").rstrip(".")
    return words[0].lower() + words[1:]


def speaks(cls: type[T]) -> type[T]:
    """Class decorator: a wrong argument of ``cls(...)`` is a SpecError that lists all wrong arguments."""
    plain = cls.__init__

    @wraps(plain)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        try:
            plain(self, *args, **fields)
        except ValidationError as error:
            words = allowed_words(cls)
            raise SpecError(as_mistakes(error, words, f"<{cls.__name__}>")) from None

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
