// unpack_int8: a packed weight as bfloat16 [M, K], times the norm's weight, for a product of many rows.
//
// Launch    grid (tiles of 64 rows, pieces of 128 columns), block (256)
// Layout    packed: int8.cuh; norm as there; out bfloat16 [rows, K]
// Defines   K, GROUP; NORM: 1: there is a norm
// Traffic   one byte and a scale read, two bytes written, for each weight
// Numerics  value * scale * norm in float32, rounded once
// Checked   tests/gpu/test_int8.py against service/tensor/quantized.py

#include "common.cuh"
#include "int8.cuh"

constexpr int STRIDE = 128 + 8;  // of a row in shared memory: neighbouring rows lie in other banks

__device__ __forceinline__ float byte_of(u32 word, int i) {
  return static_cast<float>(static_cast<signed char>(word >> (8 * i)));
}

extern "C" __global__ __launch_bounds__(256)
void unpack_int8(const unsigned char* __restrict__ packed, const uint4* __restrict__ norm, int rows, int pairs,
                 bf16* __restrict__ out) {
  __shared__ bf16 values[64 * STRIDE];
  const int piece = blockIdx.y;
  const unsigned char* source = packed + (static_cast<long long>(blockIdx.x) * PACKED_PIECES + piece) * PACKED_BYTES;
  const unsigned short* scales = reinterpret_cast<const unsigned short*>(source + PACKED_VALUES);
  launch_dependents();
  wait_for_previous();  // of what it writes over, the previous product may still read
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int unit = threadIdx.x + j * 256, q = unit / 128, g = unit % 32 / 4, t = unit % 4;
    const int r = unit / 32 % 4 * 16 + g, group = q * 32 / GROUP;
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(source) + unit);
    const float upper = half_to_float(scales[group * 64 + r]), lower = half_to_float(scales[group * 64 + r + 8]);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    u32 factors[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};  // ones
#if NORM
    load_factors(factors, norm + (piece * 4 + q) * 4 + t);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = q * 32 + i / 2 * 16 + i % 2 * 8 + t * 2;
      const float left = bf16_low(factors[i]), right = bf16_high(factors[i]);
      *reinterpret_cast<u32*>(values + r * STRIDE + column) =
          pack_bf16(byte_of(words[i], 0) * upper * left, byte_of(words[i], 2) * upper * right);
      *reinterpret_cast<u32*>(values + (r + 8) * STRIDE + column) =
          pack_bf16(byte_of(words[i], 1) * lower * left, byte_of(words[i], 3) * lower * right);
    }
  }
  __syncthreads();
  for (int unit = threadIdx.x; unit < 64 * 16; unit += 256) {
    const int r = unit / 16, row = output_of(blockIdx.x * 64 + r, pairs), column = piece * 128 + unit % 16 * 8;
    if (row < rows && column < K) {
      *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * K + column) =
          *reinterpret_cast<const uint4*>(values + r * STRIDE + unit % 16 * 8);
    }
  }
}
