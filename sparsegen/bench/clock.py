"""A clock that leaves the host's time out, and what else is asked of the GPU about one launch."""

from __future__ import annotations

import time
from typing import Any, Protocol

from sparsegen.bench import interleaved
from sparsegen.bench.interleaved import Launch
from sparsegen.tune.measure import Clock

BATCH = 50  # launches queued behind one pause; a queue takes about a thousand entries
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.5
CYCLES_A_SECOND = 2.0e9  # at least what a GPU does; a longer pause does no harm


class Device(Protocol):
    """What measures: a GPU, or a stand-in in tests."""

    @property
    def name(self) -> str:
        """Of torch's device: "cuda"."""
        ...

    @property
    def clock(self) -> Clock:
        """Times launches of contenders."""
        ...

    @property
    def bare(self) -> Clock:
        """The same, nothing flushed: for the roof."""
        ...

    def exposed(self, launch: Launch) -> bool:
        """Whether the host cannot keep ahead of the GPU with this launch, so that its time is in every measurement."""
        ...

    def sustained_us(self, launch: Launch) -> float:
        """Mean microseconds back to back, nothing flushed."""
        ...

    def host_us(self, launch: Launch, us: float) -> float:
        """Host microseconds of a call, which takes the GPU ``us``."""
        ...

    def peak_bytes(self, launch: Launch) -> int:
        """Most bytes that torch held during a call, beyond what it held before."""
        ...

    def wait(self) -> None:
        """Until all launches are done."""
        ...

    def release(self) -> None:
        """Give memory that nothing holds back to the GPU."""
        ...


class QueuedClock:
    """Times launches on the current stream with events, the L2 cache flushed before each.

    As ``tune.measure.CudaClock``, but launches wait in the queue behind a pause on the GPU, and a batch during which
    the pause ended is timed again behind a longer one.  So a short kernel's time is the GPU's, however slow the call
    around it is; ``late`` says that the longest pause was not enough for the last batch.
    """

    def __init__(self, l2_bytes: int) -> None:
        import torch

        self._torch = torch
        self._flush = torch.empty(max(2 * l2_bytes, 1), dtype=torch.int8, device="cuda")
        self.late = False

    def times_us(self, launch: Launch, warm_up_ms: float, measured_ms: float) -> list[float]:
        """See ``tune.measure.Clock``."""
        one_ms = self._batch(launch, 2)[-1]
        self._many(launch, _times(warm_up_ms, one_ms))
        return [1e3 * ms for ms in self._many(launch, _times(measured_ms, one_ms))]

    def _many(self, launch: Launch, times: int) -> list[float]:
        found: list[float] = []
        while len(found) < times:
            found += self._batch(launch, min(BATCH, times - len(found)))
        return found

    def _batch(self, launch: Launch, times: int) -> list[float]:
        pause_s = FIRST_PAUSE_S
        while True:
            found, early, host_s = self._once(launch, times, pause_s)
            self.late = not early
            if early or pause_s >= LONGEST_PAUSE_S:
                return found
            pause_s = min(max(2 * pause_s, 1.5 * host_s), LONGEST_PAUSE_S)

    def _once(self, launch: Launch, times: int, pause_s: float) -> tuple[list[float], bool, float]:
        """Milliseconds of each launch, whether all were queued before the pause ended, and the seconds that took."""
        cuda = self._torch.cuda
        event = lambda: cuda.Event(enable_timing=True)
        pairs, gate = [(event(), event()) for _ in range(times)], event()
        cuda.synchronize()
        begin = time.perf_counter()
        cuda._sleep(int(pause_s * CYCLES_A_SECOND))
        gate.record()
        for start, end in pairs:
            self._flush.zero_()
            start.record()
            launch()
            end.record()
        early, host_s = not gate.query(), time.perf_counter() - begin
        cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs], early, host_s


class CudaDevice:
    """The GPU here; see ``Device``."""

    name = "cuda"

    def __init__(self, l2_bytes: int) -> None:
        self.clock, self.bare = QueuedClock(l2_bytes), QueuedClock(0)

    def exposed(self, launch: Launch) -> bool:
        """See ``Device``."""
        self.clock.times_us(launch, 0.0, 0.0)
        return self.clock.late

    def sustained_us(self, launch: Launch) -> float:
        """See ``Device``."""
        return interleaved.back_to_back(launch)

    def host_us(self, launch: Launch, us: float) -> float:
        """See ``Device``."""
        calls = int(min(max(100e3 / max(us, 1.0), 10), 200))
        return interleaved.host_us(launch, calls, times=5)

    def peak_bytes(self, launch: Launch) -> int:
        """See ``Device``."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        launch()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def wait(self) -> None:
        """See ``Device``."""
        import torch

        torch.cuda.synchronize()

    def release(self) -> None:
        """See ``Device``."""
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


def _times(wanted_ms: float, one_ms: float) -> int:
    """Launches that fill ``wanted_ms``: from 3 to 1000."""
    return min(max(round(wanted_ms / max(one_ms, 1e-3)), 3), 1000)


def nbytes(*tensors: Any) -> int:
    """Bytes of tensors; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
