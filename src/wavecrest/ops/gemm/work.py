from __future__ import annotations

import math
from dataclasses import replace

import wavecrest.ops._rows as _rows
from wavecrest.hardware import Arch
from wavecrest.ops.gemm import space as _space
from wavecrest.ops.gemm.config import Shape
from wavecrest.ops.gemm.key import KEY_FIELDS, shape_of
from wavecrest.tuned import Config
from wavecrest.tuned.cost_model import Work
from wavecrest.ops import _work


def of_key(backend, key, config, arch):
    part = dict(zip(KEY_FIELDS, key, strict=True))
    shape = shape_of(key)
    out = 4 if part["out"] in ("float32", "int32") else 1 if part["out"].startswith(("float8", "int8")) else 2
    dtype = part["a"]
    if dtype == "float32" and not shape.ieee:
        dtype = "tf32"
    return MADE[backend](shape, dtype, out, config, arch)


def _fresh(shape, config, arch, splits=1):
    a = shape.rows * shape.K * shape.a_bits / 8
    b = shape.columns * shape.K * shape.b_bits / 8
    kept = arch.l2_mib * 2**20 * 0.7
    if a + b <= kept or config.get("GROUP_M") is None:
        return (a + b) * shape.batch
    # tiles that run at a time: groups of GROUP_M rows of tiles by as many columns
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    tiles_m, tiles_n = _rows.ceil_div(shape.rows, m), _rows.ceil_div(shape.columns, n)
    at_once = arch.compute_units
    high = min(config["GROUP_M"], tiles_m)
    wide = min(tiles_n, max(1, at_once / high))
    rounds = tiles_m * tiles_n / (high * wide)
    per = (high * m * shape.K * shape.a_bits + wide * n * shape.K * shape.b_bits) / 8
    return max(a + b, rounds * per) * shape.batch


def _tile(shape, dtype, out, config, arch, steps, programs, splits, tiles_each=1):
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    warps, stages = config["num_warps"], config["num_stages"]
    rows = max(1, shape.rows)
    double = 1 + shape.gated
    wide = arch.name in _space.WIDE_UNIT and m >= 64 and warps % 4 == 0 and not shape.ieee
    a = min(m, rows) * k * shape.a_bits / 8
    b = n * double * k * shape.b_bits / 8
    product = _work.product(m, n * double, k, shape.a_bits, warps, arch, wide, dtype)
    vector = 0.0
    if shape.b_bits < shape.a_bits:
        vector += n * k * (2.0 if shape.b_bits == 8 else 2.5) * double
    if shape.step:
        vector += 2 * m * n
    chains = config.get("CHAINS", 1)
    chain = product.chain / chains + 30 * (chains - 1)
    if wide and m == 128 and n == 256 and warps == 8 and (shape.a_bits == 16 or splits > 1) and dtype != "int8" and not config.get("PERSISTENT", 1):
        chain += k / 16 * 90
    copies = 0 if config.get("TMA") else (m * k * shape.a_bits + n * double * k * shape.b_bits) / 128
    vector += copies * 4
    kept = _work.depth(stages, wide, arch)
    return Work(
        programs=programs, warps=warps, steps=steps, loaded=a + b, fresh=_fresh(shape, config, arch),
        depth=kept, shared=_space.shared_bytes(config, shape, arch),
        registers=_space.sums_a_lane(config, shape, arch) + product.registers,
        stored=min(m, rows) * n * (4 if splits > 1 else out),
        matrix=product.flops, dtype=dtype, rate=product.rate, vector=vector,
        lds=product.lds + (a + b) * (1 if config.get("TMA") else 2), chain=chain,
        ends=min(m, rows) * n * out / 64,
    )


def tiled(shape, dtype, out, config, arch):
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    split = config["SPLIT_K"]
    columns = shape.columns // 2 if shape.gated else shape.columns
    tiles = _rows.ceil_div(max(1, shape.rows), m) * _rows.ceil_div(columns, n) * shape.batch
    steps = _rows.ceil_div(_rows.ceil_div(max(1, shape.K), k), split)
    programs = tiles * split
    if config["PERSISTENT"]:
        at_once = min(arch.compute_units, tiles)
        steps = steps * math.ceil(tiles / at_once)
        programs = at_once
    works = [_tile(shape, dtype, out, config, arch, steps, programs, split)]
    if split > 1:
        works.append(_sum(shape, columns, split, out, arch))
    return works


def _sum(shape, columns, split, out, arch):
    each = 512
    loaded = each * split * 4
    programs = max(1, shape.rows) * _rows.ceil_div(columns, each) * shape.batch
    return Work(programs=programs, warps=4, steps=1, loaded=loaded, fresh=0, depth=0, shared=0, registers=20,
                stored=each * out, vector=each * split)


def stream(shape, dtype, out, config, arch):
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tiles = _rows.ceil_div(max(1, shape.rows), m) * _rows.ceil_div(shape.columns, n)
    steps = tiles * _rows.ceil_div(max(1, shape.K), k)
    programs = max(1, min(steps, arch.compute_units * config["PROGRAMS"]))
    work = _tile(shape, dtype, out, config, arch, steps / programs, programs * shape.batch, 2)
    a = shape.rows * shape.K * shape.a_bits / 8
    b = shape.columns * shape.K * shape.b_bits / 8
    asked = steps * work.loaded
    kept = min(1.0, arch.l2_mib * 2**20 * 0.7 / (a + b))
    work = replace(work, fresh=max(a + b, asked * (1 - kept)))
    second = Work(programs=max(1, programs - 1), warps=config["num_warps"], steps=1, loaded=2 * m * n * 4, fresh=0,
                  depth=0, shared=0, registers=m * n / (config["num_warps"] * arch.wave_size), stored=m * n * out)
    return [work, second]


def multiplied(shape, dtype, out, config, arch):
    n, k, split = config["BLOCK_N"], config["BLOCK_K"], config["SPLIT_K"]
    rows, warps, stages = max(1, shape.rows), config["num_warps"], config["num_stages"]
    columns = shape.columns // 2 if shape.gated else shape.columns
    programs = _rows.ceil_div(columns, n) * split * shape.batch
    steps = _rows.ceil_div(_rows.ceil_div(shape.K, k), split)
    double = 1 + shape.gated
    b = n * k * shape.b_bits / 8 * double
    a = rows * k * shape.a_bits / 8
    lanes = warps * arch.wave_size
    taken = n * k / lanes
    if shape.b_bits == 4: taken /= 8
    vector = n * k * double * (rows + (1 if shape.b_bits == 16 else 2)) + rows * k
    work = Work(
        programs=programs, warps=warps, steps=steps, loaded=b + a, fresh=_fresh(shape, config, arch),
        depth=max(0, stages - 1), shared=int((stages - 1) * (a + b)) if arch.vendor == "nvidia" else 0,
        registers=taken * (rows + 1) * double + (b / lanes / 4 if stages == 1 else 0),
        stored=rows * n * (4 if split > 1 else out), vector=vector, lds=(a + b) * 2 if stages > 1 else 0, ends=taken * rows * 4 + 200,
    )
    works = [work]
    if split > 1:
        works.append(_sum(shape, columns, split, out, arch))
    return works


MADE = {"triton": tiled, "triton_stream_k": stream, "triton_multiply": multiplied}
