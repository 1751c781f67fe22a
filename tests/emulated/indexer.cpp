/* The indexer's kernels of this CPU. */
#include "choose.cu"
#include "scores.cu"
#include "scores_rows.cu"

namespace {
int room = 0;
} // namespace

extern "C" {

/* Of the choice's keys in shared memory; 0: none. */
__attribute__((visibility("default"))) void keep(int values) { room = values; }
/* How many the last CTA put there. */
__attribute__((visibility("default"))) int kept(void) {
    const auto *keys = reinterpret_cast<const uint32_t *>(ptx::memory);
    return static_cast<int>(std::find(keys, keys + sizeof(ptx::memory) / 4, UINT32_MAX) - keys);
}

int indexer_abi(void) { return INDEXER_ABI; }
const char *indexer_error(void) { return ""; }

int indexer_scores(const indexer_step *step, const indexer_scores_args *args, void *) {
    using namespace indexer;
    const dim3 grid = {static_cast<unsigned>(step->requests * args->parts), static_cast<unsigned>(args->splits), 1};
    if (args->group > 1) {
        const auto kernel = args->held == 1 ? rows_at_once<1> : rows_at_once<3>;
        const int warps = args->held == 1 ? TEAM<1> : TEAM<3>;
        emulated::run(32 * warps, grid, [=] { kernel(*step, *args); }, begin_memory);
        return CALL_OK;
    }
    emulated::run(THREADS, grid, [=] {
        if (args->chosen)
            one_row<true>(*step, *args);
        else
            one_row<false>(*step, *args);
    });
    return CALL_OK;
}

int indexer_choose(const indexer_step *step, const indexer_choose_args *args, void *) {
    const auto rows = static_cast<unsigned>(step->rows - step->first_row);
    emulated::run(indexer::CHOOSERS, {rows, 1, 1}, [=] { indexer::choose(*step, *args, room); }, ptx::begin_memory);
    return CALL_OK;
}

} // extern "C"
