"""Work counted instead of timed: a busy machine makes a function slow, and calls no other function for it.

What runs in one numpy call counts as one, whatever its size.  Such arrays are limited by memory where that matters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Work:
    """``calls``: functions called so far, of Python and of C, generators that went on included."""

    def __init__(self) -> None:
        self.calls = 0


@contextmanager
def at_most(limit: int) -> Iterator[Work]:
    """Refuse more than ``limit`` calls inside the ``with``, in this thread, as soon as they are made.

    A limit is about three times what a fresh process needs (caches that tests before filled only save calls):
    versions of Python and of numpy differ by less, and what grows faster than it should does not stay under it.
    """
    work, before = Work(), sys.getprofile()

    def look(frame: FrameType, event: str, _: object) -> None:
        work.calls += event in ("call", "c_call")
        if work.calls > limit:
            raise AssertionError(f"more than {limit:,} calls, in {frame.f_code.co_name}")

    sys.setprofile(look)
    try:
        yield work
    finally:
        sys.setprofile(before)
    assert work.calls <= limit, f"{work.calls:,} calls, more than {limit:,}"
