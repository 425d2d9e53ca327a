"""Scratch: what the faults of the kernels look like on the GPU. Removed when they are mended.

    PYTHONPATH=src OUT=folder python3 -m benchmarks.probe_faults [part …]      parts: decoding gemm gemm128 conv mlstm rows mla
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

OUT = Path(os.environ.get("OUT", "."))
LIMITS = {"decoding": 240, "gemm": 50, "gemm128": 40, "conv": 45, "mlstm": 45, "rows": 45, "mla": 45}


def decoding() -> None:
    from benchmarks import decoding_sweep as sweep
    from wavecrest.dispatch.tuned import Config

    torch = sweep.torch
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    begin = time.time()
    done = sweep.run([(case, None) for case in sweep.cases()], 60, 14)
    bad = [one for one in done if one.get("wrong", 1)]
    for one in sorted(bad, key=lambda one: str(one["case"]))[:70]:
        print(sweep.line(one))
    print(f"{len(done)} done, {len(bad)} wrong, {time.time() - begin:.0f} s", flush=True)
    with (OUT / "decoding.jsonl").open("w") as file:
        for one in done:
            file.write(json.dumps(one) + "\n")
    order = [sweep.Case(**{**one["case"], "lengths": tuple(one["case"]["lengths"])}) for one in bad]
    for case in [*order[:1], *[one for one in order if one.scales == "heads"][:1]]:
        for tool in ("memcheck",):
            environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            command = ["compute-sanitizer", "--tool", tool, "--print-limit", "4", sys.executable, "-m", "benchmarks.probe_faults", "--one", json.dumps(case._asdict())]
            try:
                ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
                print(case, tool, ran.stdout[:3500], ran.stderr[-600:], flush=True)
            except Exception as error:
                print(case, tool, type(error).__name__, str(error)[-800:], flush=True)
    print(f"{time.time() - begin:.0f} s", flush=True)
    tried = [*dict.fromkeys([*order[:2], *[one for one in order if one.scales == "heads"][:2]])]
    configs = [
        Config(BLOCK_M=m, BLOCK_N=n, CHUNK=chunk, num_warps=warps, num_stages=stages)
        for m, n, chunk, warps, stages in itertools.product((64, 16), (64, 16), (128, 512), (4, 2), (1, 2, 3, 4))
    ]
    jobs = [(case, config) for case in tried for config in configs]
    random.Random(1).shuffle(jobs)
    more = sweep.run(jobs, 40, 14)
    print("configurations", flush=True)
    for one in sorted(more, key=lambda one: (-one.get("wrong", 2), str(one["case"]), str(one["config"]))):
        print(sweep.line(one)[:260])
    print(f"{len(more)} done, {sum(bool(one.get('wrong', 1)) for one in more)} wrong", flush=True)


def one() -> None:
    from benchmarks import decoding_sweep as sweep

    case = json.loads(sys.argv[2])
    print(sweep.line(sweep.judge(sweep.Case(**{**case, "lengths": tuple(case["lengths"])}))))


def gemm(promote: int | None = None) -> None:
    import torch
    from triton.backends.nvidia.compiler import CUDABackend

    if promote is not None:
        before = CUDABackend.parse_options

        def parse(self: object, opts: dict) -> object:
            options = before(self, opts)
            object.__setattr__(options, "max_num_imprecise_acc_default", promote)
            return options

        CUDABackend.parse_options = parse
    from wavecrest.dispatch.tuned import Config
    from wavecrest.ops._gemm.backend import op
    from wavecrest.ops._gemm.call import GemmCall

    E4M3 = torch.float8_e4m3fn
    os.environ["TRITON_CACHE_DIR"] = f"/tmp/triton-promote-{promote}"
    torch.manual_seed(0)

    def timed(run: object) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return sorted(times)[len(times) // 2]

    def config(m: int, n: int, k: int, warps: int, stages: int, tma: int) -> Config:
        return Config(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, SPLIT_K=1, PERSISTENT=0, TMA=tma, num_warps=warps, num_stages=stages)

    configs = [None, config(128, 256, 128, 8, 3, 1), config(128, 128, 128, 8, 4, 1), config(128, 128, 128, 4, 4, 1), config(64, 256, 128, 4, 4, 1),
               config(128, 128, 128, 8, 3, 0), config(64, 128, 128, 4, 4, 1), config(256, 128, 128, 8, 3, 1)]  # fmt: skip
    for m, n, k in ((512, 4096, 512), (512, 4096, 2048), (512, 4096, 4096), (512, 4096, 16384), (8192, 8192, 4096), (16, 4096, 4096), (64, 4096, 4096)):
        x, w = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
        scale_a, scale_b = x.abs().amax(1) / 448, w.abs().amax(1) / 448
        a, b = (x / scale_a[:, None]).to(E4M3), (w / scale_b[:, None]).to(E4M3).mT
        rows = torch.arange(0, m, max(1, m // 64), device="cuda")
        wide = a[rows].double() * scale_a[rows].double()[:, None]
        exact = wide @ (b.double() * scale_b.double())
        size = wide.abs() @ (b.double().abs() * scale_b.double())

        def shown(name: str, y: torch.Tensor, t: float) -> None:
            got = y[rows].double()
            off = (got - exact).abs()
            half = exact.abs() * 2.0**-8 if y.dtype == torch.bfloat16 else 0
            # errors over sums of magnitudes, in units of 2^-24, and over sqrt(K) of those
            beyond = (off - half).clamp(min=0) / size * 2**24
            print(f"{m:5} {n:5} {k:5} {name:70} max {float(beyond.max()):9.1f} rms {float((off / size).square().mean().sqrt() * 2**24):8.2f} {t:8.1f} us", flush=True)

        if promote is None:
            one = torch.ones((), device="cuda")
            run = lambda: torch._scaled_mm(a, b, scale_a=scale_a[:, None], scale_b=scale_b[None, :], out_dtype=torch.bfloat16)
            shown("cuBLAS vector bf16", run(), timed(run))
            run = lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32)
            got = run()
            shown("cuBLAS tensor fp32", got * scale_a[:, None] * scale_b, timed(run))
            run = lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
            shown("cuBLAS tensor fp32 fast", run() * scale_a[:, None] * scale_b, timed(run))
        # several of them only where there is much to do
        for how in configs if m > 256 and k >= 4096 else configs[:1]:
            for dtype in (torch.float32,) if k != 4096 else (torch.float32, torch.bfloat16):
                call = GemmCall(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
                made = how or op.config_of("triton", op.key(call))
                try:
                    run = lambda: op.run("triton", call, config=made)
                    got = run()
                    shown(f"{dtype} {'default ' if how is None else ''}{dict(made.kwargs)}".replace("'", "").replace("torch.", "")[:160], got, timed(run))
                except Exception as error:
                    print(made, type(error).__name__, str(error)[:200], flush=True)


def conv() -> None:
    import torch

    from wavecrest import ops
    from wavecrest.ops._conv2d.backend import op
    from wavecrest.ops._conv2d.call import Conv2dCall

    rng, torch_seed = random.Random(3), 0
    wrong = tried = 0
    decided = {}
    until = time.time() + 30
    while time.time() < until and tried < 400:
        each, outs = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 2, 4, 8))
        batch, h, w = rng.choice((1, 2, 3)), rng.randint(9, 40), rng.randint(1, 40)
        torch.manual_seed(torch_seed := torch_seed + 1)
        x = torch.randn(batch, 16 * each, h, w, device="cuda").bfloat16()
        weight = torch.randn(16 * outs, each, 5, 1, device="cuda").bfloat16() / (5 * each) ** 0.5
        layout = rng.choice(("nchw", "nhwc"))
        if layout == "nhwc":
            x, weight = x.contiguous(memory_format=torch.channels_last), weight.contiguous(memory_format=torch.channels_last)
        bias = torch.randn(16 * outs, device="cuda").bfloat16() if rng.random() < 0.5 else None
        act = rng.choice((None, None, "relu", "silu", "gelu"))
        stride, pad = rng.choice((1, 2, (2, 1))), rng.choice((0, (4, 0), 2, (1, 2)))
        if w + 2 * (pad if isinstance(pad, int) else pad[1]) < 1:
            continue
        call = Conv2dCall(x, weight, bias, stride, pad, 2, 16, act)
        wide = call._replace(x=x.double(), weight=weight.double(), bias=None if bias is None else bias.double())
        sized = wide._replace(x=wide.x.abs(), weight=wide.weight.abs(), bias=None if bias is None else wide.bias.abs(), activation=None)
        y, size = op.reference(wide), op.reference(sized)
        tried += 1
        name = op.decide(call).backend
        decided[name] = decided.get(name, 0) + 1
        for backend in ("triton", "torch", "torch_channels_last"):
            try:
                got = op.run(backend, call)
            except Exception as error:
                if "refuses" not in str(error):
                    print(backend, type(error).__name__, str(error)[:200])
                continue
            bound = size * (2.0**-7 + each * 5 * 2.0**-22) if act else y.abs() * 2.0**-8 + size * (5 * each + 4) * 2.0**-23
            beyond = (got.double() - y).abs() > bound
            if bool(beyond.any()):
                wrong += 1
                if wrong < 30:
                    at = beyond.nonzero()[:4].tolist()
                    print(backend, "seed", torch_seed, list(x.shape), list(weight.shape), layout, stride, pad, act, bias is not None, "wrong", int(beyond.sum()),
                          [(p, float(got[tuple(p)]), float(y[tuple(p)])) for p in at])  # fmt: skip
    print(f"{tried} convolutions, {wrong} wrong; chosen: {decided}")


def mlstm() -> None:
    import torch

    from wavecrest import ops

    def tensors() -> tuple:
        q, k, v = (torch.randn(1, 2, 40, 16, device="cuda") for _ in range(3))
        return q, k, v, torch.randn(1, 2, 40, device="cuda"), torch.randn(1, 2, 40, device="cuda")

    for name in ("mlstm_chunkwise", "mlstm_sequence"):
        for device in ("cuda", "cpu"):
            torch._dynamo.reset()
            try:
                given = [one.to(device) for one in tensors()]
                got = torch.compile(getattr(ops, name), fullgraph=True)(*given)
                print(name, device, "compiles", float((got - getattr(ops, name)(*given)).abs().max()))
            except Exception:
                print(name, device, traceback.format_exc()[-3500:])


def rows() -> None:
    import torch

    from wavecrest import ops

    for n in (1 << 20, 1 << 22, 1 << 24, 1 << 28, (1 << 31) + 16):
        x = torch.randn(1, n, device="cuda", dtype=torch.bfloat16) if n < 1 << 31 else torch.ones(1, n, device="cuda", dtype=torch.bfloat16)
        for name in ("softmax", "rms_norm", "quantize_int8"):
            begin = time.time()
            print(n, name, "begins", flush=True)
            try:
                getattr(ops, name)(x)
                torch.cuda.synchronize()
                print(n, name, f"{time.time() - begin:.2f} s", flush=True)
            except Exception as error:
                print(n, name, type(error).__name__, str(error)[:200], f"{time.time() - begin:.2f} s", flush=True)


def mla() -> None:
    import torch

    from wavecrest.ops._mla_decode.backend import op
    from wavecrest.ops._mla_decode.call import MlaDecodeCall

    for tokens, heads, invariant in itertools.product((1, 2, 16), (16, 128), (True, False)):
        q, rope = (torch.randn(1, tokens, heads, d, device="cuda").half() for d in (512, 64))
        cache = torch.randn(1, 1024, 576, device="cuda").half()
        call = MlaDecodeCall(q, rope, cache, torch.tensor([1000], dtype=torch.int32, device="cuda"), softmax_scale=0.1, batch_invariant=invariant)
        for backend in ("triton", "triton_hopper"):
            try:
                op.run(backend, call)
                torch.cuda.synchronize()
                print(tokens, heads, invariant, backend, "runs", op.config_of(backend, op.key(call)))
            except Exception as error:
                print(tokens, heads, invariant, backend, type(error).__name__, str(error)[:250], op.config_of(backend, op.key(call)), flush=True)


PARTS = {"decoding": decoding, "gemm": gemm, "gemm128": lambda: gemm(128), "conv": conv, "mlstm": mlstm, "rows": rows, "mla": mla}


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "--part":
        PARTS[sys.argv[2]]()
        return 0
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        one()
        return 0
    wanted = sys.argv[1:] or list(PARTS)
    OUT.mkdir(parents=True, exist_ok=True)
    # parts that need one core each run beside each other; what is timed runs alone
    begin = time.time()

    def start(part: str) -> subprocess.Popen:
        file = (OUT / f"probe_{part}.txt").open("w")
        environment = os.environ | {"TRITON_CACHE_DIR": f"/tmp/triton-{part}"}
        return subprocess.Popen([sys.executable, "-m", "benchmarks.probe_faults", "--part", part], stdout=file, stderr=subprocess.STDOUT, env=environment)

    def wait(part: str, process: subprocess.Popen) -> None:
        try:
            process.wait(timeout=LIMITS[part])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        text = (OUT / f"probe_{part}.txt").read_text()
        print(f"===== {part} (rc {process.returncode}, {time.time() - begin:.0f} s)\n{text[-30000:]}", flush=True)

    for group in (("mlstm", "rows", "mla", "conv"), ("gemm",), ("gemm128",), ("decoding",)):
        running = {part: start(part) for part in group if part in wanted}
        for part, process in running.items():
            wait(part, process)
    return 0


if __name__ == "__main__":
    sys.exit(main())
