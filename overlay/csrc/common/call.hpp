/* How a C interface says what is wrong, and checks what it is given. The text of a failure is one for all
 * files of a library. */
#pragma once

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "call.h"

namespace call {

/* Of the calling thread's last failure. */
inline thread_local char message[512] = "";

/* Keeps the text; returns CALL_BAD_ARGUMENT. */
__attribute__((format(printf, 1, 2))) inline int refuse(const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return CALL_BAD_ARGUMENT;
}

/* CALL_OK, or CALL_CUDA with what CUDA said of `what`. */
inline int done(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return CALL_OK;
    std::snprintf(message, sizeof(message), "%s: %s", what, cudaGetErrorString(error));
    return CALL_CUDA;
}

/* Of NULL, too. */
inline bool aligned(const void *at, uintptr_t to) { return reinterpret_cast<uintptr_t>(at) % to == 0; }

} // namespace call
