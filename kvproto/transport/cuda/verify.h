/* Feature VERIFY (spec/v1/lowering.md): weights of rows and of bytes of the lane axis, and the totals of groups. */
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ static u64 odd(u64 x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (x ^ x >> 31) | 1;
}

/* Every thread of a warp comes here; on a GPU one of them adds for all. */
__device__ static void collect(u64 *total, u64 more)
{
#ifdef __CUDA_ARCH__
    for (int apart = 16; apart; apart /= 2)
        more += __shfl_xor_sync(~0u, more, apart);
    if (threadIdx.x % 32)
        return;
#endif
    atomicAdd(total, more);
}
