/* Between the interface and the kernels' translation units. */
#pragma once

#include <cuda_runtime.h>

#include "api.h"

namespace indexer {

cudaError_t launch_scores(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream);
/* Of args.group rows of a request at once. */
cudaError_t launch_rows(const indexer_step &step, const indexer_scores_args &args, cudaStream_t stream);
/* `early`: may start while the scores are made; it waits for them itself. */
cudaError_t launch_choose(const indexer_step &step, const indexer_choose_args &args, bool early, cudaStream_t stream);

} // namespace indexer
