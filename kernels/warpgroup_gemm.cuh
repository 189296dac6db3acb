// warpgroup_gemm: weight [M, K] times up to NB rows of x, on sm_90: every weight byte is read once, by the
// tensor memory accelerator into shared memory, from where warpgroup products take both operands.
//
// A block takes WGS * 64 weight rows (the left operand) and a quarter of K where QUARTERS is 4, else all of K;
// the four blocks of a cluster add their sums in order, each for a quarter of the rows of x. A warp of its own
// asks for pieces of 64 columns, STAGES of them ahead; those of the weight before the previous kernel has ended.
// Every result is one chain of products over a quarter, whatever NB is, so a row's bits do not depend on its
// neighbours.
// With NORM, sums of squares of x are taken from shared memory beside the products, and results are multiplied
// by 1 / rms; the norm's weight has been multiplied into the weight before.
//
// The includer defines, before: `struct Epilogue`; `int2 tile_place(tile)`: where 16 weight rows lie in the
// tensor map, whose dimensions are (K, 8 rows, 2 halves, inner, outer); `struct Early` and `early(epilogue, tile,
// r, n)`, what the last step reads and can be asked for early; `finish(epilogue, early, tile, r, n, low, high)`,
// which gets results r to r + 3 (r: 0 or 4) and r + 8 to r + 11 of a tile for row n.
//
// Source    PTX ISA 8.5: wgmma.mma_async, cp.async.bulk.tensor, mbarrier, 128-byte swizzle
// Defines   K, TILES    in_features, and tiles of 16 weight rows
//           NB          rows of x: 8, 16, 32, 64, 128 or 256
//           WGS         warpgroups: 1 or 2
//           STAGES      pieces under way
//           BOX         tiles of 16 rows to one copy: 4 or 1
//           QUARTERS    1 or 4
//           NORM        1: scale by 1 / rms of x
// Launch    grid (ceil(TILES / (4 * WGS)), ceil(rows / NB), QUARTERS), cluster (1, 1, QUARTERS),
//           block (128 * WGS + 32), dynamic shared memory of 1024 + STAGES * STAGE_BYTES + 16 * STAGES bytes

struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr int THREADS = 128 * WGS;  // of warpgroups; 32 more ask for copies
constexpr int MB = 64 * WGS;
constexpr int SUB = NB < 128 ? NB : 128, SUBS = NB / SUB;  // rows of x to an instruction, and instructions
constexpr int WEIGHT_BYTES = MB * 128, STAGE_BYTES = WEIGHT_BYTES + NB * 128;
constexpr int NUM_PIECES = (K + 63) / 64, PER_BLOCK = (NUM_PIECES + QUARTERS - 1) / QUARTERS;
constexpr int SUM_STRIDE = MB + 4, CHUNKS = 16;
constexpr int OWN_ROWS = NB / QUARTERS;                     // of x, that a block finishes
constexpr int NUM_ITEMS = MB / 8 * OWN_ROWS;                // of eight results
constexpr int ITEMS = (NUM_ITEMS + THREADS - 1) / THREADS;  // of a thread
constexpr bool IS_EARLY = ITEMS <= 2;                       // more would not fit into registers beside the sums

static_assert(K % 8 == 0, "rows of 16-byte units");
static_assert((NB * SUM_STRIDE + (CHUNKS + 1) * NB) * 4 <= STAGES * STAGE_BYTES, "sums lie where the ring was");

__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(num_bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, int parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
               "@!done bra again;\n}" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_box(u32 target, const TensorMap& map, u32 barrier, int column, int inner,
                                         int outer) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %4, %5, %6}], [%2];"
               :: "r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(0), "r"(inner), "r"(outer) : "memory");
}

__device__ __forceinline__ void copy_x(u32 target, const TensorMap& map, u32 barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               :: "r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// Rows of 64 bfloat16 under each other, 128-byte swizzle; eight rows are an atom of 1024 bytes.
__device__ __forceinline__ u64 operand(u32 address) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define WGMMA_TAIL "p, 1, 1, 0, 0;\n}"
#define F4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])

// c[64 x N] = or += a[64 x 16] b[N x 16]^T.
__device__ __forceinline__ void warpgroup_mma(float (&c)[4], u64 a, u64 b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3}, %4, %5, " WGMMA_TAIL : F4(0) : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[8], u64 a, u64 b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, " WGMMA_TAIL
               : F4(0), F4(4) : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[16], u64 a, u64 b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, " WGMMA_TAIL
               : F4(0), F4(4), F4(8), F4(12) : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[32], u64 a, u64 b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, " WGMMA_TAIL
               : F4(0), F4(4), F4(8), F4(12), F4(16), F4(20), F4(24), F4(28) : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[64], u64 a, u64 b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "%64, %65, " WGMMA_TAIL
               : F4(0), F4(4), F4(8), F4(12), F4(16), F4(20), F4(24), F4(28), F4(32), F4(36), F4(40), F4(44), F4(48),
                 F4(52), F4(56), F4(60) : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ float load_shared_of(u32 address, int block) {
  u32 remote;
  float x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(remote) : "memory");
  return x;
}

// The ring of pieces and its barriers, as addresses in shared memory.
struct Ring {
  u32 base;

  __device__ u32 weights(int stage) const { return base + stage * STAGE_BYTES; }
  __device__ u32 rows(int stage) const { return base + stage * STAGE_BYTES + WEIGHT_BYTES; }
  __device__ u32 full(int stage) const { return base + STAGES * STAGE_BYTES + stage * 16; }
  __device__ u32 empty(int stage) const { return full(stage) + 8; }
};

__device__ __forceinline__ void copy_weights(const Ring& ring, const TensorMap& weight, int stage, int piece) {
  expect_bytes(ring.full(stage), STAGE_BYTES);
#pragma unroll
  for (int box = 0; box < MB / 16 / BOX; ++box) {
    const int2 place = tile_place(blockIdx.x * (MB / 16) + box * BOX);
    copy_box(ring.weights(stage) + box * BOX * 2048, weight, ring.full(stage), piece * 64, place.x, place.y);
  }
}

// One thread keeps the ring full.
__device__ __forceinline__ void produce(const Ring& ring, const TensorMap& weight, const TensorMap& x, int first,
                                        int num_pieces) {
  const int row = blockIdx.y * NB;
  const int early = min(STAGES, num_pieces);
  for (int p = 0; p < early; ++p) copy_weights(ring, weight, p, first + p);
  wait_for_previous();
  for (int p = 0; p < early; ++p) copy_x(ring.rows(p), x, ring.full(p), (first + p) * 64, row);
  int stage = 0, parity = 0;
  for (int p = early; p < num_pieces; ++p) {
    wait_barrier(ring.empty(stage), parity);
    copy_weights(ring, weight, stage, first + p);
    copy_x(ring.rows(stage), x, ring.full(stage), (first + p) * 64, row);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// Squares of four components of row t % 8 + 8 j of a piece, for every j; thread t takes chunk t / 8.
__device__ __forceinline__ void add_squares(float (&square)[NB / 8], u32 rows) {
  const int t = threadIdx.x, row = t & 7, chunk = t >> 3;
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

__device__ __forceinline__ float total_square(const Sums& sums, int n) {
  float square = 0.0f;
  if constexpr (QUARTERS == 1) return sums.squares[n];
#pragma unroll
  for (int block = 0; block < QUARTERS; ++block) square += load_shared_of(shared_address(sums.squares + n), block);
  return square;
}

__device__ __forceinline__ void store_squares(const Sums& sums, const float (&square)[NB / 8]) {
  if (threadIdx.x >= 128) return;
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

// The products of all pieces, and the squares of x beside them.
__device__ __forceinline__ void consume(const Ring& ring, int num_pieces, Accumulator& sum, float (&square)[NB / 8]) {
  const int lane = threadIdx.x & 31;
  const u32 own_rows = (threadIdx.x >> 7) * 8192;
  int stage = 0, parity = 0, before = 0;
  for (int p = 0; p < num_pieces; ++p) {
    wait_barrier(ring.full(stage), parity);
    const u64 a = operand(ring.weights(stage) + own_rows), b = operand(ring.rows(stage));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 columns are 32 bytes; addresses count in 16
#pragma unroll
      for (int s = 0; s < SUBS; ++s) warpgroup_mma(sum[s], a + 2 * k, b + 2 * k + s * (SUB * 8), p | k);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (NORM && threadIdx.x < 128) add_squares(square, ring.rows(stage));
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (p > 0 && lane == 0) arrive(ring.empty(before));
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// To shared memory, where a thread finds neighbouring results.
__device__ __forceinline__ void store_sums(const Sums& sums, const Accumulator& sum) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int s = 0; s < SUBS; ++s) {
#pragma unroll
    for (int i = 0; i < SUB / 2; ++i) {
      const int column = s * SUB + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
      sums.results[column * SUM_STRIDE + row + (i & 2) * 4] = sum[s][i];
    }
  }
}

// Eight results of one row of x.
struct Item {
  int tile, r, column, n;  // of the block's tiles; 0 or 4; of the block's rows of x; of all
  bool is_inside;

  __device__ Item(int i, int rows)
      : tile(i / 2 % (MB / 16)), r(i % 2 * 4), column((QUARTERS > 1 ? blockIdx.z * OWN_ROWS : 0) + i / (MB / 8)) {
    n = blockIdx.y * NB + column;
    is_inside = threadIdx.x < THREADS && i < NUM_ITEMS && blockIdx.x * (MB / 16) + tile < TILES && n < rows;
  }
  __device__ Early load_early(const Epilogue& epilogue) const {
    return early(epilogue, blockIdx.x * (MB / 16) + tile, r, n);
  }
};

__device__ __forceinline__ float4 load_sums(const float* source) {
#if QUARTERS == 1
  return load_float4(source);
#else
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int block = 0; block < QUARTERS; ++block) {
    u32 remote;
    float4 part;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(source)), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w) : "r"(remote) : "memory");
    total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
  }
  return total;
#endif
}

// Adds the cluster's sums in order, and hands them to the includer.
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

__device__ __forceinline__ void warpgroup_gemm(const TensorMap& weight, const TensorMap& x, int rows, float eps,
                                               const Epilogue& epilogue) {
  extern __shared__ unsigned char shared_bytes[];
  const u32 start = shared_address(shared_bytes), aligned = (start + 1023) & ~1023u;
  const Ring ring{aligned};
  float* memory = reinterpret_cast<float*>(shared_bytes + (aligned - start));
  const Sums sums{memory, memory + NB * SUM_STRIDE, memory + NB * SUM_STRIDE + CHUNKS * NB};
  const int first = blockIdx.z * PER_BLOCK, num_pieces = max(0, min(PER_BLOCK, NUM_PIECES - first));
  const bool is_consumer = threadIdx.x < THREADS;
  if (threadIdx.x == THREADS) {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(ring.full(stage), 1);
      init_barrier(ring.empty(stage), WGS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  launch_dependents();
  Accumulator sum = {};
  float square[NB / 8] = {};
  Early parts[IS_EARLY ? ITEMS : 1];
  if (is_consumer) {
    wait_for_previous();
#pragma unroll
    for (int j = 0; j < (IS_EARLY ? ITEMS : 0); ++j) {
      const Item item(threadIdx.x + j * THREADS, rows);
      if (item.is_inside) parts[j] = item.load_early(epilogue);
    }
    consume(ring, num_pieces, sum, square);
  } else if (threadIdx.x == THREADS) {
    produce(ring, weight, x, first, num_pieces);
  }
  __syncthreads();  // the ring is done with
  if (NORM) store_squares(sums, square);
  if (is_consumer) store_sums(sums, sum);
  if (NORM) {
    __syncthreads();
    reduce_squares(sums);
  }
#if QUARTERS > 1
  cluster_barrier();
#else
  __syncthreads();
#endif
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
#if QUARTERS > 1
  cluster_barrier();  // the others may still read our sums
#endif
}
