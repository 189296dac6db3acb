// gate_up_silu: RMSNorm, then silu(gate x) * (up x), for the rows of a decode step.
//
// A tile of 16 weight rows is 8 of gate and the 8 of up that belong to them, so that a thread holds both.
//
// Launch    NT > 0: skinny_gemm.cuh, which norms too; NT = 0: tile_gemm.cuh, after rms_norm
// Layout    x [rows, K]; weight [2 FFN, K], gate first; out [rows, FFN]: bfloat16; bias float32 [2 FFN] or null
// Defines   K, FFN, TILES = FFN / 8, QUARTERS, NORM = 1, NT, and MB, NB where NT is 0
// Traffic   the weight once
// Numerics  x times norm weight is rounded to bfloat16; 1 / rms in float32 after the product
// Checked   tests/gpu/test_gate_up_silu.py against service/tensor/cpu/gate_up_silu.py

#include "common.cuh"
#include "mma.cuh"
#include "slices.cuh"

struct Epilogue {
  const float* bias;
  bf16* out;
};

static_assert(FFN % 8 == 0, "gate and up are paired in eights");

__device__ __forceinline__ long long weight_row(int tile, int r) {
  return static_cast<long long>(r < 8 ? 0 : FFN - 8) + tile * 8 + r;
}

struct Early {};

__device__ __forceinline__ Early early(const Epilogue&, int, int, int) { return {}; }

__device__ __forceinline__ void finish(const Epilogue& out, const Early&, int tile, int r, int n, float gate,
                                       float up) {
  const int column = tile * 8 + r;
  if (out.bias != nullptr) {
    gate += out.bias[column];
    up += out.bias[FFN + column];
  }
  out.out[static_cast<long long>(n) * FFN + column] = float_to_bf16(gate / (1.0f + __expf(-gate)) * up);
}

#if NT > 0
#include "skinny_gemm.cuh"

extern "C" __global__ __launch_bounds__(512, NT <= 2 ? 2 : 1)
void gate_up_silu(const bf16* __restrict__ x, int rows, const bf16* __restrict__ weight,
                  const float* __restrict__ norm, float eps, const float* __restrict__ bias, bf16* out) {
  skinny_gemm(x, nullptr, rows, weight, norm, eps, Epilogue{bias, out});
}
#else
#include "tile_gemm.cuh"

extern "C" __global__ __launch_bounds__(256, 1)
void gate_up_silu(const bf16* __restrict__ x, int rows, const bf16* __restrict__ weight,
                  const float* __restrict__ scales, const float* __restrict__ bias, bf16* out) {
  tile_gemm(x, rows, weight, scales, Epilogue{bias, out});
}
#endif
