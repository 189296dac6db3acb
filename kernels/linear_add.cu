// linear_add: residual += weight x (+ bias), for the rows of a decode step.
//
// Launch    NT > 0: skinny_gemm.cuh; NT = 0: tile_gemm.cuh
// Layout    x [rows, K]; weight [M, K]; residual [rows, M]: bfloat16; bias float32 [M] or null
// Defines   K, M, TILES = ceil(M / 16), QUARTERS, NORM = 0, NT, and MB, NB where NT is 0
// Traffic   the weight once; x from L2 once a block
// Numerics  sums in float32; one rounding to bfloat16
// Checked   tests/gpu/test_linear_add.py against service/tensor/cpu/linear_add.py

#include "common.cuh"
#include "mma.cuh"
#include "slices.cuh"

struct Epilogue {
  const float* bias;
  bf16* residual;
};

__device__ __forceinline__ long long weight_row(int tile, int r) {
  const long long row = tile * 16 + r;
  return row < M ? row : -1;
}

__device__ __forceinline__ void finish(const Epilogue& out, int tile, int r, int n, float low, float high) {
  const float results[2] = {low, high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = tile * 16 + r + i * 8;
    if (row >= M) continue;
    bf16* target = out.residual + static_cast<long long>(n) * M + row;
    const float bias = out.bias == nullptr ? 0.0f : out.bias[row];
    *target = float_to_bf16(bf16_to_float(__ldcg(target)) + (results[i] + bias));
  }
}

#if NT > 0
#include "skinny_gemm.cuh"

extern "C" __global__ __launch_bounds__(512, NT <= 2 ? 2 : 1)
void linear_add(const bf16* __restrict__ x, int rows, const bf16* __restrict__ weight,
                const float* __restrict__ bias, bf16* residual) {
  skinny_gemm(x, nullptr, rows, weight, nullptr, 0.0f, Epilogue{bias, residual});
}
#else
#include "tile_gemm.cuh"

extern "C" __global__ __launch_bounds__(256, 1)
void linear_add(const bf16* __restrict__ x, int rows, const bf16* __restrict__ weight,
                const float* __restrict__ bias, bf16* residual) {
  tile_gemm(x, rows, weight, nullptr, Epilogue{bias, residual});
}
#endif
