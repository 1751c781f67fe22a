/* What the interface's files (api.cu, many.cu) check and count alike. */
#pragma once

#include "../common/call.hpp"

namespace exl3 {

bool legal_rate(int k2, int codebook);

template <typename T>
constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

/* Parts of a scratch begin at multiples of 256 bytes. */
constexpr int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

} // namespace exl3
