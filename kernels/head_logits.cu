// head_logits: final RMSNorm and LM head of the rows that are sampled.
//
// Launch    NT > 0: skinny_gemm.cuh, which norms and gathers too; NT = 0: tile_gemm.cuh, after rms_norm
// Layout    x [.., K], weight [at least M, K]: bfloat16; row_ids int32 [rows]; out float32 [rows, M]
// Defines   K, M (ids of the tokenizer), TILES = ceil(M / 16), QUARTERS, NORM = 1, NT, and MB, NB where NT is 0
// Traffic   the weight once, 4 * rows * M bytes written
// Numerics  as gate_up_silu.cu
// Checked   tests/gpu/test_head_logits.py against service/tensor/cpu/head_logits.py

#include "common.cuh"
#include "mma.cuh"
#include "slices.cuh"

struct Epilogue {
  float* out;
};

__device__ __forceinline__ long long weight_row(int tile, int r) {
  const long long row = tile * 16 + r;
  return row < M ? row : -1;
}

struct Early {};

__device__ __forceinline__ Early early(const Epilogue&, int, int, int) { return {}; }

__device__ __forceinline__ void finish(const Epilogue& out, const Early&, int tile, int r, int n, float low,
                                       float high) {
  const int row = tile * 16 + r;
  float* target = out.out + static_cast<long long>(n) * M + row;
  if (row < M) target[0] = low;
  if (row + 8 < M) target[8] = high;
}

#if NT > 0
#include "skinny_gemm.cuh"

extern "C" __global__ __launch_bounds__(512, NT <= 2 ? 2 : 1)
void head_logits(const bf16* __restrict__ x, const int* __restrict__ row_ids, int rows,
                 const bf16* __restrict__ weight, const float* __restrict__ norm, float eps, float* out) {
  skinny_gemm(x, row_ids, rows, weight, norm, eps, Epilogue{out});
}
#else
#include "tile_gemm.cuh"

extern "C" __global__ __launch_bounds__(256, 1)
void head_logits(const bf16* __restrict__ x, int rows, const bf16* __restrict__ weight,
                 const float* __restrict__ scales, float* out) {
  tile_gemm(x, rows, weight, scales, Epilogue{out});
}
#endif
