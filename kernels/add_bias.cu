// add_bias: residual += bias on every row; after a library's product, which has no bias of ours.
//
// Launch    grid (ceil(rows * M / 256)), block (256)
// Layout    residual bfloat16 [rows, M]; bias float32 [M]
// Defines   M
// Traffic   4 * rows * M bytes
// Numerics  one rounding more than the fused kernel
// Checked   tests/gpu/test_linear_add.py

#include "common.cuh"

extern "C" __global__ __launch_bounds__(256)
void add_bias(bf16* residual, const float* __restrict__ bias, int rows) {
  const long long item = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  launch_dependents();
  wait_for_previous();
  if (item >= static_cast<long long>(rows) * M) return;
  residual[item] = float_to_bf16(bf16_to_float(residual[item]) + bias[item % M]);
}
