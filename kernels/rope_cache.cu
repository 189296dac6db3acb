// rope_cache: what follows the QKV projection where it is not fused: bias, q/k norm, RoPE, the write to the cache.
//
// Launch    grid (rows, ceil((HEADS + 2 KV_HEADS) / 16)), block (256): 16 lanes a head
// Layout    raw bfloat16 [rows, (HEADS + 2 KV_HEADS) HEAD_DIM]; bias float32 or null; q_norm, k_norm float32
//           [HEAD_DIM] or null; rope.cuh
// Defines   HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE
// Traffic   raw read once, as much written
// Numerics  float32 between one read and one rounding
// Checked   tests/gpu/test_qkv_rope_cache.py

#include "common.cuh"
#include "rope.cuh"

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "16 lanes, eight components each");

extern "C" __global__ __launch_bounds__(256)
void rope_cache(const bf16* __restrict__ raw, const float* __restrict__ bias, const float* __restrict__ q_norm,
                const float* __restrict__ k_norm, float eps, const float* __restrict__ rope,
                const int* __restrict__ positions, const int* __restrict__ slots, bf16* q, bf16* keys,
                bf16* values) {
  constexpr int HALF = HEAD_DIM / 2;
  const int part = threadIdx.x & 15, j = part * 4, head = blockIdx.y * 16 + (threadIdx.x >> 4), row = blockIdx.x;
  launch_dependents();
  wait_for_previous();
  const bool is_inside = head < HEADS + 2 * KV_HEADS && j < HALF;
  const long long source = (static_cast<long long>(row) * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + j;
  float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
  if (is_inside) {
    low = unpack_bf16x4(load8(raw + source));
    high = unpack_bf16x4(load8(raw + source + HALF));
    if (bias != nullptr) {
      low = low + load_float4(bias + head * HEAD_DIM + j);
      high = high + load_float4(bias + head * HEAD_DIM + j + HALF);
    }
  }
  float square = low.x * low.x + low.y * low.y + low.z * low.z + low.w * low.w;
  square += high.x * high.x + high.y * high.y + high.z * high.z + high.w * high.w;
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
  if (!is_inside) return;
  const float* norm = head < HEADS ? q_norm : head < HEADS + KV_HEADS ? k_norm : nullptr;
  if (norm != nullptr) {
    const float scale = rsqrtf(square / HEAD_DIM + eps);
    const float4 left = load_float4(norm + j), right = load_float4(norm + j + HALF);
    low = make_float4(low.x * scale * left.x, low.y * scale * left.y, low.z * scale * left.z, low.w * scale * left.w);
    high = make_float4(high.x * scale * right.x, high.y * scale * right.y, high.z * scale * right.z,
                       high.w * scale * right.w);
  }
  const RopeTargets to{rope, positions, slots, q, keys, values};
  store_rotated(to, load_rope(to, row, head, j), row, head, j, low, high);
}
