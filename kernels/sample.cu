// sample: one id a row from its logits, without a sort: sample_partial, then sample.
//
// sample_partial applies penalties and bias in place (keeping the model's own logits beside) and finds the
// largest of a part of the vocabulary. sample reads these; greedy rows end there. Else it narrows an interval
// of order-preserving integer keys by histograms until one key is left: the k-th largest (top_k), or the one
// with which the mass reaches p (top_p). Masses are integers, 2^31 for the most likely id, so that sums do not
// depend on their order and the draw is the same every time.
//
// Source    Philox: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; contract: Backend.sample
// Launch    sample_partial: grid (PARTS, samples), block (256); sample: grid (samples), block (1024)
// Layout    logits float32 [samples, VOCAB]; partial uint64 [samples, PARTS]; others as SamplingArrays and
//           SampleArrays; saved_* float32 beside seen_ids and bias_ids; bitmask null: none
// Defines   VOCAB, PARTS (at most 32), MAX_TOP (columns of top_ids)
// Traffic   greedy: logits once; else about ten times, from L2
// Numerics  masses rounded to 2^-31 of the largest
// Checked   tests/gpu/test_sample.py against service/tensor/cpu/sample.py

#include "common.cuh"

struct Sampling {
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const u64* seeds;
  const int* choices;
  const int* positions;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const int* seen_starts;
  const int* seen_ids;
  const int* seen_counts;
  const int* bias_starts;
  const int* bias_ids;
  const float* bias_values;
  const u32* bitmask;
  float* saved_seen;
  float* saved_bias;
};

constexpr int PART = ((VOCAB + PARTS - 1) / PARTS + 3) / 4 * 4;
constexpr u32 NAN_KEY = 0xffffffffu;

// Larger floats have larger keys, both zeros the same; a NaN has the largest.
__device__ __forceinline__ u32 order_key(float x) {
  if (x != x) return NAN_KEY;
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_value(u32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ bool is_allowed(const Sampling& s, int sample, int id) {
  if (s.bitmask == nullptr) return true;
  return s.bitmask[static_cast<long long>(sample) * ((VOCAB + 31) / 32) + id / 32] >> (id & 31) & 1u;
}

__device__ __forceinline__ float penalised(const Sampling& s, int sample, int count, float x) {
  const float repetition = s.repetition[sample];
  x = x > 0.0f ? __fdiv_rn(x, repetition) : x * repetition;
  x -= s.frequency[sample] * static_cast<float>(count);
  return count > 0 ? x - s.presence[sample] : x;
}

__device__ __forceinline__ u64 warp_max_u64(u64 x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    const u64 other = __shfl_xor_sync(~0u, x, step);
    x = other > x ? other : x;
  }
  return x;
}

extern "C" __global__ __launch_bounds__(256)
void sample_partial(float* __restrict__ logits, Sampling s, u64* __restrict__ partial) {
  __shared__ u64 best_of_warp[8];
  const int sample = blockIdx.y, first = blockIdx.x * PART, last = min(first + PART, VOCAB);
  float* row = logits + static_cast<long long>(sample) * VOCAB;
  launch_dependents();
  wait_for_previous();
  for (int i = s.seen_starts[sample] + threadIdx.x; i < s.seen_starts[sample + 1]; i += 256) {
    const int id = s.seen_ids[i];
    if (id < first || id >= last) continue;
    s.saved_seen[i] = row[id];
    row[id] = penalised(s, sample, s.seen_counts[i], row[id]);
  }
  __syncthreads();
  for (int i = s.bias_starts[sample] + threadIdx.x; i < s.bias_starts[sample + 1]; i += 256) {
    const int id = s.bias_ids[i];
    if (id < first || id >= last) continue;
    s.saved_bias[i] = row[id];
    row[id] += s.bias_values[i];
  }
  __syncthreads();
  u64 best = 0;
  for (int id = first + threadIdx.x; id < last; id += 256) {
    const u64 key = is_allowed(s, sample, id) ? order_key(row[id]) : order_key(-INFINITY);
    const u64 candidate = key << 32 | (0xffffffffu - id);  // ties go to the lowest id
    best = candidate > best ? candidate : best;
  }
  best = warp_max_u64(best);
  if ((threadIdx.x & 31) == 0) best_of_warp[threadIdx.x >> 5] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = warp_max_u64(threadIdx.x < 8 ? best_of_warp[threadIdx.x] : 0);
    if (threadIdx.x == 0) partial[sample * PARTS + blockIdx.x] = best;
  }
}

struct Scratch {
  u32 low[2048], high[2048];  // a histogram of 64-bit sums
  u64 warp_totals[32];
  u64 found_before;
  int found_bin;
  u64 best;
  int id;
};

// Sum over the threads up to and including this one; `total` over all.
__device__ u64 block_scan(u64 x, Scratch& scratch, u64& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u64 other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  __syncthreads();
  if (lane == 31) scratch.warp_totals[warp] = x;
  __syncthreads();
  u64 before = 0;
  total = 0;
  for (int w = 0; w < 32; ++w) {
    if (w < warp) before += scratch.warp_totals[w];
    total += scratch.warp_totals[w];
  }
  return before + x;
}

struct Candidates {
  const float* row;
  const Sampling& s;
  int sample;
  float best, temperature, min_p;
  u32 threshold;  // keys below are out

  __device__ __forceinline__ u32 key(int id) const {
    return is_allowed(s, sample, id) ? order_key(row[id]) : order_key(-INFINITY);
  }
  // 0 for what is left out
  __device__ __forceinline__ u32 mass(u32 key) const {
    if (key < threshold) return 0;
    const float m = expf(__fdiv_rn(key_value(key) - best, temperature));
    return m < min_p ? 0 : static_cast<u32>(m * 2147483648.0f + 0.5f);
  }
};

__device__ u64 total_mass(const Candidates& c, Scratch& scratch) {
  u64 sum = 0, total;
  for (int id = threadIdx.x; id < VOCAB; id += 1024) sum += c.mass(c.key(id));
  block_scan(sum, scratch, total);
  return total;
}

// The largest key such that the ids with this key or a larger one weigh at least `target` together.
__device__ u32 select_key(const Candidates& c, bool by_mass, u64 target, u32 lowest, u32 highest, Scratch& scratch) {
  while (lowest < highest) {
    const int bits = 32 - __clz(highest - lowest), shift = max(0, bits - 11);
    for (int bin = threadIdx.x; bin < 2048; bin += 1024) scratch.low[bin] = scratch.high[bin] = 0;
    __syncthreads();
    for (int id = threadIdx.x; id < VOCAB; id += 1024) {
      const u32 key = c.key(id);
      if (key < lowest || key > highest) continue;
      const u32 weight = by_mass ? c.mass(key) : 1;
      if (weight == 0) continue;
      const int bin = (key - lowest) >> shift;
      const u32 old = atomicAdd(&scratch.low[bin], weight);
      if (old + weight < old) atomicAdd(&scratch.high[bin], 1);
    }
    __syncthreads();
    const int bin = 2047 - 2 * threadIdx.x;
    const u64 upper = static_cast<u64>(scratch.high[bin]) << 32 | scratch.low[bin];
    const u64 lower = static_cast<u64>(scratch.high[bin - 1]) << 32 | scratch.low[bin - 1];
    u64 total;
    const u64 through = block_scan(upper + lower, scratch, total), before = through - upper - lower;
    if (threadIdx.x == 0) scratch.found_bin = 0, scratch.found_before = total;
    __syncthreads();
    if (before < target && target <= through) {
      const bool is_upper = before + upper >= target;
      scratch.found_bin = is_upper ? bin : bin - 1;
      scratch.found_before = is_upper ? before : before + upper;
    }
    __syncthreads();
    target -= scratch.found_before;
    const u32 found = lowest + (static_cast<u32>(scratch.found_bin) << shift);
    highest = min(highest, found + ((1u << shift) - 1));
    lowest = found;
    __syncthreads();
  }
  return lowest;
}

__device__ u32 philox_word(u64 seed, u32 position, u32 choice) {
  u32 c0 = position, c1 = choice, c2 = 0, c3 = 0, k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// The first id, by increasing id, whose cumulated mass exceeds word / 2^24 of the mass kept.
__device__ int draw(const Candidates& c, u32 word, int fallback, Scratch& scratch) {
  constexpr int SEGMENT = (VOCAB + 31) / 32;  // one a warp
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first = warp * SEGMENT, last = min(first + SEGMENT, VOCAB);
  u64 sum = 0, total;
  for (int id = first + lane; id < last; id += 32) sum += c.mass(c.key(id));
  const u64 before_lane = block_scan(sum, scratch, total) - sum;
  const u64 before = __shfl_sync(~0u, before_lane, 0), through = before + scratch.warp_totals[warp];
  const u64 wanted = (total >> 24) * word + (((total & 0xffffffu) * word) >> 24);
  if (threadIdx.x == 0) scratch.id = fallback;
  __syncthreads();
  if (before <= wanted && wanted < through) {
    u64 cumulated = before;
    for (int start = first; start < last; start += 32) {
      const int id = start + lane;
      u64 scan = id < last ? c.mass(c.key(id)) : 0;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const u64 other = __shfl_up_sync(~0u, scan, step);
        if (lane >= step) scan += other;
      }
      const u32 reached = __ballot_sync(~0u, cumulated + scan > wanted);
      if (reached != 0) {
        if (lane == 0) scratch.id = start + __ffs(reached) - 1;
        break;
      }
      cumulated += __shfl_sync(~0u, scan, 31);
    }
  }
  __syncthreads();
  return scratch.id;
}

__device__ int choose(const float* row, const Sampling& s, int sample, u64 best, Scratch& scratch) {
  const u32 best_key = static_cast<u32>(best >> 32);
  const int best_id = static_cast<int>(0xffffffffu - static_cast<u32>(best));
  if (best_key == NAN_KEY || !isfinite(key_value(best_key))) return -1;
  if (s.temperature[sample] == 0.0f) return best_id;
  Candidates c{row, s, sample, key_value(best_key), s.temperature[sample], 0.0f, 0};
  const int top_k = s.top_k[sample];
  if (top_k > 0 && top_k < VOCAB) c.threshold = select_key(c, false, top_k, 0, best_key, scratch);
  const float top_p = s.top_p[sample];
  if (top_p < 1.0f) {
    const u64 total = total_mass(c, scratch);
    const u64 target = max(1ull, min(total, static_cast<u64>(ceil(static_cast<double>(top_p) * total))));
    c.threshold = max(c.threshold, select_key(c, true, target, c.threshold, best_key, scratch));
  }
  c.min_p = s.min_p[sample];
  const u32 word = philox_word(s.seeds[sample], s.positions[sample], s.choices[sample]) >> 8;
  return draw(c, word, best_id, scratch);
}

__device__ u64 block_max(u64 x, Scratch& scratch) {
  x = warp_max_u64(x);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch.warp_totals[threadIdx.x >> 5] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < 32; ++w) x = max(x, scratch.warp_totals[w]);
  return x;
}

struct Logprobs {
  float* chosen;
  int* ranks;
  int* top_ids;
  float* top_logprobs;
};

// Of the model's own distribution: the row has been restored.
__device__ void write_logprobs(const float* row, int sample, int id, int num_top, const Logprobs& out,
                               Scratch& scratch) {
  u64 bound = ~0ull;
  float largest = 0.0f, log_sum = 0.0f;
  for (int k = 0; k < max(num_top, 1); ++k) {  // the next most likely; ties to the lowest id
    u64 next = 0;
    for (int i = threadIdx.x; i < VOCAB; i += 1024) {
      const u64 candidate = static_cast<u64>(order_key(row[i])) << 32 | (0xffffffffu - i);
      if (candidate < bound && candidate > next) next = candidate;
    }
    bound = block_max(next, scratch);
    const float value = key_value(static_cast<u32>(bound >> 32));
    if (k == 0) {
      largest = value;
      double sum = 0.0;
      u64 total;
      for (int i = threadIdx.x; i < VOCAB; i += 1024) sum += expf(row[i] - largest);
      block_scan(static_cast<u64>(sum * 1099511627776.0), scratch, total);  // exact whatever the order
      log_sum = logf(static_cast<float>(total * 9.094947017729282e-13)) + largest;
    }
    if (threadIdx.x == 0 && k < num_top) {
      out.top_ids[static_cast<long long>(sample) * MAX_TOP + k] = static_cast<int>(0xffffffffu - static_cast<u32>(bound));
      out.top_logprobs[static_cast<long long>(sample) * MAX_TOP + k] = value - log_sum;
    }
  }
  const float own = row[max(id, 0)];
  u64 above = 0, total;
  for (int i = threadIdx.x; i < VOCAB; i += 1024) above += row[i] > own;
  block_scan(above, scratch, total);
  if (threadIdx.x == 0) {
    out.chosen[sample] = own - log_sum;
    out.ranks[sample] = static_cast<int>(total) + 1;
  }
}

extern "C" __global__ __launch_bounds__(1024)
void sample(float* __restrict__ logits, Sampling s, const u64* __restrict__ partial, int max_top_logprobs,
            const int* __restrict__ lanes, int* __restrict__ last_ids, int* __restrict__ ids, Logprobs logprobs) {
  __shared__ Scratch scratch;
  const int sample = blockIdx.x;
  float* row = logits + static_cast<long long>(sample) * VOCAB;
  launch_dependents();
  wait_for_previous();
  if (threadIdx.x < 32) {
    const u64 best = warp_max_u64(threadIdx.x < PARTS ? __ldcg(partial + sample * PARTS + threadIdx.x) : 0);
    if (threadIdx.x == 0) scratch.best = best;
  }
  __syncthreads();
  const int id = choose(row, s, sample, scratch.best, scratch);
  if (threadIdx.x == 0) {
    ids[sample] = id;
    last_ids[lanes[sample]] = id;
  }
  if (max_top_logprobs < 0) return;
  for (int i = s.bias_starts[sample] + threadIdx.x; i < s.bias_starts[sample + 1]; i += 1024) {
    const int biased = s.bias_ids[i];
    if (biased >= 0 && biased < VOCAB) row[biased] = s.saved_bias[i];
  }
  __syncthreads();
  for (int i = s.seen_starts[sample] + threadIdx.x; i < s.seen_starts[sample + 1]; i += 1024) {
    const int seen = s.seen_ids[i];
    if (seen >= 0 && seen < VOCAB) row[seen] = s.saved_seen[i];
  }
  __syncthreads();
  write_logprobs(row, sample, id, min(max_top_logprobs, MAX_TOP), logprobs, scratch);
}
