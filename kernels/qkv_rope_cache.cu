// qkv_rope_cache: RMSNorm, the QKV projection, RoPE and the write of K and V to the paged cache, for the rows
// of a decode step. Where heads of q and k are normed (RAW), it leaves the projection to rope_cache.
//
// A tile of 16 weight rows is 8 of a head's first half and their partners of the second half.
//
// Launch    WGS > 0: warpgroup_gemm.cuh (sm_90a); WGS = 0: skinny_gemm.cuh
// Layout    x [rows, K]; weight [(HEADS + 2 KV_HEADS) HEAD_DIM, K]: bfloat16; bias float32 or null; rope.cuh;
//           raw bfloat16 [rows, (HEADS + 2 KV_HEADS) HEAD_DIM], written where RAW is 1
// Defines   K, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, RAW, TILES, PARTS, NORM = 1; and those of the header
// Traffic   the weight once
// Numerics  as gate_up_silu.cu; rotation in float32
// Checked   tests/gpu/test_qkv_rope_cache.py against service/tensor/cpu/qkv_rope_cache.py

#include "common.cuh"
#include "mma.cuh"
#include "slices.cuh"
#if GROUP
#include "int8.cuh"
#endif
#include "rope.cuh"

constexpr int HALF_DIM = HEAD_DIM / 2, HEAD_TILES = HEAD_DIM / 16;
static_assert(HEAD_DIM % 16 == 0, "a tile never spans two heads");

struct Epilogue {
  const float* bias;
  RopeTargets to;
  bf16* raw;
};

__device__ __forceinline__ long long weight_row(int tile, int r) {
  return static_cast<long long>(tile / HEAD_TILES) * HEAD_DIM + tile % HEAD_TILES * 8 + (r & 7) + (r >> 3) * HALF_DIM;
}

__device__ __forceinline__ int2 tile_place(int tile) { return make_int2(tile % HEAD_TILES, tile / HEAD_TILES); }

struct Early {
  RopePart rope;
};

__device__ __forceinline__ Early early(const Epilogue& out, int tile, int r, int n) {
#if RAW
  return {};
#else
  return {load_rope(out.to, n, tile / HEAD_TILES, tile % HEAD_TILES * 8 + r)};
#endif
}

__device__ __forceinline__ void finish(const Epilogue& out, const Early& part, int tile, int r, int n, float4 low,
                                       float4 high) {
  const int head = tile / HEAD_TILES, j = tile % HEAD_TILES * 8 + r;
  if (out.bias != nullptr) {
    low = low + load_float4(out.bias + head * HEAD_DIM + j);
    high = high + load_float4(out.bias + head * HEAD_DIM + j + HALF_DIM);
  }
#if RAW
  bf16* target = out.raw + (static_cast<long long>(n) * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + j;
  store_bf16x4(target, low);
  store_bf16x4(target + HALF_DIM, high);
#else
  store_rotated(out.to, part.rope, n, head, j, low, high);
#endif
}

#if WGS > 0
#include "warpgroup_gemm.cuh"

extern "C" __global__ __launch_bounds__(THREADS + 32, MIN_BLOCKS)
void qkv_rope_cache(WEIGHT_PARAMETERS, const __grid_constant__ TensorMap x, int rows, float eps,
                   const float* __restrict__ bias, const float* __restrict__ rope, const int* __restrict__ positions,
                   const int* __restrict__ slots, bf16* q, bf16* keys, bf16* values, bf16* raw) {
  warpgroup_gemm(WEIGHT, x, rows, eps, Epilogue{bias, {rope, positions, slots, q, keys, values}, raw});
}
#else
#include "skinny_gemm.cuh"

extern "C" __global__ __launch_bounds__(512, MIN_BLOCKS)
void qkv_rope_cache(WEIGHT_PARAMETERS, const bf16* __restrict__ x, int rows, float eps,
                   const float* __restrict__ bias, const float* __restrict__ rope, const int* __restrict__ positions,
                   const int* __restrict__ slots, bf16* q, bf16* keys, bf16* values, bf16* raw) {
  skinny_gemm(WEIGHT, x, rows, eps, Epilogue{bias, {rope, positions, slots, q, keys, values}, raw});
}
#endif
