// skinny_gemm: weight [M, K] times 8 * NT rows of x a block, on every card (sm_90 has warpgroup_gemm.cuh): the
// warp that needs a weight reads it, from device memory to shared memory.
//
// A block takes tiles of 16 weight rows; its 16 warps take slices of K (slices.cuh). Each warp keeps
// STAGES pieces of 16 x 64 weights under way; the first are asked for before the previous kernel has ended.
// The weight is the left operand of the product, so the rows of x are its eight columns.
//
// The includer defines, before: `struct Epilogue`; `weight_row(tile, r)` (row of the weight, or -1);
// `struct Early` and `early(epilogue, tile, r, n)`, what the last step reads and can be asked for while the
// product is under way; `finish(epilogue, early, tile, r, n, low, high)`, which gets results r to r + 3 (r: 0 or
// 4) and r + 8 to r + 11 of a tile for row n.
//
// Defines   K, TILES   in_features, and tiles of 16 weight rows
//           NT         groups of 8 rows of x: 1, 2 or 4
//           QUARTERS   see slices.cuh
//           NORM       1: scale by 1 / rms of x; the norm's weight is in the weight
// Launch    grid (at most TILES, ceil(rows / (8 * NT))), block (512), dynamic shared memory of Shared bytes

constexpr int WARPS = 16;
constexpr int STAGES = 3;
constexpr int PIECE = 16 * 64;  // weights of one stage of a warp
constexpr int NUM_ROUNDS = (NUM_SLICES + WARPS - 1) / WARPS;
constexpr int COLUMNS = 8 * NT;
constexpr int PAIRS = 64 * NT;  // results of a tile, two to a thread
constexpr int HELD = TILES > 15 * 128 ? 16 : TILES / 128 + 1;  // tiles whose sums wait for the next round of slices

struct Shared {
  bf16 ring[WARPS][STAGES][PIECE];
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
  int half;
  u32 ring;

  // Asks for the next piece of this warp's weights; commits a group even behind the end.
  __device__ __forceinline__ void issue(const bf16* __restrict__ weight, int stage) {
    if (!walk.is_over()) {
      const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, unit = lane & 7;
      const int column = (walk.round * WARPS + warp) * SLICE + half * 64 + unit * 8;
      const int tile = walk.tile();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i * 4 + (lane >> 3);
        const long long row = weight_row(tile, r);
        const bool is_inside = row >= 0 && column < K;
        copy16_async(ring + stage * (PIECE * 2) + r * 128 + ((unit ^ (r & 7)) * 16),
                     weight + (is_inside ? row * K + column : 0), is_inside);
      }
      half ^= 1;
      if (half == 0) walk.advance();
    }
    commit_copies();
  }
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

// Sums of one pair of results, in the order of slices.cuh.
struct PairSum {
  float low_quarter, high_quarter, low, high;

  __device__ __forceinline__ void add_round(const float (&partial)[WARPS][NT][4][32], int round, int pair) {
    const int group = pair >> 6, part = (pair >> 5) & 1, lane = pair & 31;
    const int first = NUM_ROUNDS == 1 ? 0 : round * WARPS;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int slice = first + w;
      if (slice >= NUM_SLICES) break;
      low_quarter += partial[w][group][part][lane];
      high_quarter += partial[w][group][part + 2][lane];
      if ((slice + 1) % PER_QUARTER == 0 || slice + 1 == NUM_SLICES) {
        low += low_quarter;
        high += high_quarter;
        low_quarter = high_quarter = 0.0f;
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

__device__ __forceinline__ void skinny_gemm(const bf16* __restrict__ x, int rows, const bf16* __restrict__ weight, float eps,
                                            const Epilogue& epilogue) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = threadIdx.x;
  const int first_row = blockIdx.y * COLUMNS;
  const int num_tiles = (TILES - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const u32 ring = shared_address(&shared.ring[warp][0][0]);

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
    for (int half = 0; half < 2; ++half) {
      wait_copies<STAGES - 1>();
      __syncwarp();
      const u32 piece = ring + stage * (PIECE * 2) + (lane & 15) * 128;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        u32 a[4];
        load_matrices(a, piece + (((step * 2 + (lane >> 4)) ^ (lane & 7)) * 16));
#pragma unroll
        for (int group = 0; group < NT; ++group) {
          const int q = half * 2 + step / 2;
          mma(sum[group], a, b[group][q][(step & 1) * 2], b[group][q][(step & 1) * 2 + 1]);
        }
      }
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
            make_float4(total.low_quarter, total.high_quarter, total.low, total.high);
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
