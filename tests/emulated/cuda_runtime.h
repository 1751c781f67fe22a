/* CUDA's words for one CTA after the other of the host. A thread of a CTA is a fiber (ucontext), all on one
 * thread of the host: where one waits for others, the next goes on, or the one before (`backwards`). */
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

using std::max;
using std::min;

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using cudaError_t = int;
using cudaStream_t = void *;

inline dim3 threadIdx, blockIdx, gridDim;

namespace emulated {

constexpr size_t STACK = 128 << 10;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool ended;
};

/* Those who come wait until as many are there as are expected. */
struct Meeting {
    int expected = 0, here = 0;
    unsigned round = 0;
    void wait();
};

/* What the lanes of a warp lay open to each other between two meetings. */
struct Warp {
    Meeting meet{32};
    uint64_t value[32];
    uint32_t a[32][4], b[32][2];
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Meeting cta;
inline ucontext_t host;
inline int current;
inline bool backwards;
inline std::function<void()> kernel;

inline void next() {
    const int from = current, all = static_cast<int>(fibers.size());
    do current = (current + (backwards ? all - 1 : 1)) % all;
    while (fibers[current].ended && current != from);
    if (current == from) return;
    threadIdx.x = static_cast<unsigned>(current);
    swapcontext(&fibers[from].context, &fibers[current].context);
}

inline void Meeting::wait() {
    const unsigned mine = round;
    if (++here == expected)
        here = 0, ++round;
    else
        while (round == mine) next();
}

inline void body() {
    kernel();
    fibers[current].ended = true;
    const bool all = std::all_of(fibers.begin(), fibers.end(), [](const Fiber &f) { return f.ended; });
    if (all) setcontext(&host);
    next();
}

inline Warp &warp() { return warps[current / 32]; }
inline int lane() { return current % 32; }

/* Every CTA of the grid, one after the other; `begin` before each. */
inline void run(int threads, dim3 grid, std::function<void()> work, const std::function<void()> &begin = [] {}) {
    gridDim = grid, kernel = std::move(work);
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
            begin();
            blockIdx = {x, y, 0};
            fibers.resize(threads), warps.assign(threads / 32, Warp{}), cta = Meeting{threads};
            for (Fiber &f : fibers) {
                f.ended = false;
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = f.stack.get();
                f.context.uc_stack.ss_size = STACK;
                makecontext(&f.context, body, 0);
            }
            current = 0, threadIdx = {0, 0, 0};
            swapcontext(&host, &fibers[0].context);
        }
}

/* `value` of every lane, then `get` of all of them. */
template <typename Value, typename Get>
auto exchange(Value value, Get get) {
    Warp &w = warp();
    std::memcpy(&w.value[lane()], &value, sizeof(Value));
    w.meet.wait();
    const auto found = get([&](int i) {
        Value v;
        std::memcpy(&v, &w.value[i], sizeof(Value));
        return v;
    });
    w.meet.wait();
    return found;
}

template <typename Value, typename Fold>
Value fold(Value value, Fold with) {
    return exchange(value, [&](auto at) {
        Value all = at(0);
        for (int i = 1; i < 32; ++i) all = with(all, at(i));
        return all;
    });
}

/* m16 n8 k16, 16-bit operands widened by `wide`: where the instruction's definition says that lanes hold
 * A, B and D. */
template <typename Wide>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Wide wide) {
    Warp &w = warp();
    std::memcpy(w.a[lane()], a, sizeof(a));
    w.b[lane()][0] = b0, w.b[lane()][1] = b1;
    w.meet.wait();
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const int of = k % 8 / 2, upper = k / 8;
            const uint32_t left = w.a[row % 8 * 4 + of][row / 8 + 2 * upper], right = w.b[column * 4 + of][upper];
            sum += static_cast<double>(wide(k & 1 ? left >> 16 : left & 0xffff)) *
                   wide(k & 1 ? right >> 16 : right & 0xffff);
        }
        d[i] = static_cast<float>(sum);
    }
    w.meet.wait();
}

} // namespace emulated

extern "C" __attribute__((used)) inline void run_backwards(int yes) { emulated::backwards = yes; }

inline void __syncthreads() { emulated::cta.wait(); }
inline void __syncwarp() { emulated::warp().meet.wait(); }

inline bool __syncthreads_or(bool vote) {
    static bool votes[1024];
    votes[threadIdx.x] = vote;
    emulated::cta.wait();
    const bool any = std::find(votes, votes + emulated::fibers.size(), true) != votes + emulated::fibers.size();
    emulated::cta.wait();
    return any;
}

inline bool __any_sync(unsigned, bool vote) {
    return emulated::fold(static_cast<uint32_t>(vote), [](uint32_t a, uint32_t b) { return a | b; }) != 0;
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    return emulated::fold(static_cast<uint32_t>(vote) << emulated::lane(), [](uint32_t a, uint32_t b) { return a | b; });
}

template <typename Value>
Value __shfl_sync(unsigned, Value value, int from) {
    return emulated::exchange(value, [&](auto at) { return at(from); });
}

template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int by) {
    return emulated::exchange(value, [&](auto at) { return at(emulated::lane() ^ by); });
}

template <typename Value>
Value __shfl_up_sync(unsigned, Value value, int by) {
    const int lane = emulated::lane();
    return emulated::exchange(value, [&](auto at) { return at(lane < by ? lane : lane - by); });
}

inline uint32_t __reduce_min_sync(unsigned, uint32_t v) {
    return emulated::fold(v, [](uint32_t a, uint32_t b) { return min(a, b); });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) {
    return emulated::fold(v, [](uint32_t a, uint32_t b) { return max(a, b); });
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t v) {
    return emulated::fold(v, [](uint32_t a, uint32_t b) { return a + b; });
}

template <typename Value>
Value atomicAdd(Value *at, Value more) {
    const Value before = *at;
    *at += more;
    return before;
}
inline uint32_t atomicOr(uint32_t *at, uint32_t more) {
    const uint32_t before = *at;
    *at |= more;
    return before;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline int32_t __float_as_int(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
template <typename Value>
Value __ldg(const Value *at) {
    return *at;
}
inline float __int_as_float(int32_t bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
template <typename Value>
Value __ldcg(const Value *at) {
    return *at;
}
