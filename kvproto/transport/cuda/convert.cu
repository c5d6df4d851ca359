/* Conversions on a GPU (spec/v1/conversion.md): lanes of BF16 to F8E4M3, to the scales of their blocks, and back; and the
 * sums of the bytes that they give, which a source takes of its own memory.
 *
 * A group of 2^shift threads of a warp share a block of a lane. A thread has up to STEP elements of a block at once, in
 * WORDS aligned words, so far apart that threads of a group read and write without gaps; and those of DEPTH blocks in flight
 * before it converts any. Macros: THREADS, RESIDENT, DEPTH, STEP, WORDS; LOAD and STORE, the types of a word of elements of
 * two bytes and of one; SCALE, that of a scale. Arithmetic is that of integers and of float32 that is rounded to nearest
 * even, without subnormal numbers flushed: no fast math.
 */
#include "verify.h"

enum { NARROW = 1, SCALES = 2, WIDE = 3 };

/* Elements and scales whose places have no alignment. */
typedef struct { unsigned char of[2]; } Two;
typedef struct { unsigned char of[4]; } Four;

/* Elements of two bytes and of one, also as pairs and as fours; what a step does not fill is zero. */
typedef union { LOAD words[WORDS]; unsigned short of[STEP]; u32 pairs[(STEP + 1) / 2]; } Wide;
typedef union { STORE words[WORDS]; unsigned char of[STEP]; unsigned short pairs[(STEP + 1) / 2]; u32 fours[(STEP + 3) / 4]; } Narrow;
typedef union { SCALE word; float of; } Scale;

typedef struct {
    u64 source, source_item, source_row, source_lane; /* of one operation: address, strides in bytes */
    u64 sink, sink_item, sink_row, sink_lane;
    u64 scale, scale_item, scale_row, scale_lane; /* WIDE: of scales read at the source; NARROW: written at the sink, or 0 */
    u64 places;                                   /* uint4[n_rows], written by expand: items and rows of both sides */
    u64 globals, total, seed, lo;                 /* of sums, as of a Sum in kernel.cu */
    u32 n_rows, lanes, blocks, length;            /* length: elements of a block; fewer than 2^32 blocks in all */
    u32 made, stated;                             /* stated: the bits of a scale, or 0 */
    u32 first, shift;                             /* first: chunks of the operations before; shift: of threads of a group */
} Convert;

__device__ static u32 to_e4m3(float y)
{
    const u32 bits = __float_as_uint(y), size = bits & 0x7FFFFFFF;
    u32 code;
    if (size > 0x7F800000)
        return 0x7F;
    if (size < 0x3C800000) /* below 2^-6, in steps of 2^-9, as floats from 2^14 on are */
        code = __float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000;
    else
        code = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3);
    return (bits >> 24 & 0x80) | (code < 0x7E ? code : 0x7E);
}

/* Two codes, the first in the lower byte. */
__device__ static __forceinline__ u32 to_pair(float low, float high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return to_e4m3(low) | to_e4m3(high) << 8;
#endif
}

/* x / scale, rounded to the nearest, by the reciprocal of the scale and one step of Newton's method: exact for all BF16 and
 * all scales whose quotient and remainder neither overflow nor underflow; a zero keeps its sign. */
__device__ static __forceinline__ float quotient(float x, float scale, float inverse)
{
    const float near = __fmul_rn(x, inverse);
    return __fmaf_rn(-__fmaf_rn(near, scale, -x), inverse, near);
}

/* Whether that holds for elements no greater than `most`, so far as FP8 can tell: not with infinite ones or NaN. */
__device__ static __forceinline__ int divides(u32 most, float scale, float inverse)
{
    const u32 exponent = __float_as_uint(scale) >> 23; /* of 2^-90 to 2^90 */
    return exponent - 37 <= 180 && __fmul_rn(__uint_as_float(most << 16), inverse) < 1e30f;
}

__device__ static u32 to_bf16(u32 code, float scale)
{
    const float size = code & 0x78 ? __uint_as_float(((code & 0x7F) << 20) + (120 << 23)) : (code & 7) * 0.001953125f;
    const u32 bits = __float_as_uint(__fmul_rn(code & 0x80 ? -size : size, scale));
    if ((code & 0x7F) == 0x7F || (bits & 0x7FFFFFFF) > 0x7F800000)
        return 0x7FC0;
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}

/* Two elements of BF16 by two codes that are numbers and a finite scale. */
__device__ static __forceinline__ u32 to_wide_pair(unsigned short pair, float scale)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    float low, high;
    u32 halves, made;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(halves));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(__fmul_rn(high, scale)), "f"(__fmul_rn(low, scale)));
    return made;
#else
    return to_bf16(pair & 0xFF, scale) | to_bf16(pair >> 8, scale) << 16;
#endif
}

#define PIECE (STEP / WORDS) /* elements of a word */
#define EACH_WORD(at, e, group, length) \
    _Pragma("unroll") for (u32 w = 0, at = (e); w < WORDS; w++, at += PIECE * (group)) if (at < (length))

__device__ static __forceinline__ Wide read_wide(const char *block, u32 e, u32 group, u32 length)
{
    Wide read = {0};
    EACH_WORD(at, e, group, length)
        read.words[w] = *(const LOAD *)(block + 2 * at);
    return read;
}

__device__ static __forceinline__ Narrow read_narrow(const char *block, u32 e, u32 group, u32 length)
{
    Narrow read = {0};
    EACH_WORD(at, e, group, length)
        read.words[w] = *(const STORE *)(block + at);
    return read;
}

/* The size of the greatest element, infinite ones and NaN among them. */
__device__ static __forceinline__ u32 greatest(Wide word)
{
    u32 pair = 0;
#pragma unroll
    for (u32 i = 0; i < (STEP + 1) / 2; i++)
        pair = __vmaxu2(pair, word.pairs[i] & 0x7FFF7FFF);
    return (pair & 0xFFFF) > pair >> 16 ? pair & 0xFFFF : pair >> 16;
}

/* Whether all codes are numbers. */
__device__ static __forceinline__ int are_numbers(Narrow word)
{
    u32 seen = 0;
#pragma unroll
    for (u32 i = 0; i < (STEP + 3) / 4; i++)
        seen |= (word.fours[i] & 0x7F7F7F7F) + 0x01010101;
    return !(seen & 0x80808080);
}

__device__ static __forceinline__ u32 most_of(Wide word, u32 most)
{
    const u32 all = greatest(word);
    if (all < 0x7F80)
        return all > most ? all : most;
#pragma unroll
    for (u32 i = 0; i < STEP; i++) {
        const u32 size = word.of[i] & 0x7FFF;
        if (size < 0x7F80 && size > most)
            most = size;
    }
    return most;
}

__device__ static __forceinline__ Narrow narrowed(Wide wide, float scale, float inverse)
{
    const int quick = divides(greatest(wide), scale, inverse);
    Narrow made = {0};
#pragma unroll
    for (u32 i = 0; i < (STEP + 1) / 2; i++) {
        const float low = __uint_as_float(wide.pairs[i] << 16), high = __uint_as_float(wide.pairs[i] & 0xFFFF0000);
        made.pairs[i] = quick ? to_pair(quotient(low, scale, inverse), quotient(high, scale, inverse))
                              : to_pair(__fdiv_rn(low, scale), __fdiv_rn(high, scale));
    }
    return made;
}

__device__ static __forceinline__ Wide widened(Narrow narrow, float scale)
{
    const int quick = are_numbers(narrow) && (__float_as_uint(scale) & 0x7FFFFFFF) < 0x7F800000;
    Wide made;
#pragma unroll
    for (u32 i = 0; i < (STEP + 1) / 2; i++)
        made.pairs[i] = quick ? to_wide_pair(narrow.pairs[i], scale)
                              : to_bf16(narrow.pairs[i] & 0xFF, scale) | to_bf16(narrow.pairs[i] >> 8, scale) << 16;
    return made;
}

/* The scale of a block by its greatest finite element, the same for all threads of a group. */
__device__ static __forceinline__ float scale_of(const char *block, u32 length, u32 own, u32 group, Wide first)
{
    u32 most = most_of(first, 0);
    for (u32 e = own + group * STEP; e < length; e += group * STEP)
        most = most_of(read_wide(block, e, group, length), most);
#ifdef __CUDA_ARCH__
    for (u32 apart = group / 2; apart; apart /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, apart));
#endif
    const float least = __uint_as_float(27 << 23); /* 2^-100 */
    const float amax = __uint_as_float(most << 16);
    return __fdiv_rn(amax > least ? amax : least, 448.0f);
}

__device__ static __forceinline__ u64 weighed(const unsigned char *bytes, u32 n, u64 at)
{
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < n; i++)
        sum += bytes[i] * odd(at + i);
    return sum;
}

/* Converts a block, or if `sums` returns the sum of what that gives, of bytes at `to` on the lane axis. */
__device__ static __forceinline__ u64 convert_block(const Convert c, const char *from, u64 to, u32 own, Wide wide, Narrow narrow, float scale, int sums)
{
    const float inverse = __frcp_rn(scale);
    const u32 group = 1 << c.shift;
    u64 sum = 0;
    for (u32 e = own; e < c.length; e += STEP * group)
        if (c.made == NARROW) {
            narrow = narrowed(e == own ? wide : read_wide(from, e, group, c.length), scale, inverse);
            EACH_WORD(at, e, group, c.length)
                if (sums)
                    sum += weighed(narrow.of + w * PIECE, PIECE, to + at);
                else
                    *(STORE *)(to + at) = narrow.words[w];
        } else {
            wide = widened(e == own ? narrow : read_narrow(from, e, group, c.length), scale);
            EACH_WORD(at, e, group, c.length)
                if (sums)
                    sum += weighed((const unsigned char *)(wide.of + w * PIECE), 2 * PIECE, to + 2 * at);
                else
                    *(LOAD *)(to + 2 * at) = wide.words[w];
        }
    return sum;
}

/* All blocks of a chunk; `sums` is known to the compiler. */
__device__ static __forceinline__ u64 convert_chunk(const Convert c, u32 chunk, int sums)
{
    const u32 group = 1 << c.shift, groups = THREADS >> c.shift;
    const u32 own = (threadIdx.x & group - 1) * PIECE, begin = chunk * groups * DEPTH + (threadIdx.x >> c.shift);
    const u32 many = c.n_rows * c.lanes * c.blocks, widens = c.made == WIDE;
    const u32 given = (c.made == NARROW ? 1 : c.made == WIDE ? 2 : 0) * c.length + (c.made == SCALES ? 4 : 0); /* bytes of a block */
    const char *from[DEPTH];
    u64 to[DEPTH], beside[DEPTH], weight[DEPTH], total = 0; /* of a block, of its scale; of its row, for sums */
    Wide wide[DEPTH];
    Narrow narrow[DEPTH];
    Scale scale[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        /* groups of a warp go round together, as they exchange: behind the last block they take it again */
        const u32 asked = begin + i * groups, unit = asked < many ? asked : many - 1;
        const u32 line = c.blocks == 1 ? unit : unit / c.blocks, block = unit - line * c.blocks;
        const u32 row = c.lanes == 1 ? line : line / c.lanes, lane = line - row * c.lanes;
        const uint4 at = ((const uint4 *)c.places)[row];
        from[i] = (const char *)(c.source + at.x * c.source_item + at.y * c.source_row + lane * c.source_lane + (u64)block * c.length * (widens ? 1 : 2));
        to[i] = c.sink + at.z * c.sink_item + at.w * c.sink_row + lane * c.sink_lane + (u64)block * given;
        beside[i] = 0;
        if (c.scale)
            beside[i] = c.scale + (widens ? at.x : at.z) * c.scale_item + (widens ? at.y : at.w) * c.scale_row + lane * c.scale_lane + 4 * block;
        if (sums) {
            to[i] = c.lo + (u64)(lane * c.blocks + block) * given;
            weight[i] = odd(((const uint4 *)c.globals)[row].y + c.seed);
        }
        scale[i].of = __uint_as_float(c.stated);
        if (widens && !c.stated)
            scale[i].word = *(const SCALE *)beside[i];
        if (widens)
            narrow[i] = read_narrow(from[i], own, group, c.length);
        else
            wide[i] = read_wide(from[i], own, group, c.length);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        if (!widens && !c.stated)
            scale[i].of = scale_of(from[i], c.length, own, group, wide[i]);
        if (begin + i * groups >= many)
            continue;
        u64 sum = 0;
        if (c.made != SCALES)
            sum = convert_block(c, from[i], to[i], own, wide[i], narrow[i], scale[i].of, sums);
        else if (!own && sums)
            sum = weighed((const unsigned char *)&scale[i], 4, to[i]);
        else if (!own)
            *(SCALE *)to[i] = scale[i].word;
        if (sums)
            total += sum * weight[i];
        else if (c.made == NARROW && c.scale && !own)
            *(SCALE *)beside[i] = scale[i].word;
    }
    return total;
}

/* Blocks take chunks of the operations in turn. */
__device__ static __forceinline__ void run(const Convert *ops, u32 n_ops, u32 n_chunks, int sums)
{
    u32 at = 0;
    u64 total = 0;
    for (u32 chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        const u32 before = at;
        while (at + 1 < n_ops && chunk >= ops[at + 1].first)
            at++;
        if (sums && ops[at].total != ops[before].total) {
            collect((u64 *)ops[before].total, total);
            total = 0;
        }
        total += convert_chunk(ops[at], chunk - ops[at].first, sums);
    }
    if (sums && n_chunks)
        collect((u64 *)ops[at].total, total);
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS, RESIDENT) convert(const Convert *ops, u32 n_ops, u32 n_chunks)
{
    run(ops, n_ops, n_chunks, 0);
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS, RESIDENT) sum_converted(const Convert *ops, u32 n_ops, u32 n_chunks)
{
    run(ops, n_ops, n_chunks, 1);
}
