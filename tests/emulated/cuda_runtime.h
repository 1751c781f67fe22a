/* CUDA's words for one CTA of 256 threads of the host: each a std::thread, collectives by barriers. */
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using cudaError_t = int;
using cudaStream_t = void *;

inline thread_local dim3 threadIdx, blockIdx, gridDim;

namespace emulated {

constexpr int THREADS = 256;

/* What the lanes of a warp lay open to each other between two barriers. */
struct Warp {
    std::barrier<> meet{32};
    uint32_t address[32], a[32][4], b[32][2];
    float value[32];
    bool vote[32];
};
inline Warp warps[THREADS / 32];
inline std::barrier<> cta{THREADS};
inline bool votes[THREADS];

inline Warp &warp() { return warps[threadIdx.x / 32]; }
inline int lane() { return static_cast<int>(threadIdx.x % 32); }

/* `put` by every lane, then `get` by every lane. */
template <typename Put, typename Get>
auto exchange(Put put, Get get) {
    put(warp());
    warp().meet.arrive_and_wait();
    auto found = get(warp());
    warp().meet.arrive_and_wait();
    return found;
}

} // namespace emulated

inline void __syncthreads() { emulated::cta.arrive_and_wait(); }

inline bool __syncthreads_or(bool vote) {
    emulated::votes[threadIdx.x] = vote;
    emulated::cta.arrive_and_wait();
    const bool any = std::any_of(std::begin(emulated::votes), std::end(emulated::votes), [](bool v) { return v; });
    emulated::cta.arrive_and_wait();
    return any;
}

inline bool __any_sync(unsigned, bool vote) {
    return emulated::exchange([&](emulated::Warp &w) { w.vote[emulated::lane()] = vote; },
                              [](emulated::Warp &w) { return std::any_of(w.vote, w.vote + 32, [](bool v) { return v; }); });
}

inline float __shfl_xor_sync(unsigned, float value, int by) {
    return emulated::exchange([&](emulated::Warp &w) { w.value[emulated::lane()] = value; },
                              [&](emulated::Warp &w) { return w.value[emulated::lane() ^ by]; });
}

template <typename T>
T __shfl_sync(unsigned, T value, int from) {
    return emulated::exchange([&](emulated::Warp &w) { std::memcpy(w.a[emulated::lane()], &value, sizeof value); },
                              [&](emulated::Warp &w) {
                                  std::memcpy(&value, w.a[from], sizeof value);
                                  return value;
                              });
}

inline void __syncwarp() { emulated::warp().meet.arrive_and_wait(); }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
