/* The C interface: checks and launches. */
#include "api.h"

#include <cstdarg>
#include <cstdio>

#include "launch.hpp"

namespace {

thread_local char message[512] = "";

int refuse(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return status;
}

bool aligned(const void *at, uintptr_t to) { return reinterpret_cast<uintptr_t>(at) % to == 0; }

int check(const mhc_args &a) {
    if (a.warps != 4 && a.warps != 8 && a.warps != 16) return refuse(MHC_BAD_ARGUMENT, "%d warps; 4, 8 or 16", a.warps);
    if (a.tokens < 0 || a.hidden < 1 || a.hidden > MHC_MOST_HIDDEN || a.hidden % (16 * a.warps))
        return refuse(MHC_BAD_ARGUMENT, "%d tokens of %d; a multiple of %d up to %d", a.tokens, a.hidden, 16 * a.warps,
                      MHC_MOST_HIDDEN);
    if (a.iterations < 1) return refuse(MHC_BAD_ARGUMENT, "%d iterations", a.iterations);
    const void *needed[] = {a.residual, a.fn, a.scale, a.base, a.post_out, a.comb_out, a.input_out, a.pre_out, a.partials, a.counters};
    for (const void *at : needed)
        if (!at) return refuse(MHC_BAD_ARGUMENT, "an argument is missing");
    if (a.x && (!a.post || !a.comb || !a.streams_out)) return refuse(MHC_BAD_ARGUMENT, "a write-back without its mixes or streams");
    const void *wide[] = {a.fn, a.post, a.comb, a.pre, a.post_out, a.comb_out, a.pre_out};
    for (const void *at : wide)
        if (!aligned(at, 16)) return refuse(MHC_BAD_ARGUMENT, "float32 tensors must lie at 16 bytes");
    const void *narrow[] = {a.x, a.residual, a.weight, a.streams_out, a.input_out, a.mean_out};
    for (const void *at : narrow)
        if (!aligned(at, 8)) return refuse(MHC_BAD_ARGUMENT, "bf16 tensors must lie at 8 bytes");
    return MHC_OK;
}

} // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int mhc_abi(void) { return MHC_ABI; }

EXPORT const char *mhc_error(void) { return message; }

EXPORT int mhc_one_launch(const mhc_args *args, void *stream) {
    if (const int status = check(*args)) return status;
    if (args->tokens == 0) return MHC_OK;
    const cudaError_t error = mhc::launch_one(*args, static_cast<cudaStream_t>(stream));
    return error == cudaSuccess ? MHC_OK : refuse(MHC_CUDA, "mHC: %s", cudaGetErrorString(error));
}

} // extern "C"
