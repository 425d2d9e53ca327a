"""Which kernels Triton compiles ahead and which in earnest while a small model generates, as JSON: `python ahead.py`.

Without a GPU the kernels are compiled for sm_90 and a launch does nothing, so that all but what they compute is as on
one. A process of its own, as kernels defined for Triton's interpreter cannot be compiled, and other tests would have
compiled some of these.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

import wavecrest.ops.common.triton as _triton
import wavecrest.ops.common.warmup as _ahead
from wavecrest.dispatch import registry
from wavecrest.models.xlstm import xLSTMLarge, xLSTMLargeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Utils:
    """Loads nothing."""

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, *_args: Any) -> tuple[Any, ...]:
        return name, name, 0, 0, 1024


class _Driver:
    """A driver in place of a GPU's: launches come here, and no further."""

    utils = _Utils()
    launched = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        def launch(*_args: Any) -> None:
            self.launched += 1

        return launch


def stand_in() -> _Driver:
    """Put the driver in the place of a GPU's, and CPU tensors in that of a GPU's."""
    driver = _Driver()
    triton.runtime.driver.set_active(driver)
    # no machine code is launched: the last step, which starts ptxas for each kernel, makes none
    CUDABackend.make_cubin = lambda *_: b""
    _triton.emulated = "sm_90"
    _ahead.possible = lambda _device: True
    for name in registry.names():
        op = registry.get(name)
        for backend in ("triton_gemv", "triton"):
            if backend in op.backends:
                op.force(backend)
                break
    return driver


def main() -> None:
    driver = None if DEVICE == "cuda" else stand_in()
    seen: dict[str, list[str]] = {"ahead": [], "earnest": []}
    # compilers at work now and at most, and those that the main thread waited for
    running, most, waited = set[object](), [0], [0]
    # kernels that the main thread loaded
    late = [0]
    compiling = triton.compiler.compile

    def hook(**found: Any) -> None:
        seen["ahead" if found["is_manual_warmup"] else "earnest"].append(found["fn"].name.rpartition(".")[2])

    def noted(*args: Any, **options: Any) -> Any:
        job = object()
        running.add(job)
        most[0] = max(most[0], len(running))
        waited[0] += threading.current_thread() is threading.main_thread()
        try:
            return compiling(*args, **options)
        finally:
            running.remove(job)

    def loaded(*_what: Any) -> None:
        late[0] += threading.current_thread() is threading.main_thread()

    triton.knobs.runtime.jit_post_compile_hook = hook
    triton.knobs.runtime.kernel_load_start_hook.add(loaded)
    triton.compiler.compile = noted
    config = xLSTMLargeConfig(
        embedding_dim=64, num_heads=2, num_blocks=3, vocab_size=61, mode="inference", return_last_states=True,
        force_bos_token_insert=False, eos_token_id=None, weight_mode="fused",
    )  # fmt: skip
    model = xLSTMLarge(config, device=DEVICE, dtype=torch.bfloat16).eval().requires_grad_(False)
    prompt = torch.arange(48, device=DEVICE)[None]
    found: dict[str, Any] = {}

    def generated(name: str, *args: Any, **options: Any) -> None:
        for kept in seen.values():
            kept.clear()
        before = 0 if driver is None else driver.launched
        most[0] = waited[0] = late[0] = 0
        model.generate(*args, **options)
        found[name] = {kind: sorted(names) for kind, names in seen.items()}
        found[name] |= {"most": most[0], "waited": waited[0], "late": late[0]}
        found[name]["launched"] = None if driver is None else driver.launched - before

    generated("a token", prompt, 1)
    generated("a token again", prompt, 1)
    generated("tokens behind it", prompt, 20)
    generated("tokens again", prompt, 20)
    generated("of two rows", prompt.repeat(2, 1), 20)
    generated("of three rows", prompt.repeat(3, 1), 20)
    model = xLSTMLarge(config, device=DEVICE, dtype=torch.float16).eval().requires_grad_(False)
    generated("of another model", prompt, 20)
    model = xLSTMLarge(config, device=DEVICE, dtype=torch.bfloat16).eval().requires_grad_(False)
    before = 0 if driver is None else driver.launched
    found["for a server"] = {"stopped": model.compile_ahead(longest=150) or model.compile_ahead(2, longest=20)}
    found["for a server"]["launched"] = None if driver is None else driver.launched - before
    long = torch.arange(150, device=DEVICE)[None] % 61
    for length in (150, 129, 100, 65, 33, 17, 9, 7, 6, 3, 1):
        generated(f"{length} tokens", long[:, :length], 2)
    _, state = model(long[:, :5], return_last_states=True)
    for length in (140, 30, 3):
        generated(f"{length} tokens behind a state", long[:, :length], 2, state=state)
    padded = torch.ones(2, 19, dtype=torch.bool, device=DEVICE)
    padded[0, :7] = False
    generated("two rows, padded", long[:, :19].repeat(2, 1), 2, attention_mask=padded)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
