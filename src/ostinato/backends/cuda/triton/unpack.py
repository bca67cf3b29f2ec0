"""What the products share inside a kernel: rounding to bfloat16, and taking packed blocks apart into dot operands.

Functions here are jit functions of tiles; planes are laid out as `packed.py` says. A dot sums over columns in
any order, so the low and the high nibbles of a tile of bytes become two operands, each multiplied with its own columns
of x, and nothing is shuffled. Scales are applied to float32 sums: no packed weight is rounded. Tiles may have a first
dimension more, over slices of the columns, one for each warp; numbers of units and blocks are then [slices, 1].

Two things are done in different ways with the same result. On NVIDIA (ASM) a few bits become a bfloat16 by writing
them into the mantissa of 128, two at a time; a first dot with -128 everywhere takes that off again. Elsewhere integers
are converted. And Triton's interpreter multiplies and rounds bfloat16 wrongly: there float32 carries the same values.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# A type's number: its last digit the bits of a value, 10 added for a minimum, 20 for blocks of 256, 30 for floats.
WEIGHT_TYPES = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8, "Q4_1": 14, "Q5_1": 15, "Q4_K": 24, "Q5_K": 25, "Q6_K": 26}
WEIGHT_TYPES |= {"MXFP4": 34}
DENSE = tl.constexpr(0)
Q8_0 = tl.constexpr(WEIGHT_TYPES["Q8_0"])
Q6_K = tl.constexpr(WEIGHT_TYPES["Q6_K"])
MXFP4 = tl.constexpr(WEIGHT_TYPES["MXFP4"])

# Two neighbouring bytes stand in the two halves of a register; a nibble of each, or'ed with 0x4300, is 128 + nibble.
_NIBBLES = """prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
"""


def _with_further_bits(bits: int, mask: str) -> str:
    """As above, and the further bits of each value, `bits` of them: a word has those of even columns in its lower half,
    of odd ones in its upper half; turned right by $13, the first stand where `mask` has ones, from bits 4 and 20 on."""
    return f"""{{
.reg .b32 a, b, t;
{_NIBBLES}shf.r.wrap.b32 t, $5, $5, $13;
lop3.b32 $0, t, {mask}, $0, 0xEA;
shf.r.wrap.b32 t, t, t, {bits};
lop3.b32 $1, t, {mask}, $1, 0xEA;
shf.r.wrap.b32 t, $9, $9, $13;
lop3.b32 $2, t, {mask}, $2, 0xEA;
shf.r.wrap.b32 t, t, t, {bits};
lop3.b32 $3, t, {mask}, $3, 0xEA;
}}"""


_FOUR = tl.constexpr(f"""{{
.reg .b32 a, b;
{_NIBBLES}}}""")
_FIVE = tl.constexpr(_with_further_bits(1, "0x00100010"))
_SIX = tl.constexpr(_with_further_bits(2, "0x00300030"))

# A signed byte is its low seven bits less its eighth: 128 + low minus 128, or minus 256 (0x4380) where it is set.
_EIGHT = tl.constexpr("""{
.reg .b32 a, b, c, d, e;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;
lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
mov.b32 e, 0xBF80BF80;
fma.rn.bf16x2 $0, c, e, a;
fma.rn.bf16x2 $1, d, e, b;
}""")


# A float of four bits has exponent and mantissa of a bfloat16 in bits 6 to 8, and is 2^126 too small then: the product
# with that is exact for all of them, the subnormal one too.
_FLOAT4 = tl.constexpr("""{
.reg .b32 a, b, s, m, z;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
mov.b32 m, 0x7E807E80;
mov.b32 z, 0x80008000;
shl.b32 s, a, 12;
and.b32 s, s, 0x80008000;
shl.b32 $0, a, 6;
lop3.b32 $0, $0, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 $0, $0, m, z;
shl.b32 s, b, 12;
and.b32 s, s, 0x80008000;
shl.b32 $1, b, 6;
lop3.b32 $1, $1, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 $1, $1, m, z;
shl.b32 s, a, 8;
and.b32 s, s, 0x80008000;
shl.b32 $2, a, 2;
lop3.b32 $2, $2, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 $2, $2, m, z;
shl.b32 s, b, 8;
and.b32 s, s, 0x80008000;
shl.b32 $3, b, 2;
lop3.b32 $3, $3, 0x01C001C0, s, 0xEA;
fma.rn.bf16x2 $3, $3, m, z;
}""")


@triton.jit
def narrowed(x):
    """x rounded to the nearest bfloat16, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def operand(x, NARROW: tl.constexpr):
    """x as one side of a dot: bfloat16 where both sides are to be NARROW, else float32."""
    if NARROW:
        return narrowed(x)
    else:
        return x.to(tl.float32)


@triton.jit
def halves_of(word):
    """The two float16 of a word, the low one first, as float32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def words_at(at):
    """Words out of a plane, without sign, so that shifts bring in zeros."""
    return tl.load(at).to(tl.uint32, bitcast=True)


@triton.jit
def byte_of(word, PLACE: tl.constexpr):
    return ((word >> (8 * PLACE)) & 0xFF).to(tl.float32)


@triton.jit
def signed_byte_of(word, PLACE: tl.constexpr):
    return (((word >> (8 * PLACE)) & 0xFF).to(tl.int32) ^ 128).to(tl.float32) - 128.0


@triton.jit
def five_or_six(low, top, high, higher, W: tl.constexpr, BITS: tl.constexpr):
    """Nibbles [n, W] with their further bits out of words [n]."""
    place = tl.arange(0, W) // 2 * (BITS - 4) + tl.arange(0, W) % 2 * 16
    MASK: tl.constexpr = (1 << (BITS - 4)) - 1
    low = low | (((tl.expand_dims(high, -1) >> place) & MASK) << 4).to(tl.int32)
    return low, top | (((tl.expand_dims(higher, -1) >> place) & MASK) << 4).to(tl.int32)


@triton.jit
def nibble_dots(
    q, high, higher, pairs, x0, x1, BITS: tl.constexpr, ZERO: tl.constexpr, SUMS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Of bytes q [n, w], with the further bits of each row in words `high` and `higher` [n]: low values times x0
    [w, rows] and high values times x1, ZERO taken off each; and, for SUMS, -128 times the sums of x0 and of x1.
    `pairs` [w] is j // 4 * 2."""
    W: tl.constexpr = q.shape[len(q.shape) - 1]
    if ASM:
        if BITS == 4:
            low, top = tl.inline_asm_elementwise(
                _FOUR, "=r,=r,=r,=r,r", [q], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )  # fmt: skip
        else:
            # How far to turn a word for the four values of a register. `pairs` is loaded, though it could be computed:
            # the compiler gives an operand of a dot its layout from the start only if it is made of loads.
            turn = pairs * (BITS - 4) - 4
            low, top = tl.inline_asm_elementwise(
                _FIVE if BITS == 5 else _SIX, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                [q, tl.expand_dims(high, -1), tl.expand_dims(higher, -1), turn], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=4,
            )  # fmt: skip
        # Made from q, though it is the same everywhere: so the compiler lays it out as it lays out q, and x once.
        offset = (((q & 15) >> 4).to(tl.uint16) | (0xC300 + ZERO)).to(tl.bfloat16, bitcast=True)
        sum0 = tl.dot(offset, x0)
        sum1 = tl.dot(offset, x1)
        return tl.dot(low, x0, sum0), tl.dot(top, x1, sum1), sum0, sum1
    else:
        low, top = (q & 15).to(tl.int32), (q >> 4).to(tl.int32)
        if BITS > 4:
            low, top = five_or_six(low, top, high, higher, W, BITS)
        low, top = narrowed((low - ZERO).to(tl.float32)), narrowed((top - ZERO).to(tl.float32))
        dot0, dot1 = tl.dot(low, x0), tl.dot(top, x1)
        if SUMS:
            every = narrowed(tl.full(q.shape, -128.0, tl.float32))
            return dot0, dot1, tl.dot(every, x0), tl.dot(every, x1)
        else:
            return dot0, dot1, dot0, dot1


@triton.jit
def float4(nibble):
    """The value of floats of four bits: a sign, two bits of exponent, one of mantissa; float32."""
    low = nibble.to(tl.int32) & 7
    twice = tl.where(low < 2, low, (2 + (low & 1)) << tl.maximum((low >> 1) - 1, 0)).to(tl.float32)
    return tl.where(nibble >= 8, -0.5 * twice, 0.5 * twice)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127); 0 of the least, which is below all numbers that weights are made of."""
    return (exponent.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def two_powers(at):
    """Two exponents that stand side by side, as the powers of two that they mean."""
    both = tl.load(at).to(tl.uint16, bitcast=True).to(tl.uint32)
    return power_of_two(both & 0xFF), power_of_two(both >> 8)


@triton.jit
def float4_dots(q, x0, x1, ASM: tl.constexpr):
    """Of bytes q [n, w], two floats of four bits each: the low ones times x0 [w, rows], the high ones times x1."""
    if ASM:
        low, top = tl.inline_asm_elementwise(
            _FLOAT4, "=&r,=&r,=&r,=&r,r", [q], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )  # fmt: skip
        return tl.dot(low, x0), tl.dot(top, x1)
    else:
        return tl.dot(narrowed(float4(q & 15)), x0), tl.dot(narrowed(float4(q >> 4)), x1)


@triton.jit
def byte_dot(q, x, ASM: tl.constexpr):
    """Signed bytes q [n, w] times x [w, rows]."""
    if ASM:
        values = tl.inline_asm_elementwise(_EIGHT, "=&r,=&r,r", [q], dtype=tl.bfloat16, is_pure=True, pack=4)
        return tl.dot(values, x)
    else:
        return tl.dot(narrowed(q.to(tl.int8, bitcast=True).to(tl.float32)), x)


@triton.jit
def rows_in_plane(plane, n, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr):
    """Where rows n begin in a plane that has for each row ENTRIES of WIDTH elements."""
    return plane + (n // RUN).to(tl.int64) * (ENTRIES * WIDTH * RUN) + n % RUN * WIDTH


@triton.jit
def places_of_rows(
    q_ptr, high_ptr, scale_ptr, block_ptr, n, K: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """Where rows n begin in each plane: quants, high, scales, blocks, [n] each."""
    quants = rows_in_plane(q_ptr, n, K // W if TYPE == Q8_0 else K // (2 * W), W, RUN)
    high, blocks = quants, quants
    if high_ptr is not None:
        high = rows_in_plane(high_ptr, n, K * (TYPE % 10 - 4) // 32, 1, RUN)
    if block_ptr is not None:
        blocks = rows_in_plane(block_ptr, n, K // 256, 1, RUN)
    # A word for each block of 32 with a minimum, one float16 where their number is odd; else a word for 64 columns.
    scales = rows_in_plane(scale_ptr, n, K // 32 if TYPE // 10 == 1 or K % 64 != 0 else K // 64, 1, RUN)
    return quants, high, scales, blocks


@triton.jit
def bytes_at(quants, u, W: tl.constexpr, RUN: tl.constexpr):
    """Unit u of rows that begin at quants [n]: [n, W]."""
    return tl.load(tl.expand_dims(quants + u * (RUN * W), -1) + tl.arange(0, W))


@triton.jit
def by_row(dot, scale):
    """A dot [n, rows] times a scale for each n."""
    return dot * tl.expand_dims(scale, -1)


@triton.jit
def scaled_unit(
    acc, quants, high, scales, pairs, u, x0, x1, K: tl.constexpr, TYPE: tl.constexpr, W: tl.constexpr,
    RUN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc plus unit u of the types with a scale for each 32 columns."""
    if TYPE == Q8_0:
        if K % 64 == 0:
            s0, s1 = halves_of(words_at(scales + u * RUN))
            acc += by_row(byte_dot(bytes_at(quants, 2 * u, W, RUN), x0, ASM), s0)
            acc += by_row(byte_dot(bytes_at(quants, 2 * u + 1, W, RUN), x1, ASM), s1)
        else:
            scale = tl.load(scales + u * RUN).to(tl.float32)
            acc += by_row(byte_dot(bytes_at(quants, u, W, RUN), x0, ASM), scale)
    elif TYPE == MXFP4:
        dot0, dot1 = float4_dots(bytes_at(quants, u, W, RUN), x0, x1, ASM)
        if W == 32:
            s0, s1 = two_powers(scales + u * RUN)
            acc += by_row(dot0, s0)
            acc += by_row(dot1, s1)
        else:
            acc += by_row(dot0 + dot1, power_of_two(tl.load(scales + u * RUN)))
    else:
        BITS: tl.constexpr = TYPE % 10
        HAS_MINIMUM: tl.constexpr = TYPE // 10 == 1
        ZERO: tl.constexpr = 0 if HAS_MINIMUM else 1 << (BITS - 1)
        q = bytes_at(quants, u, W, RUN)
        fifth, fifth_of_high = 0, 0
        if BITS == 5:
            if W == 32:
                fifth, fifth_of_high = words_at(high + 2 * u * RUN), words_at(high + (2 * u + 1) * RUN)
            else:
                fifth = words_at(high + u * RUN)
                fifth_of_high = fifth >> 8
        dot0, dot1, sum0, sum1 = nibble_dots(q, fifth, fifth_of_high, pairs, x0, x1, BITS, ZERO, HAS_MINIMUM, ASM)
        if HAS_MINIMUM:
            if W == 32:
                s0, m0 = halves_of(words_at(scales + 2 * u * RUN))
                s1, m1 = halves_of(words_at(scales + (2 * u + 1) * RUN))
                acc += by_row(dot0, s0)
                acc += by_row(dot1, s1)
                acc += by_row(sum0, m0 * -0.0078125)
                acc += by_row(sum1, m1 * -0.0078125)
            else:
                s0, m0 = halves_of(words_at(scales + u * RUN))
                acc += by_row(dot0 + dot1, s0)
                acc += by_row(sum0 + sum1, m0 * -0.0078125)
        else:
            if W == 32:
                s0, s1 = halves_of(words_at(scales + u * RUN))
                acc += by_row(dot0, s0)
                acc += by_row(dot1, s1)
            else:
                acc += by_row(dot0 + dot1, tl.load(scales + u * RUN).to(tl.float32))
    return acc


@triton.jit
def k_words(scales, b, RUN: tl.constexpr):
    """The scales of block b: its two float16 in a word, and four words of bytes: scales 0-3, 4-7, minima 0-3, 4-7."""
    halves, first = words_at(scales + 4 * b * RUN), words_at(scales + (4 * b + 1) * RUN)
    second, third = words_at(scales + (4 * b + 2) * RUN), words_at(scales + (4 * b + 3) * RUN)
    fourth = ((first >> 6) & 0x03030303) | ((second >> 4) & 0x0C0C0C0C) | ((third >> 2) & 0x30303030)
    return halves, first & 0x3F3F3F3F, second & 0x3F3F3F3F, third & 0x3F3F3F3F, fourth


@triton.jit
def k_unit(
    block, minima, quants, high, pairs, u, x0, x1, scale_word, minimum_word, PLACE: tl.constexpr, TYPE: tl.constexpr,
    W: tl.constexpr, RUN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sums of a block of 256 columns, and of its minima, plus unit u; its two scales begin at byte PLACE of a word."""
    q = bytes_at(quants, u, W, RUN)
    fifth, fifth_of_high = 0, 0
    if TYPE % 10 == 5:
        fifth, fifth_of_high = words_at(high + 2 * u * RUN), words_at(high + (2 * u + 1) * RUN)
    dot0, dot1, sum0, sum1 = nibble_dots(q, fifth, fifth_of_high, pairs, x0, x1, TYPE % 10, 0, True, ASM)
    block += by_row(dot0, byte_of(scale_word, PLACE))
    block += by_row(dot1, byte_of(scale_word, PLACE + 1))
    minima += by_row(sum0, byte_of(minimum_word, PLACE))
    minima += by_row(sum1, byte_of(minimum_word, PLACE + 1))
    return block, minima


@triton.jit
def k_sum(acc, block, minima, halves):
    """acc plus a block's sums, scaled by its two float16; `minima` were made with sums of x times -128."""
    scale, minimum = halves_of(halves)
    acc += by_row(block, scale)
    return acc + by_row(minima, minimum * 0.0078125)


@triton.jit
def q6_unit(
    block, quants, high, scales, pairs, u, x0, x1, PLACE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Sums of a block plus unit u: 32 columns with two signed scales, from byte PLACE of word u // 2 on."""
    low, top = words_at(high + 2 * u * RUN), words_at(high + (2 * u + 1) * RUN)
    dot0, dot1, _sum0, _sum1 = nibble_dots(bytes_at(quants, u, W, RUN), low, top, pairs, x0, x1, 6, 32, False, ASM)
    word = words_at(scales + u // 2 * RUN)
    block += by_row(dot0, signed_byte_of(word, PLACE))
    block += by_row(dot1, signed_byte_of(word, PLACE + 1))
    return block
