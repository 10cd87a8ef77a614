"""What jobs of the Ray tests do on a node besides a replay: they import this module there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from sparsegen.errors import UnsupportedError
from sparsegen.tune.job import Done, Job, run


def refuses(job: Job) -> Done:
    """A job that cannot be done: trying again would not help."""
    raise UnsupportedError(f"{job.pattern.name} cannot be done\nhere")


def dies(job: Job) -> Done:
    """The worker is gone in the middle of the job."""
    os.kill(os.getpid(), signal.SIGKILL)
    return run(job)


def says_who_and_waits(job: Job) -> Done:
    """Leaves its process id in the folder that stands for the storage, and takes long."""
    Path(str(job.storage), str(os.getpid())).touch()
    time.sleep(300)
    return run(job)
