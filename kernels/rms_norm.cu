// rms_norm: RMSNorm of chosen rows, for the projections that do not norm by themselves.
//
// Without `norm` there is no weight: it has been multiplied into the projection that follows.
//
// Source    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4
// Launch    grid (ceil(rows / 8)), block (512): a warp takes one slice of 8 rows
// Layout    x bfloat16 [.., K]; row_ids int32 [rows] or null; norm float32 [K] or null; out bfloat16 [rows, K]
// Defines   K, PARTS = 1
// Traffic   x read once from memory and once from L2, out written
// Numerics  sums in float32, in the order of slices.cuh
// Checked   tests/gpu/test_rms_norm.py

#include "common.cuh"
#include "slices.cuh"

extern "C" __global__ __launch_bounds__(512)
void rms_norm(const bf16* __restrict__ x, const int* __restrict__ row_ids, int rows,
              const float* __restrict__ norm, float eps, bf16* __restrict__ out) {
  __shared__ float squares[NUM_SLICES][8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int row = blockIdx.x * 8 + g;
  const bool is_inside = row < rows;
  launch_dependents();
  wait_for_previous();
  const long long source = is_inside && row_ids != nullptr ? row_ids[row] : row;
  SlicePart part;
  for (int slice = warp; slice < NUM_SLICES; slice += 16) {
    part = load_slice(x + source * K, slice * SLICE, is_inside);
    const float square = slice_square(part);
    if (t == 0) squares[slice][g] = square;
  }
  __syncthreads();
  float square = 0.0f;
  for (int slice = 0; slice < NUM_SLICES; ++slice) square += squares[slice][g];
  const float scale = rsqrtf(square / K + eps);
  if (!is_inside) return;
  for (int slice = warp; slice < NUM_SLICES; slice += 16) {
    if (NUM_SLICES > 16) part = load_slice(x + source * K, slice * SLICE, true);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int column = slice * SLICE + 32 * q + 8 * t;
      if (column >= K) continue;
      float4 low = make_float4(scale, scale, scale, scale), high = low;
      if (norm != nullptr) {
        const float4 left = load_float4(norm + column), right = load_float4(norm + column + 4);
        low = make_float4(left.x * scale, left.y * scale, left.z * scale, left.w * scale);
        high = make_float4(right.x * scale, right.y * scale, right.z * scale, right.w * scale);
      }
      scale_pairs(part.piece[q], low, high);
      *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * K + column) = part.piece[q];
    }
  }
}
