// warpgroup_gemm: weight [M, K] times up to NB rows of x, on sm_90: every weight byte is read once, by bulk
// copies into shared memory. bfloat16 weights go from there into warpgroup products; INT8 ones pass through
// registers, where they become bfloat16 (int8.cuh).
//
// K is cut into PARTS parts, each for a block of a cluster; these add their sums in order, each for some rows of
// x. Of bfloat16 weights a warpgroup takes 64 rows; of INT8 ones a block has 64 rows, and its two warpgroups
// take turns at pieces of PIECE columns, since making bfloat16 keeps one too busy. A warp of its own asks for
// pieces, STAGES of them ahead; those of the weight before the previous kernel has ended. Every result is one
// chain over a part, or with INT8 one for each warpgroup, whatever NB is, so a row's bits do not depend on its
// neighbours.
// With NORM, sums of squares of x are taken from shared memory beside the products, and results are multiplied
// by 1 / rms; the norm's weight has been multiplied into a bfloat16 weight before, into INT8 ones it is here.
//
// The includer defines, before: `struct Epilogue`; `int2 tile_place(tile)`: where 16 weight rows lie in the
// tensor map, whose dimensions are (K, 8 rows, 2 halves, inner, outer); `struct Early` and `early(epilogue, tile,
// r, n)`, what the last step reads and can be asked for early; `finish(epilogue, early, tile, r, n, low, high)`,
// which gets results r to r + 3 (r: 0 or 4) and r + 8 to r + 11 of a tile for row n.
//
// Defines   K, TILES    in_features, and tiles of 16 weight rows
//           NB          rows of x: 8, 16, 32 or 64, of bfloat16 weights 128 or 256 too
//           WGS         warpgroups: 1 or 2; INT8: 2
//           STAGES      pieces under way
//           BOX         bfloat16: tiles of 16 rows to one copy: 4 or 1
//           GROUP       0: bfloat16; 32, 64 or 128: INT8 with that many columns to a scale
//           PARTS       1, 4 or 8
//           NORM        1: scale by 1 / rms of x
// Launch    grid (ceil(TILES / (MB / 16)), ceil(rows / NB), PARTS), cluster (1, 1, PARTS),
//           block (128 * WGS + 32), dynamic shared memory of 1024 + STAGES * (STAGE_BYTES + 32) bytes, and with
//           INT8 and NORM 256 * PER_BLOCK more

#include "warpgroup.cuh"

// To a multiprocessor. INT8: more registers make a block faster, but leave no room for the next kernel's first
// pieces; what was faster on an H200.
constexpr int MIN_BLOCKS = GROUP && (NB == 16 || (NB == 8 && NORM && PARTS > 1)) ? 3 : 1;

#if GROUP
#define WEIGHT_PARAMETERS const unsigned char* __restrict__ packed, const uint4* __restrict__ norm
#define WEIGHT Weight{packed, norm}
#else
#define WEIGHT_PARAMETERS const __grid_constant__ TensorMap map
#define WEIGHT map
#endif

constexpr int THREADS = 128 * WGS;  // of warpgroups; 32 more ask for copies
constexpr int CHAINS = GROUP ? 2 : 1;  // warpgroups that take turns
constexpr int MB = 64 * WGS / CHAINS;
constexpr int PIECE = GROUP ? 128 : 64;
constexpr int SUB = NB < 128 ? NB : 128, SUBS = NB / SUB;  // rows of x to an instruction, and instructions
constexpr int X_BYTES = NB * PIECE * 2;
#if GROUP
constexpr int WEIGHT_BYTES = PACKED_BYTES;
#else
constexpr int WEIGHT_BYTES = MB * PIECE * 2;
#endif
constexpr int STAGE_BYTES = (X_BYTES + WEIGHT_BYTES + 1023) / 1024 * 1024;
constexpr int NUM_PIECES = (K + PIECE - 1) / PIECE, PER_BLOCK = (NUM_PIECES + PARTS - 1) / PARTS;
constexpr int SUM_STRIDE = MB + 4, CHUNKS = 16 * CHAINS;
constexpr int OWN_ROWS = NB / PARTS;                     // of x, that a block finishes
constexpr int NUM_ITEMS = MB / 8 * OWN_ROWS;                // of eight results
constexpr int ITEMS = (NUM_ITEMS + THREADS - 1) / THREADS;  // of a thread
constexpr bool IS_EARLY = ITEMS <= 2;                       // more would not fit into registers beside the sums

static_assert(K % 8 == 0, "rows of 16-byte units");
static_assert(STAGES % CHAINS == 0, "a stage is always the same warpgroup's, so that it misses no phase of its barriers");
static_assert((NB * SUM_STRIDE + (CHUNKS + 1) * NB) * 4 <= STAGES * STAGE_BYTES, "sums lie where the ring was");

// The ring of pieces and its barriers, as addresses in shared memory.
struct Ring {
  u32 base;

  __device__ u32 rows(int stage) const { return base + stage * STAGE_BYTES; }
  __device__ u32 weights(int stage) const { return rows(stage) + X_BYTES; }
  __device__ u32 has_weights(int stage) const { return base + STAGES * STAGE_BYTES + stage * 32; }
  __device__ u32 has_rows(int stage) const { return has_weights(stage) + 8; }
  __device__ u32 empty(int stage) const { return has_weights(stage) + 16; }
  __device__ u32 norm() const { return base + STAGES * (STAGE_BYTES + 32); }  // INT8 and NORM: of this block's columns
};

#if GROUP
struct Weight {
  const unsigned char* packed;  // int8.cuh
  const uint4* norm;            // of the RMSNorm, in the order of int8.cuh
};

__device__ __forceinline__ void copy_weights(const Ring& ring, const Weight& weight, int stage, int piece) {
  expect_bytes(ring.has_weights(stage), WEIGHT_BYTES);
  const long long place = static_cast<long long>(blockIdx.x) * NUM_PIECES + piece;
  copy_bytes(ring.weights(stage), weight.packed + place * PACKED_BYTES, PACKED_BYTES, ring.has_weights(stage));
}
#else
using Weight = TensorMap;

__device__ __forceinline__ void copy_weights(const Ring& ring, const Weight& weight, int stage, int piece) {
  expect_bytes(ring.has_weights(stage), WEIGHT_BYTES);
#pragma unroll
  for (int box = 0; box < MB / 16 / BOX; ++box) {
    const int2 place = tile_place(blockIdx.x * (MB / 16) + box * BOX);
    copy_box(ring.weights(stage) + box * BOX * 2048, weight, ring.has_weights(stage), piece * 64, place.x, place.y);
  }
}
#endif

__device__ __forceinline__ void copy_x(const Ring& ring, const TensorMap& x, int stage, int piece) {
  expect_bytes(ring.has_rows(stage), X_BYTES);
#pragma unroll
  for (int box = 0; box < PIECE / 64; ++box) {
    copy_rows(ring.rows(stage) + box * (NB * 128), x, ring.has_rows(stage), piece * PIECE + box * 64, blockIdx.y * NB);
  }
}

#if GROUP
// Constant over a step, so it is read before the previous kernel has ended.
__device__ __forceinline__ void load_norm(const Ring& ring, const Weight& weight, int first, int num_pieces) {
  if (!NORM) return;
  for (int i = threadIdx.x; i < num_pieces * 16; i += THREADS) {
    const uint4 v = __ldg(weight.norm + first * 16 + i);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(ring.norm() + i * 16), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
  asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");  // warpgroups alone
}
#endif

// One thread keeps the ring full.
__device__ __forceinline__ void produce(const Ring& ring, const Weight& weight, const TensorMap& x, int first,
                                        int num_pieces) {
  const int early = min(STAGES, num_pieces);
  for (int p = 0; p < early; ++p) copy_weights(ring, weight, p, first + p);
  wait_for_previous();
  for (int p = 0; p < early; ++p) copy_x(ring, x, p, first + p);
  int stage = 0, parity = 0;
  for (int p = early; p < num_pieces; ++p) {
    wait_barrier(ring.empty(stage), parity);
    copy_weights(ring, weight, stage, first + p);
    copy_x(ring, x, stage, first + p);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// Squares of four components of row t % 8 + 8 j of a piece, for every j; thread t takes chunk t / 8.
__device__ __forceinline__ void add_squares(float (&square)[NB / 8], u32 rows) {
  const int t = threadIdx.x & 127, row = t & 7, chunk = t >> 3;
  const u32 source = rows + row * 128 + (((chunk >> 1) ^ row) * 16) + (chunk & 1) * 8;
#pragma unroll
  for (int j = 0; j < NB / 8; ++j) {
    u32 a, b;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(source + j * 1024));
    square[j] = fmaf(bf16_low(a), bf16_low(a), square[j]);
    square[j] = fmaf(bf16_high(a), bf16_high(a), square[j]);
    square[j] = fmaf(bf16_low(b), bf16_low(b), square[j]);
    square[j] = fmaf(bf16_high(b), bf16_high(b), square[j]);
  }
}

// Where a warpgroup's sums, and sums of squares, lie once the ring is done with.
struct Sums {
  float* results;  // [NB, SUM_STRIDE]
  float* chunks;   // [CHUNKS, NB]
  float* squares;  // [NB]
};

// What lies at the same place in the shared memory of a block of the cluster.
__device__ __forceinline__ float load_float_of(const float* source, int block) {
#if PARTS == 1
  return *source;
#else
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address_in(source, block)) : "memory");
  return x;
#endif
}

__device__ __forceinline__ float4 load_float4_of(const float* source, int block) {
#if PARTS == 1
  return load_float4(source);
#else
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address_in(source, block)) : "memory");
  return v;
#endif
}

// All sums are there.
__device__ __forceinline__ void share_sums() {
#if PARTS == 1
  __syncthreads();
#else
  cluster_arrive();
  cluster_wait();
#endif
}

// Nobody reads our sums any more. What was written to device memory need not be there yet.
__device__ __forceinline__ void keep_sums() {
#if PARTS > 1
  cluster_arrive_relaxed();
  cluster_wait();
#endif
}

__device__ __forceinline__ float total_square(const Sums& sums, int n) {
  float square = 0.0f;
#pragma unroll
  for (int block = 0; block < PARTS; ++block) square += load_float_of(sums.squares + n, block);
  return square;
}

__device__ __forceinline__ void store_squares(const Sums& sums, const float (&square)[NB / 8]) {
  if (threadIdx.x >= 128 * CHAINS) return;
#pragma unroll
  for (int j = 0; j < NB / 8; ++j) sums.chunks[(threadIdx.x >> 3) * NB + j * 8 + (threadIdx.x & 7)] = square[j];
}

__device__ __forceinline__ void reduce_squares(const Sums& sums) {
  for (int n = threadIdx.x; n < NB; n += THREADS + 32) {
    float square = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) square += sums.chunks[chunk * NB + n];
    sums.squares[n] = square;
  }
}

using Accumulator = float[SUBS][SUB / 2];

#if GROUP
// The left operands of a piece's eight products.
struct Operand {
  u32 a[8][4];

  // Whatever computes the registers stays before this point, and whatever overwrites them behind it: products
  // read them while the compiler thinks they are done with.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(a[i / 4][i % 4]) :: "memory");
  }

  __device__ __forceinline__ void load(u32 weights, u32 norm) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      u32 words[4], factors[4];
      load_shared(words, weights + q * 2048 + warp * 512 + lane * 16);
      if (NORM) load_shared(factors, norm + q * 64 + (lane & 3) * 16);
      widen(a + q * 2, words, factors);
    }
  }
};

constexpr int PER_GROUP = GROUP / 16;                                          // products
constexpr int SETS = NB == 8 && GROUPS > 1 ? 2 : 1;  // groups that are multiplied together

// Begins the products of SETS groups of a piece.
__device__ __forceinline__ void multiply_piece(Operand& operand, u32 rows, float (&part)[SETS][NB / 2], int first) {
  operand.pin();
  begin_products();
#pragma unroll
  for (int set = 0; set < SETS; ++set) {
#pragma unroll
    for (int s = 0; s < PER_GROUP; ++s) {
      const int product = (first + set) * PER_GROUP + s;  // 16 columns are 32 bytes; addresses count in 16
      const u64 b = operand_of(rows + product / 4 * (NB * 128)) + 2 * (product % 4);
      warpgroup_mma(part[set], operand.a[product], b, s);
    }
  }
  commit_products();
}

// Adds what they gave, times the scales.
__device__ __forceinline__ void add_scaled(u32 weights, Accumulator& sum, float (&part)[SETS][NB / 2], int first) {
  const int row = ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
#pragma unroll
  for (int set = 0; set < SETS; ++set) {
    const u32 scales = weights + PACKED_VALUES + ((first + set) * 64 + row) * 2;
    const float low = load_shared_half(scales), high = load_shared_half(scales + 16);
#pragma unroll
    for (int i = 0; i < NB / 2; ++i) {
      asm volatile("" : "+f"(part[set][i]) :: "memory");  // not read before the products have ended
      sum[0][i] = fmaf(part[set][i], i & 2 ? high : low, sum[0][i]);
    }
  }
}

// The products of one piece in CHAINS, and the squares of x beside them. `operand`: of the first.
__device__ __forceinline__ void consume(const Ring& ring, Operand& operand, int num_pieces, Accumulator& sum,
                                        float (&square)[NB / 8]) {
  static_assert(NB <= 64, "more sums would not fit into registers");
  float part[SETS][NB / 2];
  const int chain = threadIdx.x >> 7;
  int stage = chain, parity = 0;
  for (int p = chain; p < num_pieces; p += CHAINS) {
    const u32 weights = ring.weights(stage), rows = ring.rows(stage);
    if (p > chain) {
      wait_barrier(ring.has_weights(stage), parity);
      operand.load(weights, ring.norm() + p * 256);
    }
    wait_barrier(ring.has_rows(stage), parity);
#pragma unroll
    for (int first = 0; first < GROUPS; first += SETS) {
      multiply_piece(operand, rows, part, first);
      if (first == 0 && NORM) {
        add_squares(square, rows);
        add_squares(square, rows + NB * 128);
      }
      wait_products<0>();
      operand.pin();
      add_scaled(weights, sum, part, first);
    }
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(ring.empty(stage));
    stage += CHAINS;
    if (stage >= STAGES) stage -= STAGES, parity ^= 1;
  }
}
#else
// The products of all pieces, and the squares of x beside them.
__device__ __forceinline__ void consume(const Ring& ring, int num_pieces, Accumulator& sum, float (&square)[NB / 8]) {
  const int lane = threadIdx.x & 31;
  const u32 own_rows = (threadIdx.x >> 7) * 8192;
  int stage = 0, parity = 0, before = 0;
  for (int p = 0; p < num_pieces; ++p) {
    wait_barrier(ring.has_weights(stage), parity);
    wait_barrier(ring.has_rows(stage), parity);
    const u64 a = operand_of(ring.weights(stage) + own_rows), b = operand_of(ring.rows(stage));
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 columns are 32 bytes; addresses count in 16
#pragma unroll
      for (int s = 0; s < SUBS; ++s) warpgroup_mma(sum[s], a + 2 * k, b + 2 * k + s * (SUB * 8), p | k);
    }
    commit_products();
    if (NORM && threadIdx.x < 128) add_squares(square, ring.rows(stage));
    wait_products<1>();
    if (p > 0 && lane == 0) arrive(ring.empty(before));
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  wait_products<0>();
}
#endif

// To shared memory, where a thread finds neighbouring results; with `adds`, to what lies there.
__device__ __forceinline__ void store_sums(const Sums& sums, const Accumulator& sum, bool adds) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 % MB + (lane >> 2);
#pragma unroll
  for (int s = 0; s < SUBS; ++s) {
#pragma unroll
    for (int i = 0; i < SUB / 2; ++i) {
      const int column = s * SUB + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
      float* target = sums.results + column * SUM_STRIDE + row + (i & 2) * 4;
      *target = adds ? sum[s][i] + *target : sum[s][i];
    }
  }
}

// Eight results of one row of x.
struct Item {
  int tile, r, column, n;  // of the block's tiles; 0 or 4; of the block's rows of x; of all
  bool is_inside;

  __device__ Item(int i, int rows)
      : tile(i / 2 % (MB / 16)), r(i % 2 * 4), column((PARTS > 1 ? blockIdx.z * OWN_ROWS : 0) + i / (MB / 8)) {
    n = blockIdx.y * NB + column;
    is_inside = threadIdx.x < THREADS && i < NUM_ITEMS && blockIdx.x * (MB / 16) + tile < TILES && n < rows;
  }
  __device__ Early load_early(const Epilogue& epilogue) const {
    return early(epilogue, blockIdx.x * (MB / 16) + tile, r, n);
  }
};

// Those of all blocks, in order.
__device__ __forceinline__ float4 load_sums(const float* source) {
  float4 total = load_float4_of(source, 0);
#pragma unroll
  for (int block = 1; block < PARTS; ++block) total = total + load_float4_of(source, block);
  return total;
}

// Hands the sums, times the norm's scale, to the includer.
__device__ __forceinline__ void finish_item(const Sums& sums, const Item& item, const Early& part,
                                            const Epilogue& epilogue) {
  const float* source = sums.results + item.column * SUM_STRIDE + item.tile * 16 + item.r;
  float4 low = load_sums(source), high = load_sums(source + 8);
  if (NORM) {
    const float scale = sums.chunks[item.column];
    low.x *= scale, low.y *= scale, low.z *= scale, low.w *= scale;
    high.x *= scale, high.y *= scale, high.z *= scale, high.w *= scale;
  }
  finish(epilogue, part, blockIdx.x * (MB / 16) + item.tile, item.r, item.n, low, high);
}

__device__ __forceinline__ void warpgroup_gemm(const Weight& weight, const TensorMap& x, int rows, float eps,
                                               const Epilogue& epilogue) {
  extern __shared__ unsigned char shared_bytes[];
  const u32 start = shared_address(shared_bytes), aligned = (start + 1023) & ~1023u;
  const Ring ring{aligned};
  float* memory = reinterpret_cast<float*>(shared_bytes + (aligned - start));
  float* chunks = memory + NB * SUM_STRIDE;
  const Sums sums{memory, chunks, chunks + CHUNKS * NB};
  const int first = blockIdx.z * PER_BLOCK, num_pieces = max(0, min(PER_BLOCK, NUM_PIECES - first));
  const bool is_consumer = threadIdx.x < THREADS;
  if (threadIdx.x == THREADS) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(ring.has_weights(stage), 1);
      init_barrier(ring.has_rows(stage), 1);
      init_barrier(ring.empty(stage), WGS / CHAINS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  launch_dependents();
  Accumulator sum = {};
  float square[NB / 8] = {};
  Early parts[IS_EARLY ? ITEMS : 1];
  if (is_consumer) {
#if GROUP
    load_norm(ring, weight, first, num_pieces);
    Operand operand;
    const int chain = threadIdx.x >> 7;
    if (chain < num_pieces) {
      wait_barrier(ring.has_weights(chain), 0);
      operand.load(ring.weights(chain), ring.norm() + chain * 256);
    }
#endif
    wait_for_previous();
#pragma unroll
    for (int j = 0; j < (IS_EARLY ? ITEMS : 0); ++j) {
      const Item item(threadIdx.x + j * THREADS, rows);
      if (item.is_inside) parts[j] = item.load_early(epilogue);
    }
#if GROUP
    consume(ring, operand, num_pieces, sum, square);
#else
    consume(ring, num_pieces, sum, square);
#endif
  } else if (threadIdx.x == THREADS) {
    produce(ring, weight, x, first, num_pieces);
  }
  __syncthreads();  // the ring is done with
  if (NORM) store_squares(sums, square);
  if (CHAINS > 1) {
    if (threadIdx.x >> 7 == 1) store_sums(sums, sum, false);
    __syncthreads();
    if (threadIdx.x >> 7 == 0) store_sums(sums, sum, true);
  } else if (is_consumer) {
    store_sums(sums, sum, false);
  }
  if (NORM) {
    __syncthreads();
    reduce_squares(sums);
  }
  share_sums();
  if (NORM) {  // each row's scale once
    for (int n = threadIdx.x; n < NB; n += THREADS + 32) sums.chunks[n] = rsqrtf(total_square(sums, n) / K + eps);
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const Item item(threadIdx.x + j * THREADS, rows);
    if (!item.is_inside) continue;
    finish_item(sums, item, IS_EARLY ? parts[IS_EARLY ? j : 0] : item.load_early(epilogue), epilogue);
  }
  keep_sums();
}
