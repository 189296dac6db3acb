// silu_mul: silu(gate) * up over rows of a product [gate, up]; the prefill half of gate_up_silu.
//
// Launch    grid (ceil(rows * FFN / 8 / 256)), block (256)
// Layout    raw bfloat16 [rows, 2 FFN]; bias float32 [2 FFN] or null; out bfloat16 [rows, FFN]
// Defines   FFN
// Traffic   6 * rows * FFN bytes
// Numerics  float32 between one read and one rounding
// Checked   tests/gpu/test_gate_up_silu.py

#include "common.cuh"

static_assert(FFN % 8 == 0, "rows are read in 16-byte pieces");

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

extern "C" __global__ __launch_bounds__(256)
void silu_mul(const bf16* __restrict__ raw, const float* __restrict__ bias, bf16* __restrict__ out, int rows) {
  const long long item = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  const long long row = item / (FFN / 8);
  const int column = static_cast<int>(item % (FFN / 8)) * 8;
  launch_dependents();
  wait_for_previous();
  if (row >= rows) return;
  const uint4 gates = load16(raw + row * 2 * FFN + column), ups = load16(raw + row * 2 * FFN + FFN + column);
  const u32 gate[4] = {gates.x, gates.y, gates.z, gates.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
  u32 result[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float g0 = bf16_low(gate[i]), g1 = bf16_high(gate[i]), u0 = bf16_low(up[i]), u1 = bf16_high(up[i]);
    if (bias != nullptr) {
      const int j = column + 2 * i;
      g0 += bias[j], g1 += bias[j + 1], u0 += bias[FFN + j], u1 += bias[FFN + j + 1];
    }
    result[i] = pack_bf16(gated(g0, u0), gated(g1, u1));
  }
  *reinterpret_cast<uint4*>(out + row * FFN + column) = make_uint4(result[0], result[1], result[2], result[3]);
}
