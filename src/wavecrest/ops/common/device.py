"""Device functions that several kernels share."""

from __future__ import annotations

from wavecrest.ops.common.triton import tl, triton


@triton.jit
def row_offsets(rows, stride0, stride1, stride2, size1, size2, LEADING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Element offsets of flat row indices (int64) in a tensor with one, or up to three, leading dimensions."""
    if LEADING == 1:
        offsets = rows * stride0
    else:
        # two divisions, as size1 * size2 can pass 2³¹
        outer = rows // size2
        offsets = (outer // size1) * stride0 + (outer % size1) * stride1 + (rows % size2) * stride2
    return offsets


@triton.jit
def column_offsets(cols, stride):  # type: ignore[no-untyped-def]
    """Element offsets of column indices; 64 bits, as a transposed tensor has a column stride of its row count."""
    return cols.to(tl.int64) * stride


@triton.jit
def load_row_vector(ptr, cols, stride, mask):  # type: ignore[no-untyped-def]
    """A weight or bias over the columns, as a float32 row [1, BLOCK_N]."""
    # loaded as a row, not as a vector that is made one: the compiler then lays it out as the rows it meets
    return tl.load(ptr + column_offsets(cols, stride)[None, :], mask=mask[None, :], other=0.0).to(tl.float32)


@triton.jit
def row_mask(rows, M, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of a program's rows exist, [BLOCK_M, 1]; a constant where there is one row a program."""
    if BLOCK_M == 1:
        mask = tl.full([1, 1], True, dtype=tl.int1)
    else:
        mask = (rows < M)[:, None]
    return mask


@triton.jit
def column_mask(cols, N, BLOCK_N: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which columns exist, [BLOCK_N]; a constant where blocks fill the row, so that no access is predicated."""
    if EVEN:
        mask = tl.full([BLOCK_N], True, dtype=tl.int1)
    else:
        mask = cols < N
    return mask


# e^x = 2^(x · this)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """e^x, results below 2^-126 as 0.

    `tl.exp` keeps subnormal results: 7 instructions instead of 2 on sm_90, 8 instead of 2 on gfx942 (triton 3.6).
    """
    return tl.exp2(x * LOG2_E)


@triton.jit
def unpack(x, zero, AGAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values as float32; AGAIN 1 and 2: a second and a third time, from the 16 bits they were loaded as.

    A kernel that needs a wide row several times keeps it as it was loaded, in half the registers, and unpacks it each
    time. The compiler would merge the conversions and keep the float32 values instead; an operation with a zero that
    it does not know, another one each time, stops it. 65,536 columns in one program on one H200, 2026-11-20: 0.95 of
    a copy, 0.41 without.
    """
    if AGAIN == 1:
        x = (x.to(tl.int16, bitcast=True) ^ tl.cast(zero, tl.int16)).to(x.dtype, bitcast=True)
    elif AGAIN == 2:
        x = (x.to(tl.int16, bitcast=True) | tl.cast(zero, tl.int16)).to(x.dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def magnitude(x):  # type: ignore[no-untyped-def]
    """|x| of float32 values as integers of the same order, NaN above infinity: their maximum does not lose a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


# programmatic dependent launch (sm_90 and later): a kernel may start while the one before it runs, and waits for its
# end before it reads or writes anything. docs/architecture.md says why that is enough, whatever ran before that one

# bytes of a line that the L2 cache is asked for at a time
SECTOR = tl.constexpr(32)
# one line, as Inductor (torch 2.11) writes the text into a file, where a line's end would end it
_FETCH = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
)
_LOAD_PAST_L1 = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.s32 wanted, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@wanted ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel of the stream start once every program of this one has come here."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def pdl_wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernel before this one has ended and what it has written can be read."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_l2(pointers, wanted):  # type: ignore[no-untyped-def]
    """Have the sectors of global memory that pointers lie in brought to the L2 cache, where `wanted`.

    Nothing is read by it: a kernel may do so before `pdl_wait`, also of memory that another one still writes, as
    the L2 is where writes and reads of a device meet.
    """
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [pointers.to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_past_l1(pointers, mask):  # type: ignore[no-untyped-def]
    """Four int32 words of each address, a multiple of 16 bytes, 0 where the mask is not set (NVIDIA).

    They take no lines of L1, which keeps what is read again: a GEMV of 4-bit weights takes 2 to 8 % less time so (H200,
    2026-11-29, no record). Triton's eviction policies do not say that (3.6), and `.cg` gains nothing.
    """
    return tl.inline_asm_elementwise(
        _LOAD_PAST_L1, "=r,=r,=r,=r,l,r", [pointers.to(tl.int64), mask.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


# rows that are split over several programs: each publishes what it found in its columns and collects the others'.
# A slot is one 64-bit word, so that values and readiness arrive together; 0 means not there yet.

# how a program looks at them: NVIDIA's compiler has loads go past its caches where they are volatile (and triton 3.9
# refuses to be told twice), AMD's where they say so; or by atomic instructions
VOLATILE, UNCACHED, ATOMIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def publish(slots_ptr, part, first, second):  # type: ignore[no-untyped-def]
    """Store two float32 scalars as this part's word."""
    # one NaN for all, as a word of ones is what 0 stands for
    first = tl.where(first == first, first, float("nan"))
    high = first.to(tl.int32, bitcast=True).to(tl.int64) << 32
    word = high | (second.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(slots_ptr + part, ~word, sem="relaxed")


@triton.jit
def collect(  # type: ignore[no-untyped-def]
    slots_ptr, parts, zero, PARTS: tl.constexpr, PATIENCE: tl.constexpr, LOOK: tl.constexpr
):
    """The words [PARTS] of all parts; after PATIENCE looks those that are missing are 0, for the caller to work out.

    LOOK: how words are loaded past caches that the writer does not share.
    """
    index = tl.arange(0, PARTS)
    words = _look(slots_ptr, index, parts, LOOK)
    looks = 0
    while (tl.min((words != 0).to(tl.int32), axis=0) == 0) & (looks < PATIENCE):
        # the address changes with every look as far as the compiler knows: on gfx942 it takes a load that nothing in
        # the loop writes to out of it, volatile or not (triton 3.6), and waits for nothing
        words = _look(slots_ptr + (looks & zero), index, parts, LOOK)
        looks += 1
    return words


@triton.jit
def _look(slots_ptr, index, parts, LOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    if LOOK == ATOMIC:
        found = tl.atomic_or(slots_ptr + index, tl.zeros(index.shape, tl.int64), mask=index < parts, sem="relaxed")
        words = tl.where(index < parts, found, -1)
    elif LOOK == UNCACHED:
        words = tl.load(slots_ptr + index, mask=index < parts, other=-1, cache_modifier=".cv", volatile=True)
    else:
        words = tl.load(slots_ptr + index, mask=index < parts, other=-1, volatile=True)
    return words


@triton.jit
def first_of(words):  # type: ignore[no-untyped-def]
    """The first float32 of published words."""
    return ((~words) >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def second_of(words):  # type: ignore[no-untyped-def]
    """The second float32 of published words."""
    return (~words).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def with_part(words, part, first, second):  # type: ignore[no-untyped-def]
    """Published words with those of one part put in."""
    first = tl.where(first == first, first, float("nan"))
    high = first.to(tl.int32, bitcast=True).to(tl.int64) << 32
    word = high | (second.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    return tl.where(tl.arange(0, words.shape[0]) == part, ~word, words)


@triton.jit
def remap_xcd(program, programs, XCDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of a program in the order of tiles, so that neighbours share a chiplet's L2 cache.

    Workgroups are dealt to the XCDs in turn (AMD CDNA 3 and 4): those that one XCD gets are made neighbours. A
    bijection for any number of programs.
    """
    if XCDS > 1:
        xcd = program % XCDS
        program = xcd * (programs // XCDS) + tl.minimum(xcd, programs % XCDS) + program // XCDS
    return program


@triton.jit
def swizzle_tile(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column of a tile in grouped order: GROUP_M rows of tiles are gone through together, column by column."""
    group = index // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return first + within % height, within // height
