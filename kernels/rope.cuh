// rope: where results of the QKV projection go. Rotation in the half-rotated layout: j pairs with j + HEAD_DIM / 2.
//
// Source    Su et al. 2021, arXiv:2104.09864, eq. 34
// Defines   HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE

struct RopeTargets {
  const float* rope;        // [positions, HEAD_DIM]: cosines, then sines
  const int* positions;     // [rows]
  const int* slots;         // [rows]
  bf16* q;                  // [rows, HEADS, HEAD_DIM]
  bf16* keys;               // [blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
  bf16* values;
};

// What the write of four pairs needs besides them; none of it changes during a step.
struct RopePart {
  float4 cosine, sine;
  int slot;
};

__device__ __forceinline__ RopePart load_rope(const RopeTargets& to, int row, int head, int j) {
  RopePart part{make_float4(1.0f, 1.0f, 1.0f, 1.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0};
  if (head < HEADS + KV_HEADS) {
    const float* angles = to.rope + static_cast<long long>(to.positions[row]) * HEAD_DIM + j;
    part.cosine = load_float4(angles);
    part.sine = load_float4(angles + HEAD_DIM / 2);
  }
  if (head >= HEADS) part.slot = to.slots[row];
  return part;
}

// Components j to j + 3, and their partners HEAD_DIM / 2 further, of one head of one row; heads are those of q,
// then k, then v.
__device__ __forceinline__ void store_rotated(const RopeTargets& to, const RopePart& part, int row, int head, int j,
                                              const float4& low, const float4& high) {
  bf16* target;
  if (head < HEADS) {
    target = to.q + (static_cast<long long>(row) * HEADS + head) * HEAD_DIM;
  } else {
    const long long block = part.slot / BLOCK_SIZE;
    target = (head < HEADS + KV_HEADS ? to.keys : to.values) +
             ((block * KV_HEADS + (head - HEADS) % KV_HEADS) * BLOCK_SIZE + part.slot % BLOCK_SIZE) * HEAD_DIM;
  }
  const float4 &c = part.cosine, &s = part.sine;
  store_bf16x4(target + j, make_float4(low.x * c.x - high.x * s.x, low.y * c.y - high.y * s.y,
                                       low.z * c.z - high.z * s.z, low.w * c.w - high.w * s.w));
  store_bf16x4(target + j + HEAD_DIM / 2, make_float4(high.x * c.x + low.x * s.x, high.y * c.y + low.y * s.y,
                                                      high.z * c.z + low.z * s.z, high.w * c.w + low.w * s.w));
}
