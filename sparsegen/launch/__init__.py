"""KernelSource × LaunchConfig → launched: cross-compilation, variants with stated guards, argument packing."""

from sparsegen.launch.binary import Binary, CompileError, compile_kernel
from sparsegen.launch.interpreted import Interpreted
from sparsegen.launch.kernel import Call, Kernel
from sparsegen.launch.pool import Job, Outcome, compile_many
from sparsegen.launch.signature import variants

__all__ = [
    "Binary",
    "Call",
    "CompileError",
    "Interpreted",
    "Job",
    "Kernel",
    "Outcome",
    "compile_kernel",
    "compile_many",
    "variants",
]
