// slices: the one order in which skinny_gemm and rms_norm sum over K, whatever the batch.
//
// K is cut into slices of 128, and slices make PARTS parts of K. A slice is one chain of tensor core products.
// Slices of a part are added in order, then parts in order.

constexpr int SLICE = 128;
constexpr int NUM_SLICES = (K + SLICE - 1) / SLICE;
constexpr int PER_PART = (NUM_SLICES + PARTS - 1) / PARTS;

static_assert(K % 8 == 0, "rows are read in 16-byte pieces");

// Components k + 32 q + 8 t + (0..7), q = 0..3, of one row: this lane's part of a slice (t = lane % 4).
struct SlicePart {
  uint4 piece[4];
};

__device__ __forceinline__ SlicePart load_slice(const bf16* row, int k, bool is_inside) {
  const int t = threadIdx.x & 3;
  SlicePart part;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int column = k + 32 * q + 8 * t;
    part.piece[q] = is_inside && column < K ? load16(row + column) : make_uint4(0, 0, 0, 0);
  }
  return part;
}

// Sum of squares of the slice, in all four lanes that share the row.
__device__ __forceinline__ float slice_square(const SlicePart& part) {
  float square = 0.0f;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 pairs[4] = {part.piece[q].x, part.piece[q].y, part.piece[q].z, part.piece[q].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      square = fmaf(bf16_low(pairs[i]), bf16_low(pairs[i]), square);
      square = fmaf(bf16_high(pairs[i]), bf16_high(pairs[i]), square);
    }
  }
  square += __shfl_xor_sync(~0u, square, 1);
  return square + __shfl_xor_sync(~0u, square, 2);
}

// Times the norm's weight, 1 / rms included.
__device__ __forceinline__ void scale_pairs(uint4& piece, const float4& low, const float4& high) {
  piece.x = pack_bf16(bf16_low(piece.x) * low.x, bf16_high(piece.x) * low.y);
  piece.y = pack_bf16(bf16_low(piece.y) * low.z, bf16_high(piece.y) * low.w);
  piece.z = pack_bf16(bf16_low(piece.z) * high.x, bf16_high(piece.z) * high.y);
  piece.w = pack_bf16(bf16_low(piece.w) * high.z, bf16_high(piece.w) * high.w);
}
