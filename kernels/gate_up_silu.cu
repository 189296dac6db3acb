// gate_up_silu: RMSNorm, then silu(gate x) * (up x), for the rows of a decode step.
//
// A tile of 16 weight rows is 8 of gate and the 8 of up that belong to them, so that a thread holds both.
//
// Launch    WGS > 0: warpgroup_gemm.cuh (sm_90a); WGS = 0: skinny_gemm.cuh
// Layout    x [rows, K]; weight [2 FFN, K], gate first; out [rows, FFN]: bfloat16; bias float32 [2 FFN] or null
// Defines   K, FFN, TILES = FFN / 8, PARTS, NORM = 1; and those of the header
// Traffic   the weight once
// Numerics  the norm's weight is in the weight, rounded to bfloat16; 1 / rms in float32 after the product
// Checked   tests/gpu/test_gate_up_silu.py against service/tensor/cpu/gate_up_silu.py

#include "common.cuh"
#include "mma.cuh"
#include "slices.cuh"
#if GROUP
#include "int8.cuh"
#endif

struct Epilogue {
  const float* bias;
  bf16* out;
};

static_assert(FFN % 8 == 0, "gate and up are paired in eights");

__device__ __forceinline__ long long weight_row(int tile, int r) {
  return static_cast<long long>(r < 8 ? 0 : FFN - 8) + tile * 8 + r;
}

__device__ __forceinline__ int2 tile_place(int tile) { return make_int2(tile, 0); }

struct Early {};

__device__ __forceinline__ Early early(const Epilogue&, int, int, int) { return {}; }

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

__device__ __forceinline__ void finish(const Epilogue& out, const Early&, int tile, int r, int n, float4 gate,
                                       float4 up) {
  const int column = tile * 8 + r;
  if (out.bias != nullptr) {
    gate = gate + load_float4(out.bias + column);
    up = up + load_float4(out.bias + FFN + column);
  }
  const float4 result = make_float4(gated(gate.x, up.x), gated(gate.y, up.y), gated(gate.z, up.z), gated(gate.w, up.w));
  store_bf16x4(out.out + static_cast<long long>(n) * FFN + column, result);
}

#if WGS > 0
#include "warpgroup_gemm.cuh"

extern "C" __global__ __launch_bounds__(THREADS + 32, MIN_BLOCKS)
void gate_up_silu(WEIGHT_PARAMETERS, const __grid_constant__ TensorMap x, int rows, float eps,
                 const float* __restrict__ bias, bf16* out) {
  warpgroup_gemm(WEIGHT, x, rows, eps, Epilogue{bias, out});
}
#else
#include "skinny_gemm.cuh"

extern "C" __global__ __launch_bounds__(512, MIN_BLOCKS)
void gate_up_silu(WEIGHT_PARAMETERS, const bf16* __restrict__ x, int rows, float eps,
                 const float* __restrict__ bias, bf16* out) {
  skinny_gemm(WEIGHT, x, rows, eps, Epilogue{bias, out});
}
#endif
