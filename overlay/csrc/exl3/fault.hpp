/* How the interface's files say what is wrong: exl3_error()'s text is in api.cu. */
#pragma once

#include <cuda_runtime.h>

namespace exl3 {

/* Keeps the text for the calling thread; returns `status`. */
int refuse(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* EXL3_OK, or EXL3_CUDA with what CUDA said. */
int done(cudaError_t error, const char *what);
bool legal_rate(int k2, int codebook);

} // namespace exl3
