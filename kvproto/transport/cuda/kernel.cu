/* Copy programs on a GPU: strided rows of many layers from one side's pools into the other's, in one pass.
 *
 * A program is a list of classes; a class is the operations (layers, parts, lane pieces) whose rows are alike in number
 * and width. Its bytes are cut into chunks of THREADS x DEPTH words, and blocks take chunks in turn. A thread has DEPTH
 * loads in flight before its first store: a link between GPUs is filled by bytes in flight, not by instructions.
 *
 * Macros: THREADS, DEPTH, FEW_CLASSES and FEW_WORDS of table.py; WORD, the widest type that divides every address,
 * stride and length of a class. The source compiles as C too, so that tests run this very arithmetic on a host
 * (tests/transport/host_gpu.h).
 */
#include "verify.h"

/* Where one layer's piece lies on both sides; strides in bytes. */
typedef struct {
    u64 source, sink;
    u64 source_item, source_row, source_lane;
    u64 sink_item, sink_row, sink_lane;
} Op;

typedef struct {
    u64 ops;    /* Op[] */
    u64 rows;   /* uint4[]: source item, source row, sink item, sink row; in Few the first word of its runs */
    u32 n_rows; /* n_rows x words x units < 2^32 - THREADS x DEPTH */
    u32 words;  /* words of a unit: bytes that touch on both sides */
    u32 units;  /* units of a row: lanes that are apart */
    u32 chunks; /* of one operation */
    u32 first;  /* chunks of the classes before */
    u32 n_runs; /* in Few */
} Class;

/* A launch that fits into a kernel's parameters: nothing is uploaded, nothing expanded. */
typedef struct {
    u32 n_classes, n_chunks, unused[2];
    Class classes[FEW_CLASSES];
    u32 runs[FEW_WORDS]; /* as of a Map, class after class */
} Few;

/* Some rows of operations one side of which is a stream that lies elsewhere each time; rows are expanded. */
typedef struct {
    u32 n_classes, n_chunks;
    u64 source, sink; /* added to the addresses of all operations, mod 2^64 */
    Class classes[FEW_CLASSES];
} Part;

/* Runs of rows that follow one another on both sides, five arrays of n_runs: first row on the axis of all rows, then
 * source item, source row, sink item, sink row. */
typedef struct {
    u64 runs; /* u32[5][n_runs] */
    u64 rows; /* uint4[n_rows], written by expand */
    u32 n_runs, n_rows;
} Map;

/* Where row i lies, found among n runs: the last that begins at or before it. */
__device__ static uint4 find(const u32 *start, u32 n, u32 i)
{
    u32 lo = 0, hi = n;
    while (hi - lo > 1) {
        u32 mid = lo + (hi - lo) / 2;
        if (start[mid] <= i)
            lo = mid;
        else
            hi = mid;
    }
    uint4 row;
    row.x = start[n + lo];
    row.y = start[2 * n + lo] + i - start[lo];
    row.z = start[3 * n + lo];
    row.w = start[4 * n + lo] + i - start[lo];
    return row;
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) expand(const Map *maps)
{
    const Map *map = maps + blockIdx.y;
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < map->n_rows; i += gridDim.x * THREADS)
        ((uint4 *)map->rows)[i] = find((const u32 *)map->runs, map->n_runs, i);
}

/* A chunk of a class. Rows are expanded where `runs` is 0, which the compiler knows. */
__device__ static __forceinline__ void move(const Class c, u32 chunk, const u32 *runs, u64 source, u64 sink)
{
    const Op op = ((const Op *)c.ops)[chunk / c.chunks];
    const uint4 *rows = (const uint4 *)c.rows;
    const u32 width = c.words * c.units;
    const u32 step = THREADS / width, rest = THREADS % width;
    const u32 begin = chunk % c.chunks * (THREADS * DEPTH) + threadIdx.x;
    u32 row = begin / width, within = begin % width;
    WORD held[DEPTH], *to[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        to[i] = 0;
        if (row < c.n_rows) {
            const uint4 r = runs ? find(runs, c.n_runs, row) : rows[row];
            const u32 unit = c.units == 1 ? 0 : within / c.words;
            const u64 on = (u64)(within - unit * c.words) * sizeof(WORD);
            held[i] = *(const WORD *)(source + op.source + r.x * op.source_item + r.y * op.source_row + unit * op.source_lane + on);
            to[i] = (WORD *)(sink + op.sink + r.z * op.sink_item + r.w * op.sink_row + unit * op.sink_lane + on);
        }
        row += step;
        within += rest;
        if (within >= width) {
            within -= width;
            row++;
        }
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (to[i])
            *to[i] = held[i];
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) copy(const Class *classes, u32 n_classes, u32 n_chunks)
{
    u32 at = 0;
    for (u32 chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        while (at + 1 < n_classes && chunk >= classes[at + 1].first)
            at++;
        move(classes[at], chunk - classes[at].first, 0, 0, 0);
    }
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) copy_few(const __grid_constant__ Few few)
{
    u32 at = 0;
    for (u32 chunk = blockIdx.x; chunk < few.n_chunks; chunk += gridDim.x) {
        while (at + 1 < few.n_classes && chunk >= few.classes[at + 1].first)
            at++;
        move(few.classes[at], chunk - few.classes[at].first, few.runs + few.classes[at].rows, 0, 0);
    }
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) copy_part(const __grid_constant__ Part part)
{
    u32 at = 0;
    for (u32 chunk = blockIdx.x; chunk < part.n_chunks; chunk += gridDim.x) {
        while (at + 1 < part.n_classes && chunk >= part.classes[at + 1].first)
            at++;
        move(part.classes[at], chunk - part.classes[at].first, 0, part.source, part.sink);
    }
}

/* Feature VERIFY (spec/v1/lowering.md): the sum over every byte of byte x A(layer, row) x B(byte on the lane axis). */
typedef struct {
    u64 base, item, row, lane; /* of one operation on one side: address, strides; multiples of a WORD, like lane_bytes */
    u64 places;                /* uint4[n_rows], written by expand: source item, source row, sink item, sink row */
    u64 globals;               /* uint4[n_rows], written by expand: the second is the global row */
    u64 total;                 /* u64: where the group's sum is collected */
    u64 seed, lo;              /* of model, layer and part; first byte on the lane axis */
    u32 n_rows, lanes, lane_bytes, sink; /* of the side: 0 source, 1 sink */
} Sum;

#ifdef __CUDA_ARCH__
#define UNROLL _Pragma("unroll 4") /* loads of several rows before the first is used */
#else
#define UNROLL
#endif

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) checksum(const Sum *sums)
{
    const Sum s = sums[blockIdx.y];
    const u32 words = s.lanes * s.lane_bytes / sizeof(WORD);
    const u32 across = words < THREADS ? words : THREADS; /* threads side by side in a row */
    const u32 down = THREADS / across;                    /* rows at once */
    const u32 first = blockIdx.x * down + threadIdx.x / across;
    u64 total = 0;
    for (u32 word = threadIdx.x % across; word < words && threadIdx.x < across * down; word += across) {
        const u32 x = word * sizeof(WORD);
        const u64 column = s.base + x / s.lane_bytes * s.lane + x % s.lane_bytes;
        u64 weights[sizeof(WORD)]; /* of this thread's bytes, the same in each row */
        for (u32 i = 0; i < sizeof(WORD); i++)
            weights[i] = odd(s.lo + x + i);
        UNROLL
        for (u32 row = first; row < s.n_rows; row += gridDim.x * down) {
            const uint4 at = ((const uint4 *)s.places)[row];
            const WORD bytes = *(const WORD *)(column + (s.sink ? at.z : at.x) * s.item + (s.sink ? at.w : at.y) * s.row);
            u64 line = 0;
            for (u32 i = 0; i < sizeof(WORD); i++)
                line += ((const unsigned char *)&bytes)[i] * weights[i];
            total += line * odd(((const uint4 *)s.globals)[row].y + s.seed);
        }
    }
    collect((u64 *)s.total, total);
}
