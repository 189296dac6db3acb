// linear_add: residual += weight x (+ bias), for the rows of a decode step.
//
// Launch    WGS > 0: warpgroup_gemm.cuh (sm_90a); WGS = 0: skinny_gemm.cuh
// Layout    x [rows, K]; weight [M, K]; residual [rows, M]: bfloat16; bias float32 [M] or null
// Defines   K, M, TILES = ceil(M / 16), PARTS, NORM = 0; and those of the header
// Traffic   the weight once; x from L2 once a block
// Numerics  sums in float32; one rounding to bfloat16
// Checked   tests/gpu/test_linear_add.py against service/tensor/cpu/linear_add.py

#include "common.cuh"
#include "mma.cuh"
#include "slices.cuh"
#if GROUP
#include "int8.cuh"
#endif

static_assert(M % 8 == 0, "rows are read and written in fours");

struct Epilogue {
  const float* bias;
  bf16* residual;
};

__device__ __forceinline__ long long weight_row(int tile, int r) {
  const long long row = tile * 16 + r;
  return row < M ? row : -1;
}

__device__ __forceinline__ int2 tile_place(int tile) { return make_int2(tile, 0); }

struct Early {
  uint2 low, high;  // of the residual
};

__device__ __forceinline__ Early early(const Epilogue& out, int tile, int r, int n) {
  const bf16* source = out.residual + static_cast<long long>(n) * M + tile * 16 + r;
  return {load8(source), tile * 16 + 8 < M ? load8(source + 8) : make_uint2(0, 0)};
}

__device__ __forceinline__ void finish(const Epilogue& out, const Early& part, int tile, int r, int n, float4 low,
                                       float4 high) {
  const int row = tile * 16 + r;
  const bool has_high = tile * 16 + 8 < M;
  if (out.bias != nullptr) {
    low = low + load_float4(out.bias + row);
    if (has_high) high = high + load_float4(out.bias + row + 8);
  }
  bf16* target = out.residual + static_cast<long long>(n) * M + row;
  store_bf16x4(target, unpack_bf16x4(part.low) + low);
  if (has_high) store_bf16x4(target + 8, unpack_bf16x4(part.high) + high);
}

#if WGS > 0
#include "warpgroup_gemm.cuh"

extern "C" __global__ __launch_bounds__(THREADS + 32, MIN_BLOCKS)
void linear_add(WEIGHT_PARAMETERS, const __grid_constant__ TensorMap x, int rows, float eps,
               const float* __restrict__ bias, bf16* residual) {
  warpgroup_gemm(WEIGHT, x, rows, eps, Epilogue{bias, residual});
}
#else
#include "skinny_gemm.cuh"

extern "C" __global__ __launch_bounds__(512, MIN_BLOCKS)
void linear_add(WEIGHT_PARAMETERS, const bf16* __restrict__ x, int rows, float eps,
               const float* __restrict__ bias, bf16* residual) {
  skinny_gemm(WEIGHT, x, rows, eps, Epilogue{bias, residual});
}
#endif
