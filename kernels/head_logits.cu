// head_logits: final RMSNorm and LM head of the rows that are sampled.
//
// Launch    WGS > 0: warpgroup_gemm.cuh (sm_90a); WGS = 0: skinny_gemm.cuh; rms_norm.cu comes before
// Layout    x [rows, K], weight [at least M, K]: bfloat16; out float32 [rows, M]
// Defines   K, M (ids of the tokenizer), TILES = ceil(M / 16), PARTS, NORM = 0; and those of the header
// Traffic   the weight once, 4 * rows * M bytes written
// Numerics  as gate_up_silu.cu
// Checked   tests/gpu/test_head_logits.py against service/tensor/cpu/head_logits.py

#include "common.cuh"
#include "mma.cuh"
#include "slices.cuh"
#if GROUP
#include "int8.cuh"
#endif

struct Epilogue {
  float* out;
};

__device__ __forceinline__ long long weight_row(int tile, int r) {
  const long long row = tile * 16 + r;
  return row < M ? row : -1;
}

__device__ __forceinline__ int2 tile_place(int tile) { return make_int2(tile, 0); }

struct Early {};

__device__ __forceinline__ Early early(const Epilogue&, int, int, int) { return {}; }

__device__ __forceinline__ void finish(const Epilogue& out, const Early&, int tile, int r, int n, float4 low,
                                       float4 high) {
  const int row = tile * 16 + r;
  float* target = out.out + static_cast<long long>(n) * M + row;
  const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (M % 4 == 0 && row + 12 <= M) {
    *reinterpret_cast<float4*>(target) = low;
    *reinterpret_cast<float4*>(target + 8) = high;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int offset = i & 3 | (i & 4) << 1;
    if (row + offset < M) target[offset] = values[i];
  }
}

#if WGS > 0
#include "warpgroup_gemm.cuh"

extern "C" __global__ __launch_bounds__(THREADS + 32, MIN_BLOCKS)
void head_logits(WEIGHT_PARAMETERS, const __grid_constant__ TensorMap x, int rows, float eps,
                float* out) {
  warpgroup_gemm(WEIGHT, x, rows, eps, Epilogue{out});
}
#else
#include "skinny_gemm.cuh"

extern "C" __global__ __launch_bounds__(512, MIN_BLOCKS)
void head_logits(WEIGHT_PARAMETERS, const bf16* __restrict__ x, int rows, float eps,
                float* out) {
  skinny_gemm(WEIGHT, x, rows, eps, Epilogue{out});
}
#endif
