// pack_int8: INT8 weights into the layout of int8.cuh, quantised on the way where they come as floats.
//
// Launch    grid (tiles of 64 rows, pieces of 128 columns), block (256); at load only; `is_bad` becomes 1 where a
//           float is not finite, or its group's scale is beyond float16
// Layout    source [M, K]: int8, bfloat16 or float32; scales float16 [M, ceil(K / GROUP)], read where source is int8
// Defines   K, GROUP; NORM = 0; SOURCE: 0 int8, 1 bfloat16, 2 float32
// Numerics  as service/tensor/quantized.py, bit for bit
// Checked   tests/gpu/test_int8.py against service/tensor/quantized.py

#include "common.cuh"
#include "int8.cuh"

__device__ __forceinline__ float load_value(const void* source, long long i) {
#if SOURCE == 2
  return static_cast<const float*>(source)[i];
#else
  return bf16_to_float(static_cast<const bf16*>(source)[i]);
#endif
}

__device__ __forceinline__ unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// Lanes have four columns each: quantises them, and says the scale of their group.
__device__ __forceinline__ unsigned short quantize(int (&out)[4], const float (&w)[4]) {
  float largest = fmaxf(fmaxf(fabsf(w[0]), fabsf(w[1])), fmaxf(fabsf(w[2]), fabsf(w[3])));
#pragma unroll
  for (int step = GROUP / 8; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const unsigned short scale = float_to_half(__fdiv_rn(largest, 127.0f));
  const float divisor = half_to_float(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = divisor == 0.0f ? 0 : max(-127, min(127, __float2int_rn(__fdiv_rn(w[i], divisor))));
  }
  return scale;
}

extern "C" __global__ __launch_bounds__(256)
void pack_int8(const void* __restrict__ source, const unsigned short* __restrict__ scales, int rows, int pairs,
               unsigned char* __restrict__ packed, int* is_bad) {
  __shared__ signed char values[64][128];
  __shared__ unsigned short group_scales[GROUPS][64];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = blockIdx.y;
  for (int r = warp; r < 64; r += 8) {
    const int row = output_of(blockIdx.x * 64 + r, pairs), column = piece * 128 + lane * 4;
    const bool has_row = row < rows;
    int out[4] = {};
    unsigned short scale = 0;
#if SOURCE == 0
    const int group = column / GROUP, num_groups = (K + GROUP - 1) / GROUP;
    if (has_row && group < num_groups) scale = scales[static_cast<long long>(row) * num_groups + group];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (has_row && column + i < K) {
        out[i] = static_cast<const signed char*>(source)[static_cast<long long>(row) * K + column + i];
      }
    }
#else
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = has_row && column + i < K ? load_value(source, static_cast<long long>(row) * K + column + i) : 0.0f;
    }
    scale = quantize(out, w);
    const bool is_finite = isfinite(w[0]) && isfinite(w[1]) && isfinite(w[2]) && isfinite(w[3]);
    if (!is_finite || (scale & 0x7c00) == 0x7c00) *is_bad = 1;
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) values[r][lane * 4 + i] = static_cast<signed char>(out[i]);
    if (lane * 4 % GROUP == 0) group_scales[lane * 4 / GROUP][r] = scale;
  }
  __syncthreads();
  unsigned char* target = packed + (static_cast<long long>(blockIdx.x) * PACKED_PIECES + piece) * PACKED_BYTES;
  for (int i = threadIdx.x; i < PACKED_VALUES; i += 256) {
    const int byte = i % 16, unit = i / 16, word = byte / 4, q = unit / 128, g = unit % 32 / 4, t = unit % 4;
    const int r = unit / 32 % 4 * 16 + byte % 2 * 8 + g;
    const int column = q * 32 + word / 2 * 16 + word % 2 * 8 + t * 2 + byte % 4 / 2;
    target[i] = static_cast<unsigned char>(values[r][column]);
  }
  for (int i = threadIdx.x; i < GROUPS * 64; i += 256) {
    reinterpret_cast<unsigned short*>(target + PACKED_VALUES)[i] = group_scales[i / 64][i % 64];
  }
}
