/* Attention's kernels of this CPU, without splits. */
#include "api.h"
#include "attend.cuh"
#include "many.cuh"

namespace {

using namespace attention;

template <typename Kernel>
void run(const Launch &p, unsigned grid, Kernel kernel) {
    emulated::run(THREADS, {grid, 1, 1}, [&] { kernel(p); }, begin_memory);
}

template <int KEYS, int MT>
void few(const Launch &p) {
    static_assert(sizeof(Shared<KEYS, MT>) <= sizeof(memory));
    run(p, static_cast<unsigned>(p.tokens) * ((p.heads + 16 * MT - 1) / (16 * MT)), attend<KEYS, MT>);
}

} // namespace

extern "C" {

int attention_abi(void) { return ATTENTION_ABI; }
const char *attention_error(void) { return ""; }

int attention_sparse(const attention_args *args, void *) {
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
    static_assert(sizeof(Many) <= sizeof(memory));
    if (a.many)
        run(p, 2, attend_many); /* of two CTAs, so that each has several tokens */
    else if (a.keys == 32)
        wide ? few<32, 2>(p) : few<32, 1>(p);
    else
        wide ? few<64, 2>(p) : few<64, 1>(p);
    return CALL_OK;
}

} // extern "C"
