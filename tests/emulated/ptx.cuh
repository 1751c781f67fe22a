/* csrc/attention/ptx.cuh on the host: the instructions by their definitions. Shared memory is an array,
 * an address of it an offset. */
#pragma once

#include <cstdlib>

#include "cuda_bf16.h"

namespace attention {

alignas(128) inline uint8_t memory[232448];

inline uint32_t shared_address(const void *at) {
    return static_cast<uint32_t>(static_cast<const uint8_t *>(at) - memory);
}

inline void copy(uint32_t to, const void *from, bool there, uint32_t bytes) {
    const auto place = reinterpret_cast<uintptr_t>(from);
    if (to % bytes || place % bytes) std::abort();
    if (there)
        std::memcpy(memory + to, from, bytes);
    else
        std::memset(memory + to, 0, bytes);
}
inline void copy16(uint32_t to, const void *from, bool there) { copy(to, from, there, 16); }
inline void copy8(uint32_t to, const void *from, bool there) { copy(to, from, there, 8); }
inline void copy_commit() {}
inline void copy_wait_all() {}
inline void copy_wait_but_one() {}

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
    emulated::exchange([&](emulated::Warp &w) { w.address[emulated::lane()] = at; },
                       [&](emulated::Warp &w) {
                           for (int i = 0; i < 4; ++i) {
                               uint32_t pair[2];
                               for (int j = 0; j < 2; ++j) {
                                   const int row = TRANSPOSED ? 2 * t + j : g, column = TRANSPOSED ? g : 2 * t + j;
                                   pair[j] = value_at(w.address[8 * i + row] + 2 * column);
                               }
                               r[i] = pair[0] | pair[1] << 16;
                           }
                           return 0;
                       });
}
inline void load_matrices(uint32_t (&r)[4], uint32_t at) { matrices<false>(r, at); }
inline void load_transposed(uint32_t (&r)[4], uint32_t at) { matrices<true>(r, at); }

/* m16n8k16: where the instruction's definition says that lanes hold A, B and D. */
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int lane = emulated::lane(), g = lane / 4, t = lane % 4;
    emulated::exchange(
        [&](emulated::Warp &w) {
            std::copy(a, a + 4, w.a[lane]);
            w.b[lane][0] = b0, w.b[lane][1] = b1;
        },
        [&](emulated::Warp &w) {
            for (int i = 0; i < 4; ++i) {
                const int row = g + i / 2 * 8, column = 2 * t + i % 2;
                double sum = d[i];
                for (int k = 0; k < 16; ++k) {
                    const uint32_t x = w.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
                    const uint32_t y = w.b[column * 4 + k % 8 / 2][k / 8];
                    sum += static_cast<double>(emulated::of_pair(x, k % 2)) * emulated::of_pair(y, k % 2);
                }
                d[i] = static_cast<float>(sum);
            }
            return 0;
        });
}

inline uint32_t pack(float low, float high) {
    return emulated::rounded(low) | static_cast<uint32_t>(emulated::rounded(high)) << 16;
}

inline uint32_t times(uint32_t a, uint32_t b) {
    using emulated::of_pair;
    const auto one = [&](int i) { return emulated::rounded(static_cast<double>(of_pair(a, i)) * of_pair(b, i)); };
    return one(0) | static_cast<uint32_t>(one(1)) << 16;
}

inline float power(float x) { return std::exp2(x); }
inline void let_next_start() {}
inline void wait_for_previous() {}

} // namespace attention
