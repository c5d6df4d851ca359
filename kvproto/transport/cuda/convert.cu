/* Conversions on a GPU (spec/v1/conversion.md): lanes of BF16 to F8E4M3, to the scales of their blocks, and back; and the
 * sums of the bytes that they give, which a source takes of its own memory.
 *
 * GROUP threads of a warp share a block of a lane. A thread has STEP elements of a block at once, aligned as one word, and
 * the first words of DEPTH blocks in flight before it converts any. Macros: THREADS, GROUP, DEPTH, STEP; LOAD and STORE,
 * the types of STEP elements of two bytes and of one; SCALE, that of a scale. Arithmetic is that of integers and of float32
 * that is rounded to nearest even, without subnormal numbers flushed: no fast math.
 */
#include "verify.h"

enum { NARROW = 1, SCALES = 2, WIDE = 3 };
#define BLOCKS (THREADS / GROUP * DEPTH) /* of a chunk */

/* Elements and scales whose places have no alignment. */
typedef struct { unsigned char of[2]; } Two;
typedef struct { unsigned char of[4]; } Four;

typedef union { LOAD word; unsigned short of[STEP]; } Wide;
typedef union { STORE word; unsigned char of[STEP]; } Narrow;
typedef union { SCALE word; float of; } Scale;

typedef struct {
    u64 source, source_item, source_row, source_lane; /* of one operation: address, strides in bytes */
    u64 sink, sink_item, sink_row, sink_lane;
    u64 scale, scale_item, scale_row, scale_lane; /* WIDE: of scales read at the source; NARROW: written at the sink, or 0 */
    u64 places;                                   /* uint4[n_rows], written by expand: items and rows of both sides */
    u64 globals, total, seed, lo;                 /* of sums, as of a Sum in kernel.cu */
    u32 n_rows, lanes, blocks, length;            /* length: elements of a block; fewer than 2^32 blocks in all */
    u32 made, stated;                             /* stated: the bits of a scale, or 0 */
    u32 first, unused;                            /* first: chunks of the operations before */
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

__device__ static u32 to_bf16(u32 code, float scale)
{
    const float size = code & 0x78 ? __uint_as_float(((code & 0x7F) << 20) + (120 << 23)) : (code & 7) * 0.001953125f;
    const u32 bits = __float_as_uint(__fmul_rn(code & 0x80 ? -size : size, scale));
    if ((code & 0x7F) == 0x7F || (bits & 0x7FFFFFFF) > 0x7F800000)
        return 0x7FC0;
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}

__device__ static __forceinline__ u32 most_of(Wide word, u32 most)
{
#pragma unroll
    for (u32 i = 0; i < STEP; i++) {
        const u32 size = word.of[i] & 0x7FFF;
        if (size < 0x7F80 && size > most)
            most = size;
    }
    return most;
}

/* The scale of a block by its greatest finite element, the same for all threads of a group. */
__device__ static __forceinline__ float scale_of(const char *block, u32 length, u32 own, Wide first)
{
    u32 most = most_of(first, 0);
    for (u32 e = own + GROUP * STEP; e < length; e += GROUP * STEP) {
        Wide next;
        next.word = *(const LOAD *)(block + 2 * e);
        most = most_of(next, most);
    }
#ifdef __CUDA_ARCH__
    for (u32 apart = GROUP / 2; apart; apart /= 2)
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
    u64 sum = 0;
    for (u32 e = own; e < c.length; e += GROUP * STEP)
        if (c.made == NARROW) {
            if (e != own)
                wide.word = *(const LOAD *)(from + 2 * e);
#pragma unroll
            for (u32 i = 0; i < STEP; i++)
                narrow.of[i] = to_e4m3(__fdiv_rn(__uint_as_float((u32)wide.of[i] << 16), scale));
            if (sums)
                sum += weighed(narrow.of, STEP, to + e);
            else
                *(STORE *)(to + e) = narrow.word;
        } else {
            if (e != own)
                narrow.word = *(const STORE *)(from + e);
#pragma unroll
            for (u32 i = 0; i < STEP; i++)
                wide.of[i] = to_bf16(narrow.of[i], scale);
            if (sums)
                sum += weighed((const unsigned char *)wide.of, 2 * STEP, to + 2 * e);
            else
                *(LOAD *)(to + 2 * e) = wide.word;
        }
    return sum;
}

/* All blocks of a chunk; `sums` is known to the compiler. */
__device__ static __forceinline__ u64 convert_chunk(const Convert c, u32 chunk, int sums)
{
    const u32 own = threadIdx.x % GROUP * STEP, begin = chunk * BLOCKS + threadIdx.x / GROUP;
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
        const u32 asked = begin + i * (THREADS / GROUP), unit = asked < many ? asked : many - 1;
        const u32 line = c.blocks == 1 ? unit : unit / c.blocks, block = unit - line * c.blocks;
        const u32 row = c.lanes == 1 ? line : line / c.lanes, lane = line - row * c.lanes;
        const uint4 at = ((const uint4 *)c.places)[row];
        from[i] = (const char *)(c.source + at.x * c.source_item + at.y * c.source_row + lane * c.source_lane + (u64)block * c.length * (widens ? 1 : 2));
        to[i] = c.sink + at.z * c.sink_item + at.w * c.sink_row + lane * c.sink_lane + (u64)block * given;
        beside[i] = c.scale + (widens ? at.x : at.z) * c.scale_item + (widens ? at.y : at.w) * c.scale_row + lane * c.scale_lane + 4 * block;
        if (sums) {
            to[i] = c.lo + (u64)(lane * c.blocks + block) * given;
            weight[i] = odd(((const uint4 *)c.globals)[row].y + c.seed);
        }
        scale[i].of = __uint_as_float(c.stated);
        if (widens && !c.stated)
            scale[i].word = *(const SCALE *)beside[i];
        for (u32 k = 0; k < STEP; k++)
            wide[i].of[k] = narrow[i].of[k] = 0;
        if (own < c.length && widens)
            narrow[i].word = *(const STORE *)(from[i] + own);
        else if (own < c.length)
            wide[i].word = *(const LOAD *)(from[i] + 2 * own);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        if (!widens && !c.stated)
            scale[i].of = scale_of(from[i], c.length, own, wide[i]);
        if (begin + i * (THREADS / GROUP) >= many)
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
__global__ void __launch_bounds__(THREADS) convert(const Convert *ops, u32 n_ops, u32 n_chunks)
{
    run(ops, n_ops, n_chunks, 0);
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) sum_converted(const Convert *ops, u32 n_ops, u32 n_chunks)
{
    run(ops, n_ops, n_chunks, 1);
}
