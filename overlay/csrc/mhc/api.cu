/* The C interface: checks and the launch. */
#include "api.h"

#include "../common/call.hpp"
#include "../common/launch.hpp"
#include "launch.hpp"

namespace {

using namespace call;

int check(const mhc_args &a) {
    if (a.tokens < 1 || a.tokens > MHC_MOST_TOKENS) return refuse("%d rows; 1 to %d", a.tokens, MHC_MOST_TOKENS);
    if (a.columns != 64 && a.columns != 128) return refuse("%d columns of a CTA; 64 or 128", a.columns);
    if (a.rows != 8 && a.rows != 16) return refuse("%d rows of a group; 8 or 16", a.rows);
    if (a.hidden < a.columns || a.hidden > MHC_MOST_HIDDEN || a.hidden % a.columns)
        return refuse("a hidden size of %d; a multiple of %d, %d at most", a.hidden, a.columns, MHC_MOST_HIDDEN);
    if (a.iterations < 1) return refuse("%d iterations", a.iterations);
    const void *needed[] = {a.residual, a.fn,       a.scale,   a.base,   a.input,
                            a.post_out, a.comb_out, a.pre_out, a.shares, a.counters};
    for (const void *one : needed)
        if (!one) return refuse("a tensor is missing");
    if (a.x && !(a.post && a.comb && a.streams)) return refuse("an output to write back without its coefficients");
    const void *wide[] = {a.x,    a.residual, a.comb,     a.fn,       a.weight, a.streams, a.input,
                          a.mean, a.shares,   a.comb_out, a.post_out, a.pre,    a.post,    a.pre_out};
    for (const void *one : wide)
        if (!aligned(one, 16)) return refuse("a tensor that does not lie at 16 bytes");
    return CALL_OK;
}

} // namespace

extern "C" {

int mhc_abi(void) { return MHC_ABI; }

const char *mhc_error(void) { return message; }

int mhc_one_launch(const mhc_args *args, void *stream) {
    if (const int status = check(*args)) return status;
    const bool early = args->early && starts_early();
    return done(mhc::launch(*args, early, static_cast<cudaStream_t>(stream)), "mHC");
}

} // extern "C"
