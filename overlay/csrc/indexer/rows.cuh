/* Which rows there are and how far each sees, asked of the device: a graph serves any batch. */
#pragma once

#include "api.h"

namespace indexer {

/* Keys that `row` of `owner`, whose rows end before `end`, may see. */
__device__ __forceinline__ int visible(const indexer_step &step, int length, int end, int row) {
    return max(0, min((length - end + row + 1) / step.ratio, step.width));
}

} // namespace indexer
