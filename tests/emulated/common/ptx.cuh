/* csrc/common/ptx.cuh on the host: the instructions by their definitions. Dynamic shared memory is an array,
 * an address of it an offset. A copy (cp.async) arrives when its thread waits for it, no sooner: who reads
 * before that finds what was there. With threads that take turns backwards it arrives at once: who still
 * reads what was there finds it gone. */
#pragma once

#include <cuda_bf16.h>

#include <cstdlib>

namespace ptx {

/* ---- copies ------------------------------------------------------------------------------------ */

alignas(128) inline uint8_t memory[232448];

inline uint32_t shared_address(const void *at) {
    return static_cast<uint32_t>(static_cast<const uint8_t *>(at) - memory);
}

struct Copy {
    uint32_t to, bytes, group;
    uint8_t value[16];
};
/* Of one thread; groups are numbered. */
struct Copies {
    std::vector<Copy> under_way;
    uint32_t group = 0;
    void arrive(uint32_t end) {
        const auto late = std::stable_partition(under_way.begin(), under_way.end(),
                                                [&](const Copy &one) { return one.group < end; });
        for (auto one = under_way.begin(); one != late; ++one) std::memcpy(memory + one->to, one->value, one->bytes);
        under_way.erase(under_way.begin(), late);
    }
};
inline Copies copies[1024];

inline void copy(uint32_t to, const void *from, bool there, uint32_t bytes) {
    if (to % bytes || reinterpret_cast<uintptr_t>(from) % bytes || to + bytes > sizeof(memory)) std::abort();
    Copies &mine = copies[threadIdx.x];
    Copy one{to, bytes, mine.group, {}};
    if (there) std::memcpy(one.value, from, bytes);
    if (emulated::backwards) std::memcpy(memory + to, one.value, bytes);
    mine.under_way.push_back(one);
}
inline void copy16(uint32_t to, const void *from, bool there) { copy(to, from, there, 16); }
inline void copy8(uint32_t to, const void *from, bool there) { copy(to, from, there, 8); }
inline void copy_commit() { ++copies[threadIdx.x].group; }
template <uint32_t LEFT>
void copy_wait() {
    Copies &mine = copies[threadIdx.x];
    if (mine.group > LEFT) mine.arrive(mine.group - LEFT);
}
inline void copy_wait_all() { copies[threadIdx.x].arrive(UINT_MAX); }

/* A CTA begins with nothing in its shared memory that it put there; none may end with copies under way. */
inline void begin_memory() {
    std::memset(memory, 0xff, sizeof(memory));
    for (Copies &each : copies) {
        if (!each.under_way.empty()) std::abort();
        each.group = 0;
    }
}

inline uint4 load16(const void *at) {
    uint4 v;
    std::memcpy(&v, at, 16);
    return v;
}

/* ---- matrices ---------------------------------------------------------------------------------- */

inline uint32_t value_at(uint32_t address) {
    uint16_t value;
    std::memcpy(&value, memory + address, 2);
    return value;
}

/* Row and column of each of a lane's two values within matrix `i`: its own, or transposed. */
template <bool TRANSPOSED>
void matrices(uint32_t (&r)[4], uint32_t at) {
    if (at % 16) std::abort();
    const int g = emulated::lane() / 4, t = emulated::lane() % 4;
    emulated::exchange(at, [&](auto address) {
        for (int i = 0; i < 4; ++i) {
            uint32_t pair[2];
            for (int j = 0; j < 2; ++j) {
                const int row = TRANSPOSED ? 2 * t + j : g, column = TRANSPOSED ? g : 2 * t + j;
                pair[j] = value_at(address(8 * i + row) + 2 * column);
            }
            r[i] = pair[0] | pair[1] << 16;
        }
        return 0;
    });
}
inline void load_matrices(uint32_t (&r)[4], uint32_t at) { matrices<false>(r, at); }
inline void load_transposed(uint32_t (&r)[4], uint32_t at) { matrices<true>(r, at); }

/* Of every fp16, its value. */
struct Fp16 {
    float value[1 << 16];
    Fp16() {
        for (int bits = 0; bits < 1 << 16; ++bits) {
            const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
            const float size = exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp(1.f * mantissa, -24);
            value[bits] = bits & 0x8000 ? -size : size;
        }
    }
};
inline const Fp16 fp16;

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::multiply(d, a, b0, b1, emulated::widened);
}

inline void mma_fp16(float (&d)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
    emulated::multiply(d, words, b0, b1, [](uint32_t bits) { return fp16.value[bits]; });
}

/* ---- values ------------------------------------------------------------------------------------ */

inline uint32_t times(uint32_t a, uint32_t b) {
    using emulated::of_pair;
    const auto one = [&](int i) { return emulated::rounded(static_cast<double>(of_pair(a, i)) * of_pair(b, i)); };
    return one(0) | static_cast<uint32_t>(one(1)) << 16;
}

inline float power(float x) { return std::exp2(x); }

inline float reciprocal(float x) { return 1 / x; }

inline uint32_t pack_bf16(float low, float high) {
    return emulated::rounded(low) | static_cast<uint32_t>(emulated::rounded(high)) << 16;
}

inline uint32_t permute(uint32_t from, uint32_t selector) {
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t which = selector >> 4 * i & 15, byte = (which & 7) < 4 ? from >> 8 * (which & 7) & 0xff : 0;
        found |= (which & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return found;
}

/* ---- between warps and launches ---------------------------------------------------------------- */

inline emulated::Meeting meetings[16];
inline void meet(int number, int threads) {
    meetings[number].expected = threads;
    meetings[number].wait();
}

/* CTAs run one after the other: the order is theirs. */
inline int add_and_order(int *at, int by) { return atomicAdd(at, by); }

inline int count_and_order(int *at, int most) {
    const int before = *at;
    *at = before >= most ? 0 : before + 1;
    return before;
}

/* Reads a byte: a sanitizer, or an address that is none, tells. */
inline void prefetch(const void *at) { (void)*static_cast<const volatile uint8_t *>(at); }
inline void let_next_start() {}
inline void wait_for_previous() {}

} // namespace ptx
