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

struct Early {
  float low, high;  // of the residual
};

__device__ __forceinline__ Early early(const Epilogue& out, int tile, int r, int n) {
  const int row = tile * 16 + r;
  const bf16* source = out.residual + static_cast<long long>(n) * M + row;
  Early part{0.0f, 0.0f};
  if (row < M) part.low = bf16_to_float(__ldcg(source));
  if (row + 8 < M) part.high = bf16_to_float(__ldcg(source + 8));
  return part;
}

__device__ __forceinline__ void finish(const Epilogue& out, const Early& part, int tile, int r, int n, float low,
                                       float high) {
  const int row = tile * 16 + r;
  bf16* target = out.residual + static_cast<long long>(n) * M + row;
  const bool has_bias = out.bias != nullptr;
  if (row < M) target[0] = float_to_bf16(part.low + (has_bias ? low + out.bias[row] : low));
  if (row + 8 < M) target[8] = float_to_bf16(part.high + (has_bias ? high + out.bias[row + 8] : high));
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
