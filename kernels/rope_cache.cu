// rope_cache: what follows the QKV projection where it is not fused: bias, q/k norm, RoPE, the write to the cache.
//
// Launch    grid (rows, ceil((HEADS + 2 KV_HEADS) / 8)), block (256): a warp a head
// Layout    raw bfloat16 [rows, (HEADS + 2 KV_HEADS) HEAD_DIM]; bias float32 or null; q_norm, k_norm float32
//           [HEAD_DIM] or null; rope.cuh
// Defines   HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE
// Traffic   raw read once, as much written
// Numerics  float32 between one read and one rounding
// Checked   tests/gpu/test_qkv_rope_cache.py

#include "common.cuh"
#include "rope.cuh"

extern "C" __global__ __launch_bounds__(256)
void rope_cache(const bf16* __restrict__ raw, const float* __restrict__ bias, const float* __restrict__ q_norm,
                const float* __restrict__ k_norm, float eps, const float* __restrict__ rope,
                const int* __restrict__ positions, const int* __restrict__ slots, bf16* q, bf16* keys,
                bf16* values) {
  constexpr int HALF = HEAD_DIM / 2, PARTS = (HALF + 31) / 32;
  const int lane = threadIdx.x & 31, head = blockIdx.y * 8 + (threadIdx.x >> 5), row = blockIdx.x;
  launch_dependents();
  wait_for_previous();
  if (head >= HEADS + 2 * KV_HEADS) return;
  const long long first = static_cast<long long>(row) * (HEADS + 2 * KV_HEADS) * HEAD_DIM + head * HEAD_DIM;
  float low[PARTS], high[PARTS], square = 0.0f;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int j = lane + i * 32;
    low[i] = j < HALF ? bf16_to_float(__ldcg(raw + first + j)) : 0.0f;
    high[i] = j < HALF ? bf16_to_float(__ldcg(raw + first + j + HALF)) : 0.0f;
    if (bias != nullptr && j < HALF) {
      low[i] += bias[head * HEAD_DIM + j];
      high[i] += bias[head * HEAD_DIM + j + HALF];
    }
    square += low[i] * low[i] + high[i] * high[i];
  }
  const float* norm = head < HEADS ? q_norm : head < HEADS + KV_HEADS ? k_norm : nullptr;
  const float scale = rsqrtf(warp_sum(square) / HEAD_DIM + eps);
  const RopeTargets to{rope, positions, slots, q, keys, values};
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int j = lane + i * 32;
    if (j >= HALF) continue;
    if (norm != nullptr) {
      low[i] *= scale * norm[j];
      high[i] *= scale * norm[j + HALF];
    }
    store_rotated(to, load_rope(to, row, head, j), row, head, j, low[i], high[i]);
  }
}
