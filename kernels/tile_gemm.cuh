// tile_gemm: weight [M, K] times many rows of x, with the sums of skinny_gemm in the same order.
//
// A block computes MB weight rows x NB rows of x through a ring of 64-wide pieces in shared memory. Where
// QUARTERS is 4, a cluster of four blocks takes a quarter of K each (sm_90); below, one block takes all.
// RMSNorm is not fused here: x comes multiplied by the norm's weight, and `scales` holds 1 / rms.
//
// Includer's part as in skinny_gemm.cuh. Row tiles of 16 lie in order in a block's MB rows.
//
// Defines   MB, NB     64 or 128 each
//           K, TILES, QUARTERS, NORM as in skinny_gemm.cuh
// Launch    grid (ceil(TILES * 16 / MB), ceil(rows / NB), QUARTERS from sm_90 on else 1),
//           cluster (1, 1, QUARTERS), block (256), dynamic shared memory of RING_BYTES

constexpr int TILE_STAGES = 4;
constexpr int WARP_M = MB / 2, WARP_N = NB / 4;  // eight warps, 2 x 4
constexpr int MT = WARP_M / 16, NTILES = WARP_N / 8;
constexpr int STAGE_BYTES = (MB + NB) * 128;

constexpr int SUM_STRIDE = NB + 1;

__device__ __forceinline__ void copy_weights(u32 target, const bf16* __restrict__ weight, int column) {
  const int unit = threadIdx.x & 7;
#pragma unroll
  for (int i = 0; i < MB / 32; ++i) {
    const int r = i * 32 + (threadIdx.x >> 3);
    const int tile = blockIdx.x * (MB / 16) + r / 16;
    const long long row = tile < TILES ? weight_row(tile, r & 15) : -1;
    const bool is_inside = row >= 0 && column + unit * 8 < K;
    copy16_async(target + r * 128 + ((unit ^ (r & 7)) * 16),
                 weight + (is_inside ? row * K + column + unit * 8 : 0), is_inside);
  }
}

__device__ __forceinline__ void copy_rows(u32 target, const bf16* __restrict__ x, int rows, int column) {
  const int unit = threadIdx.x & 7;
#pragma unroll
  for (int i = 0; i < NB / 32; ++i) {
    const int r = i * 32 + (threadIdx.x >> 3);
    const long long row = static_cast<long long>(blockIdx.y) * NB + r;
    const bool is_inside = row < rows && column + unit * 8 < K;
    copy16_async(target + r * 128 + ((unit ^ (r & 7)) * 16),
                 x + (is_inside ? row * K + column + unit * 8 : 0), is_inside);
  }
}

__device__ __forceinline__ void multiply_piece(float (&sum)[MT][NTILES][4], u32 weights, u32 rows) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  weights += ((warp & 1) * WARP_M + (lane & 15)) * 128;
  rows += ((warp >> 1) * WARP_N + (lane & 7)) * 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // 32 of the piece's 64 columns
    u32 b[NTILES][4];
#pragma unroll
    for (int n = 0; n < NTILES; ++n) {
      load_matrices(b[n], rows + n * 1024 + (((half * 4 + (lane >> 3)) ^ (lane & 7)) * 16));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        u32 a[4];
        load_matrices(a, weights + m * 2048 + (((half * 4 + step * 2 + (lane >> 4)) ^ (lane & 7)) * 16));
#pragma unroll
        for (int n = 0; n < NTILES; ++n) mma(sum[m][n], a, b[n][step * 2], b[n][step * 2 + 1]);
      }
    }
  }
}

// Adds what one quarter of K, from slice `first` to before `last`, gives to `total`.
__device__ __forceinline__ void sum_quarter(float (&total)[MT][NTILES][4], const bf16* __restrict__ x, int rows,
                                            const bf16* __restrict__ weight, u32 ring, int first, int last,
                                            bool& has_waited) {
  const int num_pieces = max(0, last - first) * 2;
#pragma unroll
  for (int p = 0; p < TILE_STAGES - 1; ++p) {
    if (p < num_pieces) copy_weights(ring + p * STAGE_BYTES, weight, first * SLICE + p * 64);
  }
  if (!has_waited) {
    launch_dependents();
    wait_for_previous();
    has_waited = true;
  }
#pragma unroll
  for (int p = 0; p < TILE_STAGES - 1; ++p) {
    if (p < num_pieces) copy_rows(ring + p * STAGE_BYTES + MB * 128, x, rows, first * SLICE + p * 64);
    commit_copies();
  }
  float sum[MT][NTILES][4] = {};
  for (int p = 0; p < num_pieces; ++p) {
    wait_copies<TILE_STAGES - 2>();
    __syncthreads();
    const int next = p + TILE_STAGES - 1;
    if (next < num_pieces) {
      const u32 stage = ring + (next % TILE_STAGES) * STAGE_BYTES;
      copy_weights(stage, weight, first * SLICE + next * 64);
      copy_rows(stage + MB * 128, x, rows, first * SLICE + next * 64);
    }
    commit_copies();
    const u32 stage = ring + (p % TILE_STAGES) * STAGE_BYTES;
    multiply_piece(sum, stage, stage + MB * 128);
    if (p & 1) {
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int n = 0; n < NTILES; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[m][n][i] += sum[m][n][i];
            sum[m][n][i] = 0.0f;
          }
        }
      }
    }
  }
  wait_copies<0>();
  __syncthreads();
}

__device__ __forceinline__ void finish_scaled(const Epilogue& epilogue, const float* __restrict__ scales, int rows,
                                              int tile, int r, int n, float low, float high) {
  if (tile >= TILES || n >= rows) return;
  const float scale = NORM ? __ldcg(scales + n) : 1.0f;
  finish(epilogue, early(epilogue, tile, r, n), tile, r, n, low * scale, high * scale);
}

#if QUARTERS > 1 && HAS_PDL
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ float load_shared_of(u32 address, int block) {
  u32 remote;
  float x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(remote) : "memory");
  return x;
}

// Adds the cluster's quarters in order; each block finishes a quarter of the tiles.
__device__ __forceinline__ void finish_cluster(const float (&total)[MT][NTILES][4], unsigned char* shared_bytes,
                                               const Epilogue& epilogue, const float* __restrict__ scales,
                                               int rows) {
  float* sums = reinterpret_cast<float*>(shared_bytes);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int n = 0; n < NTILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = (warp & 1) * WARP_M + m * 16 + (lane >> 2) + (i & 2) * 4;
        const int column = (warp >> 1) * WARP_N + n * 8 + (lane & 3) * 2 + (i & 1);
        sums[r * SUM_STRIDE + column] = total[m][n][i];
      }
    }
  }
  cluster_barrier();
  constexpr int OWN_TILES = MB / 16 / QUARTERS;
  for (int item = threadIdx.x; item < OWN_TILES * NB * 8; item += 256) {
    const int r = item & 7, column = (item >> 3) % NB, own = (item >> 3) / NB;
    const int tile = blockIdx.z * OWN_TILES + own;
    const u32 low_at = shared_address(sums + (tile * 16 + r) * SUM_STRIDE + column);
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int block = 0; block < QUARTERS; ++block) {
      low += load_shared_of(low_at, block);
      high += load_shared_of(low_at + 8 * SUM_STRIDE * 4, block);
    }
    finish_scaled(epilogue, scales, rows, blockIdx.x * (MB / 16) + tile, r, blockIdx.y * NB + column, low, high);
  }
  cluster_barrier();  // the others may still read our sums
}
#endif

__device__ __forceinline__ void tile_gemm(const bf16* __restrict__ x, int rows, const bf16* __restrict__ weight,
                                          const float* __restrict__ scales, const Epilogue& epilogue) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const u32 ring = shared_address(shared_bytes);
  bool has_waited = false;
  float total[MT][NTILES][4] = {};
#if HAS_PDL
  const int first = blockIdx.z * PER_QUARTER;
  sum_quarter(total, x, rows, weight, ring, first, min(first + PER_QUARTER, NUM_SLICES), has_waited);
#if QUARTERS > 1
  finish_cluster(total, shared_bytes, epilogue, scales, rows);
  return;
#endif
#else
  for (int quarter = 0; quarter < QUARTERS; ++quarter) {
    float sum[MT][NTILES][4] = {};
    const int first = quarter * PER_QUARTER;
    sum_quarter(sum, x, rows, weight, ring, first, min(first + PER_QUARTER, NUM_SLICES), has_waited);
    for (int i = 0; i < MT * NTILES * 4; ++i) (&total[0][0][0])[i] += (&sum[0][0][0])[i];
  }
#endif
#if QUARTERS == 1 || !HAS_PDL
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const int tile = blockIdx.x * (MB / 16) + (warp & 1) * MT + m;
#pragma unroll
    for (int n = 0; n < NTILES; ++n) {
      const int row = blockIdx.y * NB + (warp >> 1) * WARP_N + n * 8 + (lane & 3) * 2;
      finish_scaled(epilogue, scales, rows, tile, lane >> 2, row, total[m][n][0], total[m][n][2]);
      finish_scaled(epilogue, scales, rows, tile, lane >> 2, row + 1, total[m][n][1], total[m][n][3]);
    }
  }
#endif
}
