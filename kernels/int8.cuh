// int8: weights of service/tensor/quantized.py as kernels read them, and their way to bfloat16 operands.
//
// A packed weight is tiles of 64 rows, each of pieces of 128 columns one after the other. A piece:
//   int8 [4][4][32][16]    by 32 columns and 16 rows: for every lane, its part of the left operands of two
//                          products of 16 columns (mma.cuh); g = lane / 4, t = lane % 4
//   half [128 / GROUP][64] scales of the piece's groups, by row
// Of a lane's 16 bytes, word 2 p + h is for product p and columns 2 t + 8 h and 2 t + 8 h + 1: bytes 0 and 2 are
// those of row g, bytes 1 and 3 those of row g + 8. Rows and columns that the weight does not have are zeros.
// The weight of an RMSNorm lies as [K / 32][4][8] bfloat16: by t, the columns of words 0 to 3.
//
// Defines   K, GROUP (32, 64 or 128), NORM

constexpr int GROUPS = 128 / GROUP;  // of a piece
constexpr int PACKED_VALUES = 64 * 128, PACKED_BYTES = PACKED_VALUES + 128 * GROUPS;
constexpr int PACKED_PIECES = (K + 127) / 128;

// Which output lies in a row of the packed weight: outputs i and i + pairs are used together (Backend.linear).
__device__ __forceinline__ int output_of(int row, int pairs) {
  const int tile = row / 16, r = row % 16, inner = pairs / 8;
  return tile % inner * 8 + tile / inner * 2 * pairs + r / 8 * pairs + r % 8;
}

__device__ __forceinline__ u32 fma_pairs(u32 a, u32 b, u32 c) {
#if __CUDA_ARCH__ >= 800
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
#else
  return pack_bf16(fmaf(bf16_low(a), bf16_low(b), bf16_low(c)), fmaf(bf16_high(a), bf16_high(b), bf16_high(c)));
#endif
}

// (word & mask) | bits, in one instruction, which the compiler makes two of where both are constants.
__device__ __forceinline__ u32 masked(u32 word, u32 mask, u32 bits) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
  return out;
}

// Bytes 0 and 2 as bfloat16, exactly. With s the sign bit, a byte is its low seven bits minus 128 s; as bfloat16,
// 0x4300 with low seven bits m is 128 + m, and 0xc300 with the sign bit where the exponent's last bit is, -128 or
// -256.
__device__ __forceinline__ u32 widen_pair(u32 word, u32 low_bits, u32 sign_bits) {
  return fma_pairs(masked(word, low_bits, 0x43004300), 0x3f803f80, masked(word, sign_bits, 0xc300c300));
}

// A lane's operands of two products; `factors` (the norm's weight) are used where NORM is 1.
__device__ __forceinline__ void widen(u32 (*a)[4], const u32 (&words)[4], const u32 (&factors)[4]) {
  u32 low_bits, sign_bits;  // in registers: see masked
  asm("mov.b32 %0, 0x007f007f;" : "=r"(low_bits));
  asm("mov.b32 %0, 0x00800080;" : "=r"(sign_bits));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 upper = widen_pair(words[i], low_bits, sign_bits), lower = widen_pair(words[i] >> 8, low_bits, sign_bits);
#if NORM
    upper = fma_pairs(upper, factors[i], 0x80008000);  // minus zero
    lower = fma_pairs(lower, factors[i], 0x80008000);
#endif
    a[i / 2][i % 2 * 2] = upper;
    a[i / 2][i % 2 * 2 + 1] = lower;
  }
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

__device__ __forceinline__ void load_shared(u32 (&out)[4], u32 address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_factors(u32 (&out)[4], const uint4* source) {
  const uint4 v = __ldg(source);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

__device__ __forceinline__ float load_shared_half(u32 address) {
  unsigned short bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return half_to_float(bits);
}
