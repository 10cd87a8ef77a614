"""One cache of Triton's for a whole session: what one test compiled, no other compiles again.

``launch.binary`` gives Triton an empty cache for each kernel, so that an artifact holds what its own build made.  Tests
build the same kernels over and over, in all of their processes and in the children of those.  Triton's key holds the
text, the options, the target and the versions; what comes out is the same files.  ``tests/conftest.py`` says where they
lie.  Where the compiler itself is the matter, a test takes the fixture ``compiles_anew``.
"""

from __future__ import annotations

import os

from triton.runtime.cache import FileCacheManager

FOLDER = "SPARSEGEN_TESTS_COMPILED"  # the variable that names the folder


class Shared(FileCacheManager):
    """Triton's own, in the session's folder whatever folder Triton was told."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        if not override and not dump:
            self.cache_dir = os.path.join(os.environ[FOLDER], key)
            self.lock_path = os.path.join(self.cache_dir, "lock")
            os.makedirs(self.cache_dir, exist_ok=True)
