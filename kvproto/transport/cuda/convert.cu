/* Conversions on a GPU (spec/v1/conversion.md): lanes of BF16 to F8E4M3, to the scales of their blocks, and back.
 *
 * GROUP threads of a warp share a block of a lane; each has STEP elements at once, which are aligned as one word. Macros:
 * THREADS, GROUP, STEP, and LOAD and STORE, the types of STEP elements of two bytes and of one. Arithmetic is that of
 * integers and of float32 that is rounded to nearest even, without subnormal numbers flushed: no fast math.
 */
typedef unsigned int u32;
typedef unsigned long long u64;
enum { NARROW = 1, SCALES = 2, WIDE = 3 };

typedef struct {
    u64 source, source_item, source_row, source_lane; /* of one operation: address, strides in bytes */
    u64 sink, sink_item, sink_row, sink_lane;
    u64 scale, scale_item, scale_row, scale_lane; /* of scales that are read, at the source */
    u64 places;                                   /* uint4[n_rows]: source item, source row, sink item, sink row */
    u32 n_rows, lanes, blocks, length;            /* length: elements of a block */
    u32 made, stated;                             /* stated: the bits of a scale, or 0 */
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

/* The scale of a block by its greatest finite element, the same for all threads of a group. */
__device__ static float scale_of(const char *block, u32 length, u32 own)
{
    u32 most = 0;
    for (u32 e = own * STEP; e < length; e += GROUP * STEP) {
        const LOAD word = *(const LOAD *)(block + 2 * e);
        for (u32 i = 0; i < STEP; i++) {
            const u32 size = ((const unsigned short *)&word)[i] & 0x7FFF;
            if (size < 0x7F80 && size > most)
                most = size;
        }
    }
#ifdef __CUDA_ARCH__
    for (u32 apart = GROUP / 2; apart; apart /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, apart));
#endif
    const float least = __uint_as_float(27 << 23); /* 2^-100 */
    const float amax = __uint_as_float(most << 16);
    return __fdiv_rn(amax > least ? amax : least, 448.0f);
}

#ifdef __cplusplus
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) convert(const Convert *ops)
{
    const Convert c = ops[blockIdx.y];
    const u32 own = threadIdx.x % GROUP, many = c.n_rows * c.lanes * c.blocks;
    /* groups of a warp go round together, as they exchange: the last round has groups without a block */
    for (u32 base = blockIdx.x * (THREADS / GROUP); base < many; base += gridDim.x * (THREADS / GROUP)) {
        const u32 asked = base + threadIdx.x / GROUP, unit = asked < many ? asked : many - 1;
        const u32 block = unit % c.blocks, lane = unit / c.blocks % c.lanes;
        const uint4 at = ((const uint4 *)c.places)[unit / c.blocks / c.lanes];
        const u32 first = block * c.length;
        const char *from = (const char *)(c.source + at.x * c.source_item + at.y * c.source_row + lane * c.source_lane);
        char *to = (char *)(c.sink + at.z * c.sink_item + at.w * c.sink_row + lane * c.sink_lane);
        float scale = __uint_as_float(c.stated);
        if (!c.stated && c.made == WIDE)
            scale = ((const float *)(c.scale + at.x * c.scale_item + at.y * c.scale_row + lane * c.scale_lane))[block];
        else if (!c.stated)
            scale = scale_of(from + 2 * first, c.length, own);
        if (asked >= many)
            continue;
        if (c.made == SCALES) {
            if (!own)
                ((float *)to)[block] = scale;
            continue;
        }
        for (u32 e = own * STEP; e < c.length; e += GROUP * STEP)
            if (c.made == NARROW) {
                const LOAD word = *(const LOAD *)(from + 2 * (first + e));
                STORE made;
                for (u32 i = 0; i < STEP; i++)
                    ((unsigned char *)&made)[i] = to_e4m3(__fdiv_rn(__uint_as_float(((const unsigned short *)&word)[i] << 16), scale));
                *(STORE *)(to + first + e) = made;
            } else {
                const STORE word = *(const STORE *)(from + first + e);
                LOAD made;
                for (u32 i = 0; i < STEP; i++)
                    ((unsigned short *)&made)[i] = to_bf16(((const unsigned char *)&word)[i], scale);
                *(LOAD *)(to + 2 * (first + e)) = made;
            }
    }
}
