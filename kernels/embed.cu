// embed: the embedding of every row's token.
//
// Launch    grid (rows), block (128)
// Layout    token_ids, lanes int32; last_ids int32; table bfloat16 [vocab, DIM]; out bfloat16 [rows, DIM]
// Defines   DIM, VOCAB
// Traffic   4 * rows * DIM bytes
// Numerics  copies bits
// Checked   tests/gpu/test_embed.py against service/tensor/cpu/embed.py

#include "common.cuh"

static_assert(DIM % 8 == 0, "rows are read in 16-byte pieces");

extern "C" __global__ __launch_bounds__(128)
void embed(const int* __restrict__ token_ids, const int* __restrict__ lanes, const int* __restrict__ last_ids,
           const bf16* __restrict__ table, bf16* __restrict__ out) {
  const int row = blockIdx.x;
  launch_dependents();
  wait_for_previous();
  int id = token_ids[row];
  if (id < 0) id = __ldcg(last_ids + lanes[row]);  // only decode requests, which lead: request r is row r
  if (id < 0 || id >= VOCAB) id = 0;  // its request failed in the step before; its result is dropped
  for (int i = threadIdx.x; i < DIM / 8; i += 128) {
    *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * DIM + i * 8) =
        load16(table + static_cast<long long>(id) * DIM + i * 8);
  }
}
