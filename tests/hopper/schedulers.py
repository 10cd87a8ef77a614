"""Partitions of a program in turns: one runs at a time, and chance says which goes on at every barrier operation.

What happens by itself (a box that lands) is an event; chance says when.  Where nobody can go on, that is a deadlock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class Deadlock(AssertionError):
    """Every partition that has not ended waits, and nothing will come."""


class _Stopped(BaseException):
    """Raised in a partition when another one has failed."""


@dataclass
class _Task:
    name: str
    work: Callable[[], None]
    priority: float
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    until: Callable[[], bool] | None = None
    waits_for: str = ""
    ended: bool = False

    def ready(self) -> bool:
        return not self.ended and (self.until is None or self.until())


@dataclass
class _Event:
    name: str
    happen: Callable[[], None]
    priority: float


class Scheduler:
    """Runs the partitions of one program at a time.

    Half of the programs take every step by lot.  In the others the one with the highest priority goes on, and
    priorities change seldom: then one partition, or the boxes, may fall far behind.
    """

    CHANGE = 0.04  # probability of new priorities at a step

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._tasks: list[_Task] = []
        self._events: list[_Event] = []
        self._current: _Task | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._by_lot = True

    @property
    def current(self) -> str:
        """The partition that runs."""
        return self._current.name if self._current else "the program"

    def run(self, partitions: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run to the end.  Raises what a partition raises; ``Deadlock``; AssertionError for events left over."""
        self._by_lot = self._random.random() < 0.5
        self._tasks = [_Task(name, work, self._random.random()) for name, work in partitions]
        self._events, self._error = [], None
        self._over.clear()
        threads = [threading.Thread(target=self._live, args=(task,)) for task in self._tasks]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.wait()
        for task in self._tasks:
            task.turn.release()
        for thread in threads:
            thread.join()
        self._current = None
        if self._error is not None:
            raise self._error
        assert not self._events, f"nobody waited for {self._events[0].name}"

    def later(self, name: str, happen: Callable[[], None]) -> None:
        """Let something happen at any later time."""
        self._events.append(_Event(name, happen, self._random.random()))

    def step(self) -> None:
        """The running partition lets others go on, or not."""
        if self._current is not None:
            self._pass_on()

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """The running partition goes on when ``until`` holds."""
        assert self._current is not None, "only a partition can wait"
        task = self._current
        task.until, task.waits_for = until, what
        self._pass_on()
        task.until = None

    def _live(self, task: _Task) -> None:
        task.turn.acquire()
        try:
            if not self._over.is_set():
                task.work()
        except _Stopped:
            return
        except BaseException as error:
            self._error = error
            self._over.set()
            return
        task.ended = True
        if not self._over.is_set():
            self._pass_on()

    def _pass_on(self) -> None:
        """Choose who goes on; returns when that is the partition that called."""
        before = self._current
        try:
            chosen = self._choose()
        except BaseException as error:
            self._error, chosen = error, None
        if chosen is None:
            self._over.set()
            if before is not None and not before.ended:
                raise _Stopped
            return
        if chosen is before:
            return
        self._current = chosen
        chosen.turn.release()
        if before is not None and not before.ended:
            before.turn.acquire()
            if self._over.is_set():
                raise _Stopped

    def _choose(self) -> _Task | None:
        """The partition that goes on, after some events; None when all have ended."""
        while not all(task.ended for task in self._tasks):
            able: list[Any] = [task for task in self._tasks if task.ready()] + self._events
            if not able:
                waiting = [f"{t.name} waits for {t.waits_for}" for t in self._tasks if not t.ended]
                raise Deadlock("; ".join(waiting))
            if self._random.random() < self.CHANGE:
                for one in (*self._tasks, *self._events):
                    one.priority = self._random.random()
            one = self._random.choice(able) if self._by_lot else max(able, key=lambda x: x.priority)
            if isinstance(one, _Task):
                return one
            self._events.remove(one)
            one.happen()
        return None
