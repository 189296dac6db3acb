// prefill_attention: causal attention of many rows of a request over its paged cache.
//
// A block takes TILE (token, query head) pairs that share a KV head, token-major, so that grouped heads share
// what is read; its 8 warps take 16 pairs each. Keys and values come in tiles of 64 tokens, two under way.
//
// Source    FlashAttention-2: Dao 2023, arXiv:2307.08691, algorithm 1
// Launch    grid (bound of tiles: prefill rows / TILE_TOKENS + requests, KV_HEADS), block (256),
//           dynamic shared memory of 4 * 64 * ROW_BYTES
// Layout    q, out bfloat16 [rows, HEADS, HEAD_DIM]; caches as paged_attention.cu; row_starts int32 [requests + 1];
//           context_lens int32 [requests]; tables int32 [requests, table_stride]; requests from `first_request` on
// Defines   HEADS, KV_HEADS, HEAD_DIM (multiple of 16, at most 128), BLOCK_SIZE (a power of two)
// Traffic   keys and values once a tile, mostly from L2
// Numerics  scores and sums in float32; probabilities rounded to bfloat16 for the second product
// Checked   tests/gpu/test_paged_attention.py against service/tensor/cpu/paged_attention.py

#include "common.cuh"
#include "mma.cuh"

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int TILE = 128, TILE_TOKENS = TILE / GROUP, KEYS = 64;
constexpr int STEPS = HEAD_DIM / 16, OUT_TILES = HEAD_DIM / 8;
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;  // units of 16 bytes are swizzled in eights
constexpr int UNITS = HEAD_DIM / 8;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(GROUP <= TILE && HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "shapes of this kernel");

__device__ __forceinline__ u32 swizzled(int row, int unit) {
  return row * ROW_BYTES + ((unit & ~7) | ((unit ^ row) & 7)) * 16;
}

__device__ __forceinline__ void copy_tile(u32 target, const bf16* __restrict__ keys, const bf16* __restrict__ values,
                                          const int* __restrict__ table, int kv_head, int first, int last) {
  for (int item = threadIdx.x; item < KEYS * UNITS; item += 256) {
    const int r = item / UNITS, unit = item % UNITS, token = first + r;
    const bool is_inside = token < last;
    long long source = 0;
    if (is_inside) {
      const long long block = table[token / BLOCK_SIZE];
      source = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM + unit * 8;
    }
    copy16_async(target + swizzled(r, unit), keys + source, is_inside);
    copy16_async(target + TILE_BYTES + swizzled(r, unit), values + source, is_inside);
  }
}

extern "C" __global__ __launch_bounds__(256)
void prefill_attention(const bf16* __restrict__ q, const bf16* __restrict__ keys, const bf16* __restrict__ values,
                       const int* __restrict__ row_starts, const int* __restrict__ context_lens,
                       const int* __restrict__ tables, int table_stride, int first_request, int num_requests,
                       float scale, bf16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const u32 ring = shared_address(shared_bytes);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, kv_head = blockIdx.y;
  launch_dependents();
  wait_for_previous();

  int request = first_request, tile = blockIdx.x;
  for (; request < num_requests; ++request) {
    const int tiles = (row_starts[request + 1] - row_starts[request] + TILE_TOKENS - 1) / TILE_TOKENS;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (request >= num_requests) return;
  const int start = row_starts[request], num_rows = row_starts[request + 1] - start;
  const int context = context_lens[request], before = context - num_rows;  // keys before the request's first row
  tile = (num_rows + TILE_TOKENS - 1) / TILE_TOKENS - 1 - tile;  // the longest first
  const int first_row = tile * TILE_TOKENS, last_row = min(first_row + TILE_TOKENS, num_rows);
  const int last_key = before + last_row;  // exclusive
  const int* table = tables + static_cast<long long>(request) * table_stride;

  int seen[2];  // keys that this lane's two pairs may look at
  long long source[2];
  bool is_inside[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = warp * 16 + g + i * 8, row = first_row + pair / GROUP;
    is_inside[i] = pair / GROUP < TILE_TOKENS && row < last_row;
    seen[i] = is_inside[i] ? before + row + 1 : 0;
    source[i] = (static_cast<long long>(start + row) * HEADS + kv_head * GROUP + pair % GROUP) * HEAD_DIM;
  }
  u32 query[STEPS][4];
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = s * 16 + t * 2 + (i >> 1) * 8;
      query[s][i] = is_inside[i & 1] ? *reinterpret_cast<const u32*>(q + source[i & 1] + column) : 0;
    }
  }

  float result[OUT_TILES][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  const int num_tiles = (last_key + KEYS - 1) / KEYS;
  copy_tile(ring, keys, values, table, kv_head, 0, last_key);
  commit_copies();
  for (int k = 0; k < num_tiles; ++k) {
    if (k + 1 < num_tiles) {
      copy_tile(ring + ((k + 1) & 1) * 2 * TILE_BYTES, keys, values, table, kv_head, (k + 1) * KEYS, last_key);
    }
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const u32 key_tile = ring + (k & 1) * 2 * TILE_BYTES, value_tile = key_tile + TILE_BYTES;

    float scores[KEYS / 8][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        u32 b[4];  // two groups of 8 keys, 16 components
        load_matrices(b, key_tile + swizzled(n * 16 + (lane & 7) + (lane >> 4) * 8, s * 2 + ((lane >> 3) & 1)));
        mma(scores[2 * n], query[s], b[0], b[1]);
        mma(scores[2 * n + 1], query[s], b[2], b[3]);
      }
    }
    float next_top[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = k * KEYS + n * 8 + t * 2 + (i & 1);
        scores[n][i] = key < seen[i >> 1] ? scores[n][i] * (scale * LOG2_E) : -INFINITY;
        next_top[i >> 1] = fmaxf(next_top[i >> 1], scores[n][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      next_top[i] = fmaxf(next_top[i], __shfl_xor_sync(~0u, next_top[i], 1));
      next_top[i] = fmaxf(next_top[i], __shfl_xor_sync(~0u, next_top[i], 2));
      const float shift = next_top[i] == -INFINITY ? 0.0f : next_top[i];
      const float factor = exp2f(top[i] - shift);
      top[i] = next_top[i];
      next_top[i] = shift;
      sum[i] *= factor;
#pragma unroll
      for (int n = 0; n < OUT_TILES; ++n) {
        result[n][2 * i] *= factor;
        result[n][2 * i + 1] *= factor;
      }
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exp2f(scores[n][i] - next_top[i >> 1]);
        sum[i >> 1] += scores[n][i];
      }
    }
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      const u32 weights[4] = {pack_bf16(scores[2 * n][0], scores[2 * n][1]),
                              pack_bf16(scores[2 * n][2], scores[2 * n][3]),
                              pack_bf16(scores[2 * n + 1][0], scores[2 * n + 1][1]),
                              pack_bf16(scores[2 * n + 1][2], scores[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < OUT_TILES / 2; ++d) {
        u32 b[4];  // 16 keys, two groups of 8 components
        load_matrices_transposed(b, value_tile + swizzled(n * 16 + (lane & 15), d * 2 + (lane >> 4)));
        mma(result[2 * d], weights, b[0], b[1]);
        mma(result[2 * d + 1], weights, b[2], b[3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    if (!is_inside[i]) continue;
#pragma unroll
    for (int n = 0; n < OUT_TILES; ++n) {
      *reinterpret_cast<u32*>(out + source[i] + n * 8 + t * 2) =
          pack_bf16(result[n][2 * i] / sum[i], result[n][2 * i + 1] / sum[i]);
    }
  }
}
