"""What torch.compile takes flash_decoding's kernels to write, as JSON: `python written.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import identify_accessed_tensors
from triton.backends.compiler import GPUTarget

from wavecrest import hardware
from wavecrest.ops.flash_decoding import cases, config, launch
from wavecrest.ops.flash_decoding.key import key_of, shape_of


class _Driver:
    """A GPU that PyTorch may ask Triton about, where there is none."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    triton.runtime.driver.set_active(_Driver())
    # as where torch.compile traces a call
    launch._overlaps = lambda _arch: False
    found: dict[str, dict[str, list[str]]] = {}
    arch = hardware.ARCHS["sm_90"]
    for case, given in cases.compiled(arch).items():
        made = config.default(shape_of(key_of(given)), arch)
        for one in launch.described(given, made, arch):
            names = [parameter.name for parameter in one.kernel.params]
            values: dict[str, Any] = dict(zip(names, one.args, strict=False)) | one.constants
            values |= {name: value for name, value in one.config.kwargs.items() if name in names}
            accesses = identify_accessed_tensors(one.kernel, values, {})
            written = sorted(dep.name for dep in accesses.read_writes.writes)
            found.setdefault(case, {})[one.kernel.__name__] = written
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
