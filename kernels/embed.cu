// embed: the embedding of every row's token.
//
// Launch    grid (rows), block (128)
// Layout    token_ids, lanes int32; last_ids int32; table bfloat16 [vocab, DIM], or INT8 as int8.cuh has it; out
//           bfloat16 [rows, DIM]
// Defines   K = DIM, VOCAB; GROUP: 0: bfloat16; 32, 64 or 128: INT8; NORM = 0
// Traffic   4 * rows * DIM bytes
// Numerics  copies bits; INT8: value * scale, rounded to bfloat16
// Checked   tests/gpu/test_embed.py against service/tensor/cpu/embed.py

#include "common.cuh"
#if GROUP
#include "int8.cuh"
#endif

constexpr int DIM = K;

static_assert(DIM % 8 == 0, "rows are read in 16-byte pieces");

#if GROUP
using Element = unsigned char;

// A lane's part of a piece holds eight values of the row.
__device__ __forceinline__ void copy_row(const unsigned char* packed, int id, bf16* target) {
  const int r = id % 64, g = r % 8, upper = r / 8 % 2;
  for (int i = threadIdx.x; i < PACKED_PIECES * 16; i += 128) {
    const int piece = i / 16, q = i / 4 % 4, t = i % 4;
    const unsigned char* source = packed + (static_cast<long long>(id / 64) * PACKED_PIECES + piece) * PACKED_BYTES;
    const uint4 v = load16(source + q * 2048 + r / 16 * 512 + (g * 4 + t) * 16);
    const float scale = half_to_float(reinterpret_cast<const unsigned short*>(source + PACKED_VALUES)[q * 32 / GROUP * 64 + r]);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int column = piece * 128 + q * 32 + w / 2 * 16 + w % 2 * 8 + t * 2;
      const u32 word = words[w] >> (8 * upper);
      const float left = static_cast<signed char>(word), right = static_cast<signed char>(word >> 16);
      if (column < DIM) *reinterpret_cast<u32*>(target + column) = pack_bf16(left * scale, right * scale);
    }
  }
}
#else
using Element = bf16;

__device__ __forceinline__ void copy_row(const bf16* table, int id, bf16* target) {
  for (int i = threadIdx.x; i < DIM / 8; i += 128) {
    *reinterpret_cast<uint4*>(target + i * 8) = load16(table + static_cast<long long>(id) * DIM + i * 8);
  }
}
#endif

extern "C" __global__ __launch_bounds__(128)
void embed(const int* __restrict__ token_ids, const int* __restrict__ lanes, const int* __restrict__ last_ids,
           const Element* __restrict__ table, bf16* __restrict__ out) {
  const int row = blockIdx.x;
  launch_dependents();
  wait_for_previous();
  int id = token_ids[row];
  if (id < 0) id = __ldcg(last_ids + lanes[row]);  // only decode requests, which lead: request r is row r
  if (id < 0 || id >= VOCAB) id = 0;  // its request failed in the step before; its result is dropped
  copy_row(table, id, out + static_cast<long long>(row) * DIM);
}
