"""What a CUDA graph capture forbids, said before anything is touched."""

from __future__ import annotations

from sparsegen.errors import InputError


def capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream.

    What is computed then is there at the graph's replays, and not before: nothing of it may be kept for other calls.
    """
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(why: str) -> None:
    """InputError, which begins with ``why``, while a CUDA graph is captured on the current stream.

    A build synchronises and a load takes memory: either would spoil the capture and fail later, without a reason.
    """
    if capturing():
        raise InputError(
            f"{why}, and a CUDA graph capture builds and loads nothing: make one such call before the capture"
        )
