// paged_attention: decode attention over the paged cache: one row a request, context split in fixed lengths.
//
// An item is one KV head, one split of one row's context, and up to 8 query heads (the left operand of the
// products, padded to 16). Blocks take items in turn; of each item a block's warps take TOKENS tokens each. Every
// warp has a ring of its own in shared memory, where keys and values of its next items arrive while it computes.
// What the warps of a block, and then the splits of a row, give is merged in order, the latter by the block that
// comes last. So a row's bits depend on its own context alone.
//
// Source    split context: Dao et al. 2023, "Flash-Decoding for long-context inference"
// Launch    grid (at most rows * KV_HEADS * ceil(GROUP / 8) * max_splits), block (32 * WARPS), dynamic shared memory
//           of WARPS * UNITS * TOKENS * ROW_BYTES + sizeof(Merge)
// Layout    q, out bfloat16 [rows, HEADS, HEAD_DIM]; keys, values bfloat16 [blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM];
//           tables int32 [rows, table_stride]; context_lens int32 [rows]; partial float32
//           [rows, HEADS, max_splits, HEAD_DIM + 2]; arrivals int32 [rows, KV_HEADS * ceil(GROUP / 8)], zeros;
//           num_fresh: so many last tokens of a context may be written by the kernel before this one
// Defines   HEADS, KV_HEADS, HEAD_DIM (multiple of 16, at most 128), BLOCK_SIZE (a power of two); WARPS; TOKENS (16
//           or 32): a split is WARPS * TOKENS tokens; UNITS: keys or values of an item that a warp has under way
// Traffic   keys and values of the context, once
// Numerics  scores and sums in float32; probabilities rounded to bfloat16 for the second product
// Checked   tests/gpu/test_paged_attention.py against service/tensor/cpu/paged_attention.py

#include "common.cuh"
#include "mma.cuh"

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int PARTS = (GROUP + 7) / 8;  // items that share a KV head
constexpr int PER_ROW = KV_HEADS * PARTS;
constexpr int SPLIT = WARPS * TOKENS;
constexpr int OWN_HEADS = GROUP < 8 ? GROUP : 8;
constexpr int STEPS = HEAD_DIM / 16, OUT_TILES = HEAD_DIM / 8;
constexpr int ROW_BYTES = (HEAD_DIM + 63) / 64 * 128;  // of a token; 16-byte pieces are swizzled in eights
constexpr int PIECES = HEAD_DIM / 8;
constexpr int UNIT_BYTES = TOKENS * ROW_BYTES;
constexpr int NO_END = 0x7fffffff;
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(HEADS % KV_HEADS == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "shapes of this kernel");
static_assert((BLOCK_SIZE & (BLOCK_SIZE - 1)) == 0, "a power of two");

// What the warps give for an item.
struct Merge {
  float tops[WARPS][8], sums[WARPS][8];
  float mixed[WARPS][OWN_HEADS][HEAD_DIM + 8];  // padded against bank conflicts
};

struct Arguments {
  const bf16* __restrict__ q;
  const bf16* __restrict__ keys;
  const bf16* __restrict__ values;
  const int* __restrict__ tables;
  const int* __restrict__ context_lens;
  int table_stride, rows, num_items;
};

// Walks the items of a block: splits of all rows, the first splits first.
struct Cursor {
  int index, row, part, split, context;  // part: of PER_ROW

  // The item at `index`, or the next one behind it whose split has tokens.
  __device__ __forceinline__ void find(const Arguments& from) {
    for (; index < from.num_items; index += gridDim.x) {
      const int of_split = from.rows * PER_ROW, rest = index % of_split;
      split = index / of_split, row = rest / PER_ROW, part = rest % PER_ROW;
      context = __ldg(from.context_lens + row);
      if (split * SPLIT < context) return;
    }
  }
  __device__ __forceinline__ void advance(const Arguments& from) {
    index += gridDim.x;
    find(from);
  }
  __device__ __forceinline__ int first_token() const { return split * SPLIT + (threadIdx.x >> 5) * TOKENS; }
};

__device__ __forceinline__ u32 swizzled(int row, int piece) {
  return row * ROW_BYTES + ((piece & ~7) | ((piece ^ row) & 7)) * 16;
}

// Asks for this warp's keys and values, item by item.
struct Fetcher {
  Cursor cursor;
  int block;  // of the cache: where this lane's token lies
  bool has_keys;  // those of the item at the cursor have been asked for

  __device__ __forceinline__ void start(const Arguments& from) {
    cursor.index = blockIdx.x;
    cursor.find(from);
    has_keys = false;
    load_table(from);
  }

  // Long before it is needed.
  __device__ __forceinline__ void load_table(const Arguments& from) {
    if (cursor.index >= from.num_items) return;
    const int token = cursor.first_token() + (threadIdx.x & 31) % TOKENS;
    block = 0;
    if (token < cursor.context) {
      block = __ldg(from.tables + static_cast<long long>(cursor.row) * from.table_stride + token / BLOCK_SIZE);
    }
  }

  // The next unit: tokens behind the last `num_fresh` ones of the context if `old`, and those ones if `fresh`.
  __device__ __forceinline__ void issue(const Arguments& from, u32 target, int num_fresh, bool old, bool fresh) {
    if (cursor.index >= from.num_items) return;
    const int first = cursor.first_token(), context = cursor.context, stale = context - num_fresh;
    if (first < context) {
      const int lane = threadIdx.x & 31, kv_head = cursor.part / PARTS;
      const bf16* cache = has_keys ? from.values : from.keys;
#pragma unroll 4
      for (int i = 0; i < TOKENS * PIECES / 32; ++i) {
        const int r = (i * 32 + lane) / PIECES, piece = (i * 32 + lane) % PIECES, token = first + r;
        const long long page = static_cast<long long>(__shfl_sync(~0u, block, r)) * KV_HEADS + kv_head;
        const bool is_inside = token < context;
        const long long source = is_inside ? (page * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_DIM + piece * 8 : 0;
        if (token < stale ? old : fresh) copy16_async(target + swizzled(r, piece), cache + source, is_inside);
      }
    }
    if (has_keys) {
      cursor.advance(from);
      load_table(from);
    }
    has_keys = !has_keys;
  }
};

// Query heads of an item as the left operand: rows g, of 16; the other rows are zeros.
struct Query {
  u32 pairs[STEPS][2];

  __device__ __forceinline__ void load(const Arguments& from, const Cursor& cursor) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int head = cursor.part % PARTS * 8 + g;
    const bool is_inside = cursor.index < from.num_items && g < 8 && head < GROUP;
    const long long row = static_cast<long long>(cursor.row) * HEADS + cursor.part / PARTS * GROUP + head;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pairs[s][i] = 0;
        if (is_inside) pairs[s][i] = __ldcg(reinterpret_cast<const u32*>(from.q + row * HEAD_DIM) + s * 8 + i * 4 + t);
      }
    }
  }
};

// Scores of TOKENS keys -> probabilities relative to the largest score, which is returned with their sum.
__device__ __forceinline__ float2 soften(float (&scores)[TOKENS / 8][4], int num_tokens, float scale) {
  const int t = threadIdx.x & 3;
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scores[i][j] = i * 8 + t * 2 + j < num_tokens ? scores[i][j] * (scale * LOG2_E) : -INFINITY;
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
  return make_float2(top, sum);
}

__device__ __forceinline__ void multiply_keys(float (&scores)[TOKENS / 8][4], const Query& query, u32 keys) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const u32 a[4] = {query.pairs[s][0], 0, query.pairs[s][1], 0};
#pragma unroll
    for (int n = 0; n < TOKENS / 16; ++n) {
      u32 b[4];  // two groups of 8 keys, 16 components
      load_matrices(b, keys + swizzled(n * 16 + (lane & 7) + (lane >> 4) * 8, s * 2 + ((lane >> 3) & 1)));
      mma(scores[2 * n], a, b[0], b[1]);
      mma(scores[2 * n + 1], a, b[2], b[3]);
    }
  }
}

__device__ __forceinline__ void multiply_values(float (&result)[OUT_TILES][4], const float (&scores)[TOKENS / 8][4],
                                                u32 values) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < TOKENS / 16; ++n) {
    const u32 a[4] = {pack_bf16(scores[2 * n][0], scores[2 * n][1]), 0,
                      pack_bf16(scores[2 * n + 1][0], scores[2 * n + 1][1]), 0};
#pragma unroll
    for (int d = 0; d < OUT_TILES / 2; ++d) {
      u32 b[4];  // 16 tokens, two groups of 8 components
      load_matrices_transposed(b, values + swizzled(n * 16 + (lane & 15), d * 2 + (lane >> 4)));
      mma(result[2 * d], a, b[0], b[1]);
      mma(result[2 * d + 1], a, b[2], b[3]);
    }
  }
}

__device__ __forceinline__ void store_result(Merge& merge, const float2& top_and_sum,
                                             const float (&result)[OUT_TILES][4]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  if (t == 0) merge.tops[warp][g] = top_and_sum.x, merge.sums[warp][g] = top_and_sum.y;
  if (g >= OWN_HEADS) return;
#pragma unroll
  for (int n = 0; n < OUT_TILES; ++n) {
    *reinterpret_cast<float2*>(&merge.mixed[warp][g][n * 8 + t * 2]) = make_float2(result[n][0], result[n][1]);
  }
}

// One component of one head over all warps, and the largest score and the sum that belong to it.
struct Merged {
  float top, sum, value;

  __device__ __forceinline__ Merged(const Merge& merge, int h, int component) : top(-INFINITY), sum(0), value(0) {
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, merge.tops[w][h]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (merge.tops[w][h] == -INFINITY) continue;  // a warp without tokens has written nothing else
      const float factor = exp2f(merge.tops[w][h] - top);
      sum += factor * merge.sums[w][h];
      value += factor * merge.mixed[w][h][component];
    }
  }
};

// The splits of a row, in order: [num_splits, HEAD_DIM + 2], with top and sum at the end of each.
__device__ __forceinline__ float merge_splits(const float* __restrict__ splits, int num_splits, int component) {
  float top = -INFINITY, sum = 0.0f, value = 0.0f;
  for (int s = 0; s < num_splits; ++s) {
    const float* from = splits + static_cast<long long>(s) * (HEAD_DIM + 2);
    const float split_top = __ldcg(from + HEAD_DIM), next_top = fmaxf(top, split_top);
    const float old_factor = exp2f(top - next_top), factor = exp2f(split_top - next_top);
    sum = sum * old_factor + __ldcg(from + HEAD_DIM + 1) * factor;
    value = value * old_factor + __ldcg(from + component) * factor;
    top = next_top;
  }
  return value / sum;
}

extern "C" __global__ __launch_bounds__(32 * WARPS)
void paged_attention(const bf16* __restrict__ q, const bf16* __restrict__ keys, const bf16* __restrict__ values,
                     const int* __restrict__ tables, int table_stride, const int* __restrict__ context_lens,
                     float scale, bf16* __restrict__ out, float* __restrict__ partial, int max_splits,
                     int* __restrict__ arrivals, int num_fresh, int rows) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  __shared__ bool is_last;
  const u32 ring = shared_address(shared_bytes) + (threadIdx.x >> 5) * (UNITS * UNIT_BYTES);
  Merge& merge = *reinterpret_cast<Merge*>(shared_bytes + WARPS * UNITS * UNIT_BYTES);
  const Arguments from{q, keys, values, tables, context_lens, table_stride, rows, rows * PER_ROW * max_splits};

  Fetcher fetcher;
  fetcher.start(from);
  Fetcher early = fetcher;
#pragma unroll 1
  for (int unit = 0; unit < UNITS; ++unit) early.issue(from, ring + unit * UNIT_BYTES, num_fresh, true, false);
  launch_dependents();
  wait_for_previous();
#pragma unroll 1
  for (int unit = 0; unit < UNITS; ++unit) fetcher.issue(from, ring + unit * UNIT_BYTES, num_fresh, false, true);
  commit_copies();
  wait_copies<0>();

  Cursor cursor;
  cursor.index = blockIdx.x;
  cursor.find(from);
  Query query;
  query.load(from, cursor);
  u32 unit = ring;
  const u32 ring_end = ring + UNITS * UNIT_BYTES;
  while (cursor.index < from.num_items) {
    const Cursor item = cursor;
    const int num_tokens = item.context - item.first_token();  // from this warp's first on
    cursor.advance(from);
    float scores[TOKENS / 8][4] = {}, result[OUT_TILES][4] = {};
    float2 top_and_sum = make_float2(-INFINITY, 0.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // keys, values
      wait_copies<UNITS - 1>();
      __syncwarp();
      if (num_tokens > 0) {
        if (half == 0) {
          multiply_keys(scores, query, unit);
          top_and_sum = soften(scores, num_tokens, scale);
        } else {
          multiply_values(result, scores, unit);
        }
      }
      __syncwarp();
      fetcher.issue(from, unit, 0, true, true);
      commit_copies();
      unit = unit + UNIT_BYTES == ring_end ? ring : unit + UNIT_BYTES;
      if (half == 0) query.load(from, cursor);
    }
    __syncthreads();  // the item before has been read
    store_result(merge, top_and_sum, result);
    __syncthreads();

    const int first_head = item.part / PARTS * GROUP + item.part % PARTS * 8;
    const int num_heads = min(OWN_HEADS, GROUP - item.part % PARTS * 8);
    const int num_splits = (item.context + SPLIT - 1) / SPLIT;
    const long long head_row = static_cast<long long>(item.row) * HEADS + first_head;
    for (int i = threadIdx.x; i < num_heads * HEAD_DIM; i += 32 * WARPS) {
      const int h = i / HEAD_DIM, component = i % HEAD_DIM;
      const Merged merged(merge, h, component);
      if (num_splits == 1) {
        out[(head_row + h) * HEAD_DIM + component] = float_to_bf16(merged.value / merged.sum);
      } else {
        float* target = partial + ((head_row + h) * max_splits + item.split) * (HEAD_DIM + 2);
        target[component] = merged.value;
        if (component == 0) target[HEAD_DIM] = merged.top, target[HEAD_DIM + 1] = merged.sum;
      }
    }
    if (num_splits == 1) continue;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      int* counter = arrivals + item.row * PER_ROW + item.part;
      is_last = atomicAdd(counter, 1) == num_splits - 1;
      if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) continue;
    __threadfence();
    for (int i = threadIdx.x; i < num_heads * HEAD_DIM; i += 32 * WARPS) {
      const int h = i / HEAD_DIM, component = i % HEAD_DIM;
      const float* splits = partial + (head_row + h) * max_splits * (HEAD_DIM + 2);
      out[(head_row + h) * HEAD_DIM + component] = float_to_bf16(merge_splits(splits, num_splits, component));
    }
  }
}
