// paged_attention: decode attention over the paged cache: one row a request, context split in fixed lengths.
//
// A block takes one KV head, one split of 256 tokens of one row, and up to 8 query heads (the left operand of
// the products, padded to 16); each of its 8 warps takes 32 tokens. Components of a head are summed in a
// permuted order, so that keys and queries come in 16-byte loads straight to operand registers. What splits
// give is merged in order by the block that comes last; one split writes the result at once. So a row's bits
// depend on its own context alone.
//
// Source    split context: Dao et al. 2023, "Flash-Decoding for long-context inference"
// Launch    grid (splits of the longest context, KV_HEADS * ceil(GROUP / 8), rows), block (256), static shared memory
// Layout    q, out bfloat16 [rows, HEADS, HEAD_DIM]; keys, values bfloat16 [blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM];
//           tables int32 [rows, table_stride]; context_lens int32 [rows]; partial float32
//           [rows, HEADS, max_splits, HEAD_DIM + 2]; arrivals int32 [rows, KV_HEADS * ceil(GROUP / 8)], zeros;
//           num_fresh: so many last tokens of a context may be written by the kernel before this one
// Defines   HEADS, KV_HEADS, HEAD_DIM (multiple of 16, at most 128), BLOCK_SIZE (a power of two)
// Traffic   keys and values of the context, once
// Numerics  scores and sums in float32; probabilities rounded to bfloat16 for the second product
// Checked   tests/gpu/test_paged_attention.py against service/tensor/cpu/paged_attention.py

#include "common.cuh"
#include "mma.cuh"

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int PARTS = (GROUP + 7) / 8;            // blocks that share a KV head
constexpr int SPLIT = 256, WARPS = 8, TOKENS = SPLIT / WARPS;
constexpr int KEY_CHUNKS = (HEAD_DIM + 31) / 32;  // 16-byte loads of a lane for a key
constexpr int VALUE_CHUNKS = (HEAD_DIM + 63) / 64;
constexpr int OWN_HEADS = GROUP < 8 ? GROUP : 8;
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(HEADS % KV_HEADS == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "shapes of this kernel");
static_assert((BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0, "a power of two");

__device__ __forceinline__ long long cache_row(const int* __restrict__ table, int token, int kv_head) {
  const long long block = table[token / BLOCK_SIZE];
  return ((block * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM;
}

// This warp's keys and values, in operand layout: of tokens from `from` to before `to`, and zeros for others
// where `clears` says so.
struct WarpCache {
  uint4 keys[TOKENS / 8][KEY_CHUNKS];
  uint4 values[TOKENS / 16][4][VALUE_CHUNKS];

  __device__ __forceinline__ void load(const bf16* __restrict__ k, const bf16* __restrict__ v,
                                       const int* __restrict__ table, int first, int from, int to, int kv_head,
                                       bool clears) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
      const int token = first + i * 8 + g;
      const bool is_inside = token >= from && token < to;
      if (!is_inside && !clears) continue;
      const bf16* row = k + (is_inside ? cache_row(table, token, kv_head) : 0);
#pragma unroll
      for (int c = 0; c < KEY_CHUNKS; ++c) {
        const int column = c * 32 + t * 8;
        keys[i][c] = is_inside && column < HEAD_DIM ? load16(row + column) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int j = 0; j < TOKENS / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first + j * 16 + t * 2 + (i & 1) + (i >> 1) * 8;
        const bool is_inside = token >= from && token < to;
        if (!is_inside && !clears) continue;
        const bf16* row = v + (is_inside ? cache_row(table, token, kv_head) : 0);
#pragma unroll
        for (int c = 0; c < VALUE_CHUNKS; ++c) {
          const int column = c * 64 + g * 8;
          values[j][i][c] = is_inside && column < HEAD_DIM ? load16(row + column) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
};

__device__ __forceinline__ u32 element(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

extern "C" __global__ __launch_bounds__(256)
void paged_attention(const bf16* __restrict__ q, const bf16* __restrict__ keys, const bf16* __restrict__ values,
                     const int* __restrict__ tables, int table_stride, const int* __restrict__ context_lens,
                     float scale, bf16* __restrict__ out, float* __restrict__ partial, int max_splits,
                     int* __restrict__ arrivals, int num_fresh) {
  __shared__ float tops[WARPS][8], sums[WARPS][8];
  __shared__ float mixed[WARPS][OWN_HEADS][HEAD_DIM];
  __shared__ bool is_last;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int split = blockIdx.x, row = blockIdx.z, kv_head = blockIdx.y / PARTS, part = blockIdx.y % PARTS;
  const int head = kv_head * GROUP + part * 8;  // the first of this block's
  const int num_heads = min(OWN_HEADS, GROUP - part * 8);
  const int context = context_lens[row], num_splits = (context + SPLIT - 1) / SPLIT;
  const int* table = tables + static_cast<long long>(row) * table_stride;
  const int first = split * SPLIT + warp * TOKENS;

  WarpCache cache;
  const int stale = max(0, context - num_fresh);
  if (split < num_splits) cache.load(keys, values, table, first, 0, stale, kv_head, true);
  launch_dependents();
  wait_for_previous();
  if (split >= num_splits) return;
  if (context > first && stale < first + TOKENS) cache.load(keys, values, table, first, stale, context, kv_head, false);

  float scores[TOKENS / 8][4] = {};
#pragma unroll
  for (int c = 0; c < KEY_CHUNKS; ++c) {
    uint4 query = make_uint4(0, 0, 0, 0);
    const int column = c * 32 + t * 8;
    if (g < num_heads && column < HEAD_DIM) {
      query = load16(q + (static_cast<long long>(row) * HEADS + head + g) * HEAD_DIM + column);
    }
    const u32 first_half[4] = {query.x, 0, query.y, 0}, second_half[4] = {query.z, 0, query.w, 0};
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
      mma(scores[i], first_half, cache.keys[i][c].x, cache.keys[i][c].y);
      mma(scores[i], second_half, cache.keys[i][c].z, cache.keys[i][c].w);
    }
  }

  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool is_inside = first + i * 8 + t * 2 + j < context;
      scores[i][j] = is_inside ? scores[i][j] * (scale * LOG2_E) : -INFINITY;
      top = fmaxf(top, scores[i][j]);
    }
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scores[i][j] = exp2f(scores[i][j] - shift);
      sum += scores[i][j];
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);

  float result[VALUE_CHUNKS][8][4] = {};
#pragma unroll
  for (int j = 0; j < TOKENS / 16; ++j) {
    const u32 weights[4] = {pack_bf16(scores[2 * j][0], scores[2 * j][1]), 0,
                            pack_bf16(scores[2 * j + 1][0], scores[2 * j + 1][1]), 0};
#pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // column g of product i is component 64 c + 8 g + i
        const u32 select = i & 1 ? 0x7632 : 0x5410;
        const u32 b0 = __byte_perm(element(cache.values[j][0][c], i / 2), element(cache.values[j][1][c], i / 2), select);
        const u32 b1 = __byte_perm(element(cache.values[j][2][c], i / 2), element(cache.values[j][3][c], i / 2), select);
        mma(result[c][i], weights, b0, b1);
      }
    }
  }

  if (t == 0) tops[warp][g] = top, sums[warp][g] = sum;
  if (g < num_heads) {
#pragma unroll
    for (int c = 0; c < VALUE_CHUNKS; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int component = c * 64 + (t * 2 + j) * 8 + i;
          if (component < HEAD_DIM) mixed[warp][g][component] = result[c][i][j];
        }
      }
    }
  }
  __syncthreads();

  float* own_partial = partial + (static_cast<long long>(row) * HEADS + head) * max_splits * (HEAD_DIM + 2);
  for (int item = threadIdx.x; item < num_heads * HEAD_DIM; item += 256) {
    const int h = item / HEAD_DIM, component = item % HEAD_DIM;
    float block_top = -INFINITY, block_sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) block_top = fmaxf(block_top, tops[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float factor = tops[w][h] == -INFINITY ? 0.0f : exp2f(tops[w][h] - block_top);
      block_sum += factor * sums[w][h];
      value += factor * mixed[w][h][component];
    }
    if (num_splits == 1) {
      out[(static_cast<long long>(row) * HEADS + head + h) * HEAD_DIM + component] = float_to_bf16(value / block_sum);
    } else {
      float* target = own_partial + (static_cast<long long>(h) * max_splits + split) * (HEAD_DIM + 2);
      target[component] = value;
      if (component == 0) target[HEAD_DIM] = block_top, target[HEAD_DIM + 1] = block_sum;
    }
  }
  if (num_splits == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* counter = arrivals + row * gridDim.y + blockIdx.y;
    is_last = atomicAdd(counter, 1) == num_splits - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int item = threadIdx.x; item < num_heads * HEAD_DIM; item += 256) {
    const int h = item / HEAD_DIM, component = item % HEAD_DIM;
    const float* source = own_partial + static_cast<long long>(h) * max_splits * (HEAD_DIM + 2);
    float all_top = -INFINITY, all_sum = 0.0f, value = 0.0f;
    for (int s = 0; s < num_splits; ++s) {
      const float* from = source + static_cast<long long>(s) * (HEAD_DIM + 2);
      const float split_top = __ldcg(from + HEAD_DIM), next_top = fmaxf(all_top, split_top);
      const float old_factor = exp2f(all_top - next_top), factor = exp2f(split_top - next_top);
      all_sum = all_sum * old_factor + __ldcg(from + HEAD_DIM + 1) * factor;
      value = value * old_factor + __ldcg(from + component) * factor;
      all_top = next_top;
    }
    out[(static_cast<long long>(row) * HEADS + head + h) * HEAD_DIM + component] = float_to_bf16(value / all_sum);
  }
}
