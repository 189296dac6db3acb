// skinny_gemm: weight [M, K] times 8 * NT rows of x a block, on every card (sm_90 has warpgroup_gemm.cuh): the
// warp that needs a weight reads it, from device memory to shared memory.
//
// A block takes tiles of 16 weight rows; its 16 warps take slices of K (slices.cuh). Each warp keeps STAGES pieces
// of 16 x 64 weights, or 16 x 128 in INT8, under way; the first are asked for before the previous kernel has ended.
// The weight is the left operand of the product, so the rows of x are its eight columns.
//
// The includer defines, before: `struct Epilogue`; `weight_row(tile, r)` (row of the weight, or -1);
// `struct Early` and `early(epilogue, tile, r, n)`, what the last step reads and can be asked for while the
// product is under way; `finish(epilogue, early, tile, r, n, low, high)`, which gets results r to r + 3 (r: 0 or
// 4) and r + 8 to r + 11 of a tile for row n.
//
// Defines   K, TILES   in_features, and tiles of 16 weight rows
//           NT         groups of 8 rows of x: 1, 2 or (bfloat16 weights) 4
//           PARTS   see slices.cuh
//           GROUP      0: bfloat16 weights; 32, 64 or 128: INT8 (int8.cuh) with that many columns to a scale
//           NORM       1: scale by 1 / rms of x; the norm's weight is in a bfloat16 weight, beside an INT8 one
// Launch    grid (at most TILES, ceil(rows / (8 * NT))), block (512), dynamic shared memory of Shared bytes

#if GROUP
#define WEIGHT_PARAMETERS const unsigned char* __restrict__ packed, const uint4* __restrict__ norm
#define WEIGHT Weight{packed, norm}

struct Weight {
  const unsigned char* packed;
  const uint4* norm;
};

constexpr int PIECES = 1;                          // of a slice
constexpr int PIECE_BYTES = 2048 + 32 * GROUPS;    // of one stage of a warp: values, and scales by group and row
#else
#define WEIGHT_PARAMETERS const bf16* __restrict__ weight
#define WEIGHT weight

using Weight = const bf16*;

constexpr int PIECES = 2;
constexpr int PIECE_BYTES = 2048;
#endif

constexpr int MIN_BLOCKS = NT <= (GROUP ? 1 : 2) ? 2 : 1;  // on a multiprocessor, as registers allow
constexpr int WARPS = 16;
constexpr int STAGES = 3;
constexpr int NUM_ROUNDS = (NUM_SLICES + WARPS - 1) / WARPS;
constexpr int COLUMNS = 8 * NT;
constexpr int PAIRS = 64 * NT;  // results of a tile, two to a thread
constexpr int HELD = TILES > 15 * 128 ? 16 : TILES / 128 + 1;  // tiles whose sums wait for the next round of slices

struct Shared {
  unsigned char ring[WARPS][STAGES][PIECE_BYTES];
  float partial[2][WARPS][NT][4][32];
  float square[NORM ? NUM_SLICES : 1][COLUMNS];
  float4 held[NUM_ROUNDS > 1 ? HELD * PAIRS : 1];
  float results[COLUMNS][20];
};

// Walks a block's tiles: in batches of HELD, all tiles of a batch once for every round of slices.
struct Walk {
  int batch, round, index, count, num_tiles;

  __device__ explicit Walk(int tiles) : batch(0), round(0), index(0), num_tiles(tiles) { start_batch(); }
  __device__ void start_batch() { count = NUM_ROUNDS > 1 ? min(HELD, num_tiles - batch) : num_tiles; }
  __device__ bool is_over() const { return batch >= num_tiles; }
  __device__ int tile() const { return blockIdx.x + (batch + index) * gridDim.x; }
  __device__ void advance() {
    if (++index < count) return;
    index = 0;
    if (++round < NUM_ROUNDS) return;
    round = 0;
    batch += count;
    start_batch();
  }
};

struct PieceReader {
  Walk walk;
  int part;
  u32 ring;

  // Asks for the next piece of this warp's weights; commits a group even behind the end.
  __device__ __forceinline__ void issue(Weight weight, int stage) {
    if (!walk.is_over()) {
      copy(weight, ring + stage * PIECE_BYTES, walk.tile(), walk.round * WARPS + (threadIdx.x >> 5));
      if (++part == PIECES) {
        part = 0;
        walk.advance();
      }
    }
    commit_copies();
  }

#if GROUP
  __device__ __forceinline__ void copy(Weight weight, u32 target, int tile, int slice) const {
    const int lane = threadIdx.x & 31;
    const bool is_inside = slice < NUM_SLICES;
    const unsigned char* piece =
        weight.packed + (static_cast<long long>(tile / 4) * PACKED_PIECES + (is_inside ? slice : 0)) * PACKED_BYTES;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      copy16_async(target + q * 512 + lane * 16, piece + q * 2048 + tile % 4 * 512 + lane * 16, is_inside);
    }
    if (lane < 2 * GROUPS) {
      copy16_async(target + 2048 + lane * 16, piece + PACKED_VALUES + lane / 2 * 128 + tile % 4 * 32 + lane % 2 * 16,
                   is_inside);
    }
  }
#else
  __device__ __forceinline__ void copy(Weight weight, u32 target, int tile, int slice) const {
    const int lane = threadIdx.x & 31, unit = lane & 7;
    const int column = slice * SLICE + part * 64 + unit * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i * 4 + (lane >> 3);
      const long long row = weight_row(tile, r);
      const bool is_inside = row >= 0 && column < K;
      copy16_async(target + r * 128 + ((unit ^ (r & 7)) * 16), weight + (is_inside ? row * K + column : 0), is_inside);
    }
  }
#endif
};

// From rows of 8 contiguous components a lane to the operand layout: a 4 x 4 transpose among four lanes.
__device__ __forceinline__ void transpose_quad(u32 (&r)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(~0u, odd ? r[i] : r[i + 1], 1);
    if (odd) r[i] = got; else r[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 got = __shfl_xor_sync(~0u, upper ? r[i] : r[i + 2], 2);
    if (upper) r[i] = got; else r[i + 2] = got;
  }
}

// This warp's slice of all rows of x as it lies in memory.
struct RawOperand {
  SlicePart part[NT];

  __device__ __forceinline__ void load(const bf16* __restrict__ x, int rows, int slice) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int row = blockIdx.y * COLUMNS + n * 8 + ((threadIdx.x & 31) >> 2);
      part[n] = load_slice(x + static_cast<long long>(row) * K, slice * SLICE, row < rows && slice < NUM_SLICES);
    }
  }
};

// From memory's layout to right operands: of group n, products 2 q and 2 q + 1.
__device__ __forceinline__ void convert_operand(u32 (&b)[NT][4][4], const RawOperand& raw, int slice, Shared& shared) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    if (NORM) {
      const float square = slice_square(raw.part[n]);
      if ((lane & 3) == 0 && slice < NUM_SLICES) shared.square[NORM ? slice : 0][n * 8 + (lane >> 2)] = square;
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint4 piece = raw.part[n].piece[q];
      b[n][q][0] = piece.x;
      b[n][q][1] = piece.y;
      b[n][q][2] = piece.z;
      b[n][q][3] = piece.w;
      transpose_quad(b[n][q]);
    }
  }
}

#if GROUP
// Adds the products of a piece, a slice: group by group, each times its scales.
__device__ __forceinline__ void add_piece(float (&sum)[NT][4], u32 piece, const u32 (&b)[NT][4][4], Weight weight,
                                          int slice, int) {
  constexpr int PER_GROUP = GROUP / 32;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    float part[NT][4] = {};
#pragma unroll
    for (int q = group * PER_GROUP; q < (group + 1) * PER_GROUP; ++q) {
      u32 words[4], factors[4], a[2][4];
      load_shared(words, piece + q * 512 + lane * 16);
      if (NORM && slice < NUM_SLICES) load_factors(factors, weight.norm + (slice * 4 + q) * 4 + (lane & 3));
      widen(a, words, factors);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        mma(part[n], a[0], b[n][q][0], b[n][q][1]);
        mma(part[n], a[1], b[n][q][2], b[n][q][3]);
      }
    }
    const u32 scales = piece + 2048 + group * 32 + (lane >> 2) * 2;
    const float low = load_shared_half(scales), high = load_shared_half(scales + 16);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = fmaf(part[n][i], i & 2 ? high : low, sum[n][i]);
    }
  }
}
#else
// Adds the products of a piece, half a slice.
__device__ __forceinline__ void add_piece(float (&sum)[NT][4], u32 piece, const u32 (&b)[NT][4][4], Weight, int,
                                          int half) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    u32 a[4];
    load_matrices(a, piece + (lane & 15) * 128 + (((step * 2 + (lane >> 4)) ^ (lane & 7)) * 16));
#pragma unroll
    for (int group = 0; group < NT; ++group) {
      const int q = half * 2 + step / 2;
      mma(sum[group], a, b[group][q][(step & 1) * 2], b[group][q][(step & 1) * 2 + 1]);
    }
  }
}
#endif

// Sums of one pair of results, in the order of slices.cuh.
struct PairSum {
  float low_part, high_part, low, high;

  __device__ __forceinline__ void add_round(const float (&partial)[WARPS][NT][4][32], int round, int pair) {
    const int group = pair >> 6, part = (pair >> 5) & 1, lane = pair & 31;
    const int first = NUM_ROUNDS == 1 ? 0 : round * WARPS;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int slice = first + w;
      if (slice >= NUM_SLICES) break;
      low_part += partial[w][group][part][lane];
      high_part += partial[w][group][part + 2][lane];
      if ((slice + 1) % PER_PART == 0 || slice + 1 == NUM_SLICES) {
        low += low_part;
        high += high_part;
        low_part = high_part = 0.0f;
      }
    }
  }
};

__device__ __forceinline__ float inverse_rms(const Shared& shared, int n, float eps) {
  float square = 0.0f;
#pragma unroll
  for (int slice = 0; slice < NUM_SLICES; ++slice) square += shared.square[NORM ? slice : 0][n];
  return rsqrtf(square / K + eps);
}

__device__ __forceinline__ void skinny_gemm(Weight weight, const bf16* __restrict__ x, int rows, float eps,
                                            const Epilogue& epilogue) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = threadIdx.x;
  const int first_row = blockIdx.y * COLUMNS;
  const int num_tiles = (TILES - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const u32 ring = shared_address(shared.ring[warp][0]);

  PieceReader reader{Walk(num_tiles), 0, ring};
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) reader.issue(weight, stage);
  launch_dependents();
  wait_for_previous();
  RawOperand raw;
  raw.load(x, rows, warp);

  // pair -> result: lane and register of the product's layout
  const int r = (pair & 31) >> 2, n = (pair >> 6) * 8 + (pair & 3) * 2 + ((pair >> 5) & 1);
  const int quad = threadIdx.x % 2 * 4, column = threadIdx.x / 2;  // what this thread finishes
  const bool has_result = column < min(COLUMNS, rows - first_row);
  u32 b[NT][4][4];
  int stage = 0, buffer = 0;
  float scale = 1.0f;
  for (Walk walk(num_tiles); !walk.is_over(); walk.advance()) {
    Early early_part;
    if (has_result && walk.round + 1 == NUM_ROUNDS) {
      early_part = early(epilogue, walk.tile(), quad, first_row + column);
    }
    if (walk.index == 0 && (NUM_ROUNDS > 1 || walk.batch == 0)) {
      convert_operand(b, raw, walk.round * WARPS + warp, shared);
    }
    if (NUM_ROUNDS > 1 && walk.index + 1 == walk.count) {  // the next round's, while this one is multiplied
      const int next = (walk.round + 1 == NUM_ROUNDS ? 0 : walk.round + 1) * WARPS + warp;
      const bool is_last = walk.round + 1 == NUM_ROUNDS && walk.batch + walk.count >= walk.num_tiles;
      if (!is_last) raw.load(x, rows, next);
    }
    float sum[NT][4] = {};
#pragma unroll
    for (int part = 0; part < PIECES; ++part) {
      wait_copies<STAGES - 1>();
      __syncwarp();
      add_piece(sum, ring + stage * PIECE_BYTES, b, weight, walk.round * WARPS + warp, part);
      __syncwarp();
      reader.issue(weight, stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
#pragma unroll
    for (int group = 0; group < NT; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) shared.partial[buffer][warp][group][i][lane] = sum[group][i];
    }
    __syncthreads();
    if (pair < PAIRS) {
      PairSum total = {0.0f, 0.0f, 0.0f, 0.0f};
      if (NUM_ROUNDS > 1 && walk.round > 0) {
        const float4 held = shared.held[walk.index * PAIRS + pair];
        total = {held.x, held.y, held.z, held.w};
      }
      total.add_round(shared.partial[buffer], walk.round, pair);
      if (walk.round + 1 < NUM_ROUNDS) {
        shared.held[walk.index * PAIRS + pair] =
            make_float4(total.low_part, total.high_part, total.low, total.high);
      } else {
        if (NORM && walk.index == 0 && walk.batch == 0) scale = inverse_rms(shared, n, eps);
        shared.results[n][r] = total.low * scale;
        shared.results[n][r + 8] = total.high * scale;
      }
    }
    if (walk.round + 1 == NUM_ROUNDS) {
      __syncthreads();
      if (has_result) {
        const float* source = shared.results[column] + quad;
        finish(epilogue, early_part, walk.tile(), quad, first_row + column, load_float4(source),
               load_float4(source + 8));
      }
    }
    buffer ^= 1;
  }
}
