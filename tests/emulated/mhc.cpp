/* mHC's one launch of this CPU. */
#include "one.cu"

namespace {

template <int TILES, int HALVES>
void run(const mhc_args &a) {
    const int groups = (a.tokens + a.rows - 1) / a.rows;
    const auto kernel = a.x ? mhc::one_launch<TILES, HALVES, true> : mhc::one_launch<TILES, HALVES, false>;
    const auto grid = static_cast<unsigned>(groups * (a.hidden / a.columns) + a.tokens);
    emulated::run(mhc::THREADS, {grid, 1, 1}, [=] { kernel(a); });
}

} // namespace

extern "C" {

int mhc_abi(void) { return MHC_ABI; }
const char *mhc_error(void) { return ""; }

int mhc_one_launch(const mhc_args *args, void *) {
    const bool wide = args->columns == 128;
    if (args->rows == 8)
        wide ? run<1, 1>(*args) : run<1, 2>(*args);
    else
        wide ? run<2, 1>(*args) : run<2, 2>(*args);
    return CALL_OK;
}

} // extern "C"
