/* What benchmarks/exl3_peer.py calls of exllamav3, as torch ops, and what its own code asks for that
 * this benchmark does not build: rates and codebooks other than those of V4.1's pack. Compiled beside
 * exllamav3's sources, of which the repository holds none. */
#include <torch/library.h>

#include <cstdlib>
#include <string>

#include "quant/exl3_gemm.cuh"
#include "quant/exl3_gemv.cuh"
#include "quant/exl3_kernel_map.cuh"
#include "quant/exl3_moe_coop.cuh"
#include "quant/comp_units/exl3_gemv_int8_instances.cuh"
#include "quant/comp_units/exl3_moe_coop_instances.cuh"

/* Whether EXL3_INT8_GEMV was read already. */
extern bool _exl3_gemv_int8_mode_chk;

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

int64_t gemm(const Tensor &x, const Tensor &trellis, Tensor out, const Tensor &suh, const Tensor &rotated,
             const Tensor &svh) {
    return exl3_gemm(x, trellis, out, suh, rotated, svh, -1, false, true, 0);
}

int64_t mgemm(const Tensor &x, const Tensor &trellis, Tensor out, const Tensor &suh, const Tensor &rotated,
              const Tensor &svh, const Tensor &indices, double rate, const Maybe &widths, const Maybe &outs) {
    return exl3_mgemm(x, trellis, out, suh, rotated, svh, indices, std::nullopt, static_cast<float>(rate), -1, 0, 1,
                      -1, -1, 0, 1, widths, outs);
}

/* As EXL3_INT8_GEMV: 0 fp16, 1 int8 with a residual, 2 int8. */
void int8_mode(int64_t mode) {
    setenv("EXL3_INT8_GEMV", std::to_string(mode).c_str(), 1);
    _exl3_gemv_int8_mode_chk = false;
}

/* tables: trellis, suh, svh of gate, up and down; scratch: had_g, had_u, gu_g, gu_u, act, down, counters. */
void moe(const Tensor &x, const Tensor &ids, const Tensor &weights, at::TensorList tables, at::TensorList scratch,
         double gate_rate, double down_rate, double limit, Tensor out, const Maybe &shared) {
    TORCH_CHECK(tables.size() == 9 && scratch.size() == 7, "nine tables and seven scratch tensors");
    std::vector<Tensor> s(scratch.begin(), scratch.end());
    exl3_moe_coop(x, ids, weights, -1, -1, static_cast<int>(x.size(1)), tables[0], tables[1], tables[2], tables[3],
                  tables[4], tables[5], tables[6], tables[7], tables[8], std::nullopt, std::nullopt, std::nullopt,
                  static_cast<float>(gate_rate), static_cast<float>(gate_rate), static_cast<float>(down_rate), false,
                  true, MOE_COOP_ACT_SILU, static_cast<float>(limit), true, s[0], s[1], s[2], s[3], s[4], s[5], s[6],
                  out, shared, std::nullopt);
}

} // namespace

TORCH_LIBRARY(spark_peer, m) {
    m.def("gemm(Tensor x, Tensor trellis, Tensor(a!) out, Tensor suh, Tensor(b!) rotated, Tensor svh) -> int", &gemm);
    m.def("mgemm(Tensor x, Tensor trellis, Tensor(a!) out, Tensor suh, Tensor(b!) rotated, Tensor svh, Tensor indices, "
          "float rate, Tensor? widths, Tensor? outs) -> int", &mgemm);
    m.def("moe(Tensor x, Tensor ids, Tensor weights, Tensor[] tables, Tensor[] scratch, float gate_rate, "
          "float down_rate, float limit, Tensor(a!) out, Tensor? shared) -> ()", &moe);
    m.def("int8_mode(int mode) -> ()", &int8_mode);
    m.def("counters(int slots, int rows, int inter, int hidden) -> int", &exl3_moe_coop_ctr_len);
}

/* Not built. Tables without kernels: exllamav3 then says that none fits. */
#define NO_TABLES(rate)                                      \
    fp_exl3_gemm_kernel tfp_exl3_gemm_kernel_fp32_##rate[8]; \
    fp_exl3_gemm_kernel tfp_exl3_gemm_kernel_fp16_##rate[8]; \
    fp_exl3_mgemm_kernel tfp_exl3_mgemm_kernel_fp32_##rate[8]; \
    fp_exl3_mgemm_kernel tfp_exl3_mgemm_kernel_fp16_##rate[8];
#define NO_RATE(K) NO_TABLES(b##K##_cb0) NO_TABLES(b##K##_cb1) NO_TABLES(b##K##_cb2)
NO_RATE(1) NO_RATE(2) NO_RATE(3) NO_RATE(4) NO_RATE(7) NO_RATE(8)
NO_TABLES(b5_cb0) NO_TABLES(b5_cb1) NO_TABLES(b6_cb0) NO_TABLES(b6_cb1)
NO_TABLES(h1) NO_TABLES(h2) NO_TABLES(h3)

#define NOT_BUILT TORCH_CHECK(false, "exl3_peer.cu: this rate is not built")
#define NO_EXPERTS(K)                                                              \
    MoeCoopKernel exl3_moe_coop_kernel_a_k##K(int, int, bool) { NOT_BUILT; } \
    MoeCoopKernel exl3_moe_coop_kernel_b_k##K(int, bool) { NOT_BUILT; }
NO_EXPERTS(1) NO_EXPERTS(4) NO_EXPERTS(5) NO_EXPERTS(6) NO_EXPERTS(7) NO_EXPERTS(8)
#define NO_HALF(K)                                                            \
    MoeCoopKernel exl3_moe_coop_kernel_a_h##K(int, bool) { NOT_BUILT; } \
    MoeCoopKernel exl3_moe_coop_kernel_b_h##K(bool) { NOT_BUILT; }      \
    void *exl3_gemv_int8_sq_sel_h##K(int, bool, bool) { NOT_BUILT; }    \
    void *exl3_gemv_int8_coop_sel_h##K(bool, bool) { NOT_BUILT; }
NO_HALF(1) NO_HALF(2) NO_HALF(3)
#define NO_INT8(K)                                                         \
    void *exl3_gemv_int8_sq_sel_k##K(int, bool, bool) { NOT_BUILT; } \
    void *exl3_gemv_int8_coop_sel_k##K(bool, bool) { NOT_BUILT; }
NO_INT8(1) NO_INT8(2) NO_INT8(3) NO_INT8(4)
void *exl3_gemv_int8_coop_sel_k7(bool, bool) { NOT_BUILT; }
void *exl3_gemv_int8_coop_sel_k8(bool, bool) { NOT_BUILT; }

/* Its GEMV in fp16 declines 5 and 6 bits by itself, and nothing else of ours comes here. */
bool exl3_gemv_try_launch(void **, int, int, int, int rate, bool, int, bool, bool, int, cudaStream_t, void **, bool) {
    if (rate < 5) NOT_BUILT;
    return false;
}

/* Of its own kind of graph, which no call here has. */
void Graph::record_param(void *, int, int, int) { NOT_BUILT; }
