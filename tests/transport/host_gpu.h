/* Enough of CUDA to run kernel.cu on a host: every thread of every block, one after the other. */
#define __global__ static
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
typedef struct { unsigned x, y, z; } dim3;
typedef struct { unsigned x, y, z, w; } uint4;
typedef struct { unsigned x, y; } uint2;
static dim3 blockIdx, threadIdx, gridDim;
static unsigned __float_as_uint(float x) { union { float x; unsigned bits; } u = {x}; return u.bits; }
static float __uint_as_float(unsigned bits) { union { unsigned bits; float x; } u = {bits}; return u.x; }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __frcp_rn(float x) { return 1 / x; }
static float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static unsigned __vmaxu2(unsigned x, unsigned y)
{
    const unsigned low = (x & 0xFFFF) > (y & 0xFFFF) ? x & 0xFFFF : y & 0xFFFF, high = x >> 16 > y >> 16 ? x >> 16 : y >> 16;
    return low | high << 16;
}
static void atomicAdd(unsigned long long *at, unsigned long long more) { *at += more; }
#define EACH_THREAD(blocks_x, blocks_y)                                    \
    for (gridDim.x = (blocks_x), gridDim.y = (blocks_y), blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) \
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)         \
            for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++)
