"""The child process of ``launch.pool``: jobs on stdin, one line of JSON for each on stdout."""

from __future__ import annotations

import json
import os
import pickle
import sys

from sparsegen.errors import SparsegenError
from sparsegen.launch.binary import compile_kernel, record
from sparsegen.launch.pool import Job


def main() -> None:
    """Answer on the stdout we were born with; what the compiler prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job: Job = pickle.loads(bytes.fromhex(line))  # from our own parent, on a private pipe
        try:
            binary = compile_kernel(job.source, job.config, job.variant, job.gpu, job.directory)
            answer: dict[str, object] = {"binary": record(binary)}
        except SparsegenError as error:
            answer = {"error": str(error)}
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except BrokenPipeError:  # our parent was ended: nobody asks any more
            break
    # Nothing is left to close, and at an orderly end Triton 3.9 prints pages about objects that its bindings keep
    # after a Gluon kernel was compiled.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
