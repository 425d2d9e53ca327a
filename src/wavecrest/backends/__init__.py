"""Implementations of ops other than wavecrest's kernels: PyTorch's operations, other libraries, users' kernels."""

# first the ops, whose import ends by loading users' kernels: these need the modules of this package whole
import wavecrest.ops  # noqa: F401
