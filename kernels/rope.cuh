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

// What the write of one pair needs besides the pair; none of it changes during a step.
struct RopePart {
  float cosine, sine;
  int slot;
};

__device__ __forceinline__ RopePart load_rope(const RopeTargets& to, int row, int head, int j) {
  RopePart part{1.0f, 0.0f, 0};
  if (head < HEADS + KV_HEADS) {
    const float* angles = to.rope + static_cast<long long>(to.positions[row]) * HEAD_DIM + j;
    part.cosine = angles[0];
    part.sine = angles[HEAD_DIM / 2];
  }
  if (head >= HEADS) part.slot = to.slots[row];
  return part;
}

// Components j and j + HEAD_DIM / 2 of one head of one row; heads are those of q, then k, then v.
__device__ __forceinline__ void store_rotated(const RopeTargets& to, const RopePart& part, int row, int head, int j,
                                              float low, float high) {
  bf16* target;
  if (head < HEADS) {
    target = to.q + (static_cast<long long>(row) * HEADS + head) * HEAD_DIM;
  } else {
    const long long block = part.slot / BLOCK_SIZE;
    target = (head < HEADS + KV_HEADS ? to.keys : to.values) +
             ((block * KV_HEADS + (head - HEADS) % KV_HEADS) * BLOCK_SIZE + part.slot % BLOCK_SIZE) * HEAD_DIM;
  }
  target[j] = float_to_bf16(low * part.cosine - high * part.sine);
  target[j + HEAD_DIM / 2] = float_to_bf16(high * part.cosine + low * part.sine);
}
