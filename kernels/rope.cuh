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

// Components j and j + HEAD_DIM / 2 of one head of one row; heads are those of q, then k, then v.
__device__ __forceinline__ void store_rotated(const RopeTargets& to, int row, int head, int j, float low, float high) {
  constexpr int HALF = HEAD_DIM / 2;
  if (head < HEADS + KV_HEADS) {
    const float* angles = to.rope + static_cast<long long>(to.positions[row]) * HEAD_DIM + j;
    const float cosine = angles[0], sine = angles[HALF], turned = low * cosine - high * sine;
    high = high * cosine + low * sine;
    low = turned;
  }
  bf16* target;
  if (head < HEADS) {
    target = to.q + (static_cast<long long>(row) * HEADS + head) * HEAD_DIM;
  } else {
    const int slot = to.slots[row], kv_head = (head - HEADS) % KV_HEADS;
    target = (head < HEADS + KV_HEADS ? to.keys : to.values) +
             ((static_cast<long long>(slot / BLOCK_SIZE) * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) *
                 HEAD_DIM;
  }
  target[j] = float_to_bf16(low);
  target[j + HALF] = float_to_bf16(high);
}
