/* attend.cuh's kernel on the host, a CTA after the other; without splits. */
#include "attend.cuh"

#include <thread>
#include <vector>

#include "api.h"

namespace {

using namespace attention;

template <int KEYS, int MT, bool PAIR>
void run(const Launch &p) {
    static_assert(sizeof(Shared<KEYS, MT, PAIR>) <= sizeof(memory));
    const unsigned groups = static_cast<unsigned>((p.heads + 16 * MT - 1) / (16 * MT));
    for (unsigned x = 0; x < static_cast<unsigned>(p.tokens) * groups; ++x) {
        std::memset(memory, 0xff, sizeof(memory));
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < emulated::THREADS; ++i)
            threads.emplace_back([&, i] {
                threadIdx = {i, 0, 0}, blockIdx = {x, 0, 0};
                attend<KEYS, MT, PAIR>(p);
            });
        for (std::thread &one : threads) one.join();
    }
}

} // namespace

extern "C" void emulate(const attention_args *args) {
    const attention_args &a = *args;
    Launch p{};
    p.q = static_cast<const __nv_bfloat16 *>(a.q), p.q_token = a.q_token, p.q_head = a.q_head;
    p.out = static_cast<__nv_bfloat16 *>(a.out), p.out_token = a.out_token, p.out_head = a.out_head;
    p.sink = a.sink, p.cos_sin = a.cos_sin, p.cos_sin_row = a.cos_sin_row, p.positions = a.positions;
    for (int i = 0; i < 2; ++i) {
        const attention_source &s = a.source[i];
        p.source[i] = {static_cast<const uint8_t *>(s.cache), s.stride, s.slots, s.slots_row, s.lengths, s.page, s.width,
                       s.page == 32 ? 5 : -1};
    }
    p.tokens = a.tokens, p.heads = a.heads, p.splits = 1, p.scale = a.scale * 1.4426950408889634f;
    p.cos_sin_float = a.cos_sin_float, p.positions_wide = a.positions_wide;
    const bool wide = a.heads > 16;
    if (a.pair)
        wide ? run<32, 2, true>(p) : run<32, 1, true>(p);
    else if (a.keys == 32)
        wide ? run<32, 2, false>(p) : run<32, 1, false>(p);
    else
        wide ? run<64, 2, false>(p) : run<64, 1, false>(p);
}
