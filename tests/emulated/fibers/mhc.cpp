/* mHC's kernel on this CPU. */
#include "one_launch.cu"

namespace {

template <int WARPS>
void run(const mhc_args &a) {
    const int shares = a.hidden / mhc::TILE / WARPS, projections = (a.tokens + mhc::ROWS - 1) / mhc::ROWS * shares;
    emulated::run(32 * WARPS, {static_cast<unsigned>(projections + a.tokens), 1, 1},
                  [&] { mhc::one_launch<WARPS>(a, shares, projections); });
}

} // namespace

extern "C" {

int mhc_abi(void) { return MHC_ABI; }
const char *mhc_error(void) { return ""; }

int mhc_one_launch(const mhc_args *args, void *) {
    args->warps == 4 ? run<4>(*args) : run<8>(*args);
    return 0;
}

} // extern "C"
