from __future__ import annotations

from typing import NamedTuple

MMA = 0.629
WIDE_UNIT = ("sm_90", "sm_100")
REDUCE = 200
EXCHANGE = 100


def softmax(arch):
    """vector operations an element of scores: an exponential has an eighth of the lanes on NVIDIA, a quarter on AMD"""
    return 14 if arch.vendor == "nvidia" else 12


class Product(NamedTuple):
    flops: float
    rate: float
    lds: float
    chain: float
    registers: float


def product(m, n, k, bits, warps, arch, wide, dtype, a_registers=False):
    """tile product [m,k]·[k,n] by `warps` warps."""
    b = bits / 8
    if wide:
        # the matrix unit reads both from shared memory, a group of four warps 64 rows at a time
        groups = warps // 4
        # warps split rows first, then columns
        high = min(groups, m // 64)
        across = max(1, groups // high)
        reads = (m // 64) * (n / across) * k * b * across + (0 if a_registers else across * m * k * b)
        return Product(2.0 * m * n * k, 1.0, reads, 30.0, 20)
    # by warps: 16 rows each, then columns
    high = max(1, min(warps, m // 16))
    while high > 1 and (m / high) < (n / (warps / high)) * 0.99 and high > 1 and n >= 16:
        # squarer
        if m / (high / 2) <= n / (warps / (high / 2)) * 2 and high / 2 >= 1 and m/(high/2) <= 64:
            high //= 2
        else:
            break
    across = max(1, warps // high)
    least = 8
    used = min(across, max(1, n // least))
    flops = 2.0 * max(m, 16) * max(n, 8) * k * (across / used)
    reads = across * m * k * b + high * n * k * b * (across / used)
    per_warp = max(1.0, max(n, 8) / used / 8) * max(1.0, m / high / 16)
    latency = 34 if arch.vendor == "nvidia" else 32
    kk = k * bits / 256
    rate = MMA if arch.name in ("sm_90", "sm_100") else 1.0
    # what one warp issues, and what it waits for where it has few sums
    chain = max(0.0, kk * latency * (1 - min(1.0, per_warp / 6)))
    regs = (m / high * 16 + n / used * 16) * bits / 8 / 4 / 32 * 2
    return Product(flops, rate, reads, chain, regs)


def depth(stages, wide, arch):
    """steps whose loads are under way while one is worked on"""
    if arch.vendor == "nvidia" and not wide:
        return max(0, stages - 2)
    return max(0, stages - 1)
