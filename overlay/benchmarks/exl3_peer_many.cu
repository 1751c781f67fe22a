/* What benchmarks/exl3_peer_many.py calls of exllamav3 for many rows, as torch ops, and what its own
 * code asks for that this benchmark does not build: all but 2 and 3 bits of mul1.
 * Compiled beside exllamav3's sources, of which the repository holds none. */
#include <torch/library.h>

#include "quant/comp_units/exl3_moe_instances.cuh"
#include "quant/exl3_moe.cuh"
#include "quant/hadamard.cuh"
#include "quant/reconstruct.cuh"

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

/* tables: trellis, suh, svh of gate, up and down; scratch: states of gate and up, inner ones of both. */
void moe(const Tensor &x, Tensor out, const Tensor &counts, const Tensor &tokens, const Tensor &weights,
         at::TensorList scratch, double rate, at::TensorList tables, double limit, int64_t active, const Maybe &slots,
         const Maybe &base, int64_t from, int64_t to, int64_t rows) {
    TORCH_CHECK(tables.size() == 9 && scratch.size() == 4, "nine tables and four scratch tensors");
    const float k = static_cast<float>(rate);
    exl3_moe(x, out, counts, tokens, weights, scratch[0], scratch[1], scratch[2], scratch[3], 0, k, k, k, tables[0],
             tables[1], tables[2], tables[3], tables[4], tables[5], tables[6], tables[7], tables[8], false, true, false,
             true, false, true, static_cast<float>(limit), static_cast<int>(active), slots, base,
             static_cast<int>(from), static_cast<int>(to), static_cast<int>(rows));
}

void gather(Tensor out, const Tensor &slots, const Tensor &experts, const Tensor &inverse, const Tensor &starts,
            const Tensor &base, const Tensor &kind, const Tensor &weights) {
    exl3_moe_gather(out, slots, experts, inverse, starts, base, kind, weights);
}

int64_t concurrency(int64_t device) { return exl3_moe_max_concurrency(static_cast<int>(device)); }

void plain(Tensor out, const Tensor &trellis, double rate) {
    reconstruct(out, trellis, static_cast<float>(rate), false, true);
}

void whole(Tensor out, const Tensor &trellis, const Tensor &suh, const Tensor &svh, double rate) {
    reconstruct_had_slice(out, trellis, suh, svh, static_cast<float>(rate), false, true, 0);
}

void hadamard(const Tensor &x, Tensor out, const Maybe &before, const Maybe &after) {
    had_r_128(x, out, before, after, 1.0f);
}

} // namespace

TORCH_LIBRARY(spark_peer_many, m) {
    m.def("moe(Tensor x, Tensor(a!) out, Tensor counts, Tensor tokens, Tensor weights, Tensor[] scratch, float rate, "
          "Tensor[] tables, float limit, int active, Tensor? slots, Tensor? base, int low, int high, int rows) -> ()", &moe);
    m.def("gather(Tensor(a!) out, Tensor slots, Tensor experts, Tensor inverse, Tensor starts, Tensor base, Tensor kind, "
          "Tensor weights) -> ()", &gather);
    m.def("concurrency(int device) -> int", &concurrency);
    m.def("reconstruct(Tensor(a!) out, Tensor trellis, float rate) -> ()", &plain);
    m.def("reconstruct_had(Tensor(a!) out, Tensor trellis, Tensor suh, Tensor svh, float rate) -> ()", &whole);
    m.def("hadamard(Tensor x, Tensor(a!) out, Tensor? before, Tensor? after) -> ()", &hadamard);
}

/* Not built: no kernel. */
#define NONE(name) fp_exl3_moe_kernel exl3_moe_kernel_##name() { return nullptr; }
#define NO_FIRST(K) NONE(k##K##_n128_cb1) NONE(k##K##_n256_cb1)
#define NO_SECOND(K) NONE(k##K##_n128_cb2) NONE(k##K##_n256_cb2) NONE(k##K##_n128_cb2_m32) NONE(k##K##_n128_cb2_m64)
#define NO_HALF(K) NONE(h##K##_n128_cb2) NONE(h##K##_n256_cb2) NONE(h##K##_n128_cb2_m32) NONE(h##K##_n128_cb2_m64)
NO_FIRST(0) NO_FIRST(1) NO_FIRST(2) NO_FIRST(3) NO_FIRST(4) NO_FIRST(5) NO_FIRST(6) NO_FIRST(7) NO_FIRST(8)
NO_SECOND(0) NO_SECOND(1) NO_SECOND(4) NO_SECOND(5) NO_SECOND(6) NO_SECOND(7) NO_SECOND(8)
NO_HALF(1) NO_HALF(2) NO_HALF(3)
