/* Attention over shards on a GPU: packed for the ranks of a DCP group, merged, and exchanged over mapped memory.
 *
 * A row is one head of one token, and a warp takes a row. A chunk is what one rank sends another: outputs [rows, width]
 * of 2-byte elements, then, from a multiple of 16 bytes on, float [rows] log-sum-exps in base 2. What nothing was read
 * for is selected away, never multiplied: anything may stand there.
 *
 * Macros: BRAIN, 1 for bfloat16 and 0 for float16; PARTS, how many parts or ranks; WIDTH, elements of a row, a multiple of
 * 8; THREADS of a block; BLOCKS of a launch that meets other ranks. Every member of a parameter has 8 bytes.
 */
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define WARPS (THREADS / 32)
#define WORDS (WIDTH / 8)
#define NONE __int_as_float(0xff800000) /* -inf */
#define LN2 0.6931471805599453f

static __device__ float widen(u32 two, int half)
{
    float value;
#if BRAIN
    value = __uint_as_float(half ? two & 0xffff0000u : two << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)(half ? two >> 16 : two)));
#endif
    return value;
}

static __device__ u32 narrow(float low, float high)
{
    u32 two;
#if BRAIN
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
#endif
    return two;
}

/* A log-sum-exp as a kernel gave it: NaN and +inf stand for nothing read, as -inf does. */
static __device__ float sane(float lse) { return lse < __int_as_float(0x7f800000) ? lse : NONE; }

static __device__ float *lse_of(u64 chunk, u32 rows) { return (float *)(chunk + (u64)rows * WORDS * 16); }

static __device__ const uint4 *words(u64 rows, u32 row) { return (const uint4 *)rows + (u64)row * WORDS; }

/* A row of all parts from a row of each: `lse` in base 2, and load(part, word). Returns its log-sum-exp in base 2. */
template <typename Load> static __device__ float merge_row(Load load, const float *lse, uint4 *out)
{
    float most = NONE, sum = 0, weight[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        most = fmaxf(most, lse[p]);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
        sum += weight[p] = lse[p] == NONE ? 0 : exp2f(lse[p] - most);
    float share = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int i = threadIdx.x % 32; i < WORDS; i += 32) {
        float total[8] = {};
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            uint4 word = load(p, i);
            u32 two[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
            for (int k = 0; k < 8; k++)
                total[k] += weight[p] > 0 ? weight[p] * share * widen(two[k / 2], k % 2) : 0;
        }
        out[i] = make_uint4(narrow(total[0], total[1]), narrow(total[2], total[3]), narrow(total[4], total[5]), narrow(total[6], total[7]));
    }
    return sum > 0 ? most + log2f(sum) : NONE;
}

/* What a kernel found for the heads of all ranks, [tokens, PARTS * heads]; `read` int [tokens] rows that a token read. */
struct Found {
    u64 out, log2, read;
    i64 tokens, heads;
};

/* Row `row` of those of rank `rank`. */
static __device__ u32 place(const Found &f, u32 rank, u32 row)
{
    return (row / (u32)f.heads * PARTS + rank) * (u32)f.heads + row % (u32)f.heads;
}

static __device__ float lse_at(const Found &f, u32 at)
{
    return ((const int *)f.read)[at / (PARTS * (u32)f.heads)] > 0 ? sane(((const float *)f.log2)[at]) : NONE;
}

static __device__ void put(const Found &f, u32 rank, u32 row, u64 chunk)
{
    u32 at = place(f, rank, row), rows = (u32)(f.tokens * f.heads);
    uint4 *to = (uint4 *)words(chunk, row);
#pragma unroll
    for (int i = threadIdx.x % 32; i < WORDS; i += 32)
        to[i] = words(f.out, at)[i];
    if (threadIdx.x % 32 == 0)
        lse_of(chunk, rows)[row] = lse_at(f, at);
}

struct Pack {
    Found found;
    u64 chunks;
    i64 stride;
};

/* A chunk for each rank; one block row a rank. */
extern "C" __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Pack p)
{
    u32 row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row < p.found.tokens * p.found.heads)
        put(p.found, blockIdx.y, row, p.chunks + blockIdx.y * p.stride);
}

/* The same rows of several parts; `to_base2` is a factor, `read` int [tokens], or 0 where every token read something. */
struct Merge {
    u64 out[PARTS], lse[PARTS], read[PARTS];
    double to_base2[PARTS];
    u64 merged, merged_lse;
    i64 tokens, heads;
};

/* Gives natural log-sum-exps. */
extern "C" __global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ Merge m)
{
    u32 row = blockIdx.x * WARPS + threadIdx.x / 32, heads = (u32)m.heads;
    if (row >= m.tokens * heads)
        return;
    float found[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        bool some = !m.read[p] || ((const int *)m.read[p])[row / heads] > 0;
        found[p] = some ? sane(((const float *)m.lse[p])[row] * (float)m.to_base2[p]) : NONE;
    }
    float total = merge_row([&](int p, int i) { return __ldcg(words(m.out[p], row) + i); }, found, (uint4 *)words(m.merged, row));
    if (threadIdx.x % 32 == 0)
        ((float *)m.merged_lse)[row] = total * LN2;
}

/* What a rank has of its group, mapped; by rank, and its own too. There are two slots for each rank that writes, taken in
 * turn. A small step is written in pairs of a word and the epoch, which come together, so that whoever reads needs no
 * flag: in memory of its own, where no word is ever taken for an epoch. A large one is written as chunks, then flags.
 */
struct Group {
    u64 data[PARTS];  /* [2][PARTS][stride] bytes */
    u64 pairs[PARTS]; /* [2][PARTS][pair_stride] bytes */
    u64 flags[PARTS]; /* u32 [PARTS][BLOCKS] epochs that a rank's blocks have written, then an error */
    u64 epochs;       /* u32 [BLOCKS] */
    u64 told;         /* u32 of the host's memory: the error */
    i64 rank, stride, pair_stride, patience; /* bytes, ns */
};

static __device__ u64 now()
{
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

static __device__ u32 acquire(const u32 *at)
{
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

static __device__ void release(u32 *at, u32 value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

static __device__ u32 *error(const Group &g, u32 owner) { return (u32 *)g.flags[owner] + PARTS * BLOCKS; }

static __device__ void fail(const Group &g, u32 epoch)
{
    for (u32 r = 0; r < PARTS; r++)
        release(error(g, r), epoch);
    *(volatile u32 *)g.told = epoch;
}

/* What a thread that waits looks at: whether it is in vain. */
struct Wait {
    const Group &g;
    u32 epoch, spins;
    u64 until;
    __device__ Wait(const Group &g, u32 epoch) : g(g), epoch(epoch), spins(0) {}
    __device__ bool vain()
    {
        if (spins++ == 0)
            until = now() + g.patience;
        if (spins % 64 || (now() < until && !acquire(error(g, (u32)g.rank))))
            return false;
        fail(g, epoch);
        return true;
    }
};

/* The epoch of this launch. Ranks launch the same kernels in the same order, all with BLOCKS blocks, so it is the same on
 * all and in all blocks. Two slots do: no rank ends an epoch before all have begun it, hence have ended the one before. */
static __device__ u32 begin(const Group &g) { return ((volatile u32 *)g.epochs)[blockIdx.x] + 1; }

/* Once a block has written its rows: the next launch has the next epoch. A rank that others gave up tells its host. */
static __device__ void written(const Group &g, u32 epoch)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        ((volatile u32 *)g.epochs)[blockIdx.x] = epoch;
        if (blockIdx.x == BLOCKS - 1 && acquire(error(g, (u32)g.rank)))
            fail(g, epoch);
    }
}

/* Tells all ranks that this block has written its rows, and waits for theirs; false where a rank failed or is late. */
static __device__ bool meet(const Group &g, u32 epoch)
{
    int good = 1;
    u32 other = threadIdx.x, at = blockIdx.x;
    if (other < PARTS && other != g.rank) {
        __threadfence_system();
        release((u32 *)g.flags[other] + (u32)g.rank * BLOCKS + at, epoch);
        Wait wait(g, epoch);
        while (good && (int)(acquire((u32 *)g.flags[g.rank] + other * BLOCKS + at) - epoch) < 0)
            good = !wait.vain();
    }
    return __syncthreads_and(good);
}

/* Where rank `from` writes in the memory of rank `owner` in this epoch. */
static __device__ u64 slot(const Group &g, u32 owner, u32 from, u32 epoch)
{
    return g.data[owner] + ((epoch & 1) * PARTS + from) * g.stride;
}

static __device__ uint4 *pairs(const Group &g, u32 owner, u32 from, u32 epoch)
{
    return (uint4 *)(g.pairs[owner] + ((epoch & 1) * PARTS + from) * g.pair_stride);
}

static __device__ void send(uint4 *at, u32 a, u32 b, u32 epoch)
{
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(at), "r"(a), "r"(epoch), "r"(b) : "memory");
}

static __device__ void send(uint4 *at, uint4 word, u32 epoch)
{
    send(at, word.x, word.y, epoch);
    send(at + 1, word.z, word.w, epoch);
}

/* Two words, and whether they are of this epoch. */
static __device__ uint2 look(const uint4 *at, u32 epoch, bool &there)
{
    u32 a, b, first, second;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(first), "=r"(b), "=r"(second) : "l"(at) : "memory");
    there &= first == epoch && second == epoch;
    return make_uint2(a, b);
}

static __device__ uint4 look_word(const uint4 *at, u32 epoch, bool &there)
{
    uint2 low = look(at, epoch, there), high = look(at + 1, epoch, there);
    return make_uint4(low.x, low.y, high.x, high.y);
}

struct Gather {
    Group group;
    u64 mine, all;
    i64 tokens, words, small; /* words of 16 bytes that a rank has of a token; whether they go in pairs */
};

/* Queries [tokens, words] of each rank -> [tokens, PARTS, words]. */
extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Gather p)
{
    const Group &g = p.group;
    u32 epoch = begin(g), n = (u32)(p.tokens * p.words), each = (u32)p.words, rank = (u32)g.rank;
    u32 first = blockIdx.x * THREADS + threadIdx.x, step = BLOCKS * THREADS;
    for (u32 i = first; i < n; i += step) {
        uint4 word = ((const uint4 *)p.mine)[i];
#pragma unroll
        for (u32 r = 0; r < PARTS; r++)
            if (r != rank && p.small)
                send(pairs(g, r, rank, epoch) + 2 * i, word, epoch);
            else if (r != rank)
                ((uint4 *)slot(g, r, rank, epoch))[i] = word;
        ((uint4 *)p.all)[(i / each * PARTS + rank) * each + i % each] = word;
    }
    written(g, epoch);
    if (blockIdx.x * THREADS >= n || (!p.small && !meet(g, epoch)))
        return;
    Wait wait(g, epoch);
    for (u32 i = first; i < n; i += step) {
        uint4 got[PARTS];
        bool there;
        do {
            there = true;
#pragma unroll
            for (u32 r = 0; r < PARTS; r++)
                if (r != rank)
                    got[r] = p.small ? look_word(pairs(g, rank, r, epoch) + 2 * i, epoch, there) : __ldcg((const uint4 *)slot(g, rank, r, epoch) + i);
        } while (!there && !wait.vain());
#pragma unroll
        for (u32 r = 0; r < PARTS; r++)
            if (r != rank)
                ((uint4 *)p.all)[(i / each * PARTS + r) * each + i % each] = got[r];
    }
}

struct Exchange {
    Group group;
    Found found;
    u64 merged, merged_lse;
    i64 small;
};

#define ROW_PAIRS (2 * WORDS + 1) /* of 16 bytes: a row's words, then its log-sum-exp */

/* Heads of all ranks over own tokens -> own heads over all tokens, with natural log-sum-exps. */
extern "C" __global__ void __launch_bounds__(THREADS) exchange(const __grid_constant__ Exchange p)
{
    const Group &g = p.group;
    u32 epoch = begin(g), rows = (u32)(p.found.tokens * p.found.heads), rank = (u32)g.rank, lane = threadIdx.x % 32;
    u32 first = blockIdx.x * WARPS + threadIdx.x / 32, step = BLOCKS * WARPS;
    for (u32 row = first; row < rows; row += step)
#pragma unroll
        for (u32 r = 0; r < PARTS; r++) {
            if (r == rank)
                continue;
            if (!p.small) {
                put(p.found, r, row, slot(g, r, rank, epoch));
                continue;
            }
            u32 at = place(p.found, r, row);
            uint4 *to = pairs(g, r, rank, epoch) + row * ROW_PAIRS;
#pragma unroll
            for (int i = lane; i < WORDS; i += 32)
                send(to + 2 * i, words(p.found.out, at)[i], epoch);
            u32 lse = __float_as_uint(lse_at(p.found, at));
            if (lane == 0)
                send(to + 2 * WORDS, lse, lse, epoch);
        }
    written(g, epoch);
    if (blockIdx.x * WARPS >= rows || (!p.small && !meet(g, epoch)))
        return;
    Wait wait(g, epoch);
    for (u32 row = first; row < rows; row += step) {
        float found[PARTS];
        uint4 got[PARTS][(WORDS + 31) / 32];
        bool there;
        do {
            there = true;
#pragma unroll
            for (u32 r = 0; r < PARTS; r++) {
                u32 at = place(p.found, r, row);
                u64 chunk = slot(g, rank, r, epoch);
                const uint4 *pair = pairs(g, rank, r, epoch) + row * ROW_PAIRS;
#pragma unroll
                for (int i = lane; i < WORDS; i += 32)
                    got[r][i / 32] = r == rank ? words(p.found.out, at)[i] : p.small ? look_word(pair + 2 * i, epoch, there) : __ldcg(words(chunk, row) + i);
                found[r] = r == rank ? lse_at(p.found, at) : p.small ? __uint_as_float(look(pair + 2 * WORDS, epoch, there).x) : __ldcg(lse_of(chunk, rows) + row);
            }
        } while (!there && !wait.vain());
        float total = merge_row([&](int r, int i) { return got[r][i / 32]; }, found, (uint4 *)words(p.merged, row));
        if (lane == 0)
            ((float *)p.merged_lse)[row] = total * LN2;
    }
}
