// common: bfloat16 in 32-bit registers, 16-byte accesses, programmatic launch, reductions. No kernel inside.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // bits of a bfloat16

#define INFINITY __int_as_float(0x7f800000)  // NVRTC has no math.h

#if __CUDA_ARCH__ >= 900
#define HAS_PDL 1
#else
#define HAS_PDL 0
#endif

// The kernels after this one may be scheduled: their blocks load weights while ours finish.
__device__ __forceinline__ void launch_dependents() {
#if HAS_PDL
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns once the kernel before has ended and its writes are visible. Nothing that a kernel of this step
// wrote may be read before, and nothing written.
__device__ __forceinline__ void wait_for_previous() {
#if HAS_PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float bf16_to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

// Rounds to nearest even; a NaN stays one.
__device__ __forceinline__ bf16 float_to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  bf16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
  return out;
#else
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#else
  return float_to_bf16(low) | (static_cast<u32>(float_to_bf16(high)) << 16);
#endif
}

// Reads around L1, which another block's writes do not reach.
__device__ __forceinline__ uint4 load16(const void* source) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(source) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_float4(const float* source) {
  return *reinterpret_cast<const float4*>(source);
}

// Four values that lie side by side.
__device__ __forceinline__ void store_bf16x4(bf16* target, const float4& v) {
  *reinterpret_cast<uint2*>(target) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

__device__ __forceinline__ float4 unpack_bf16x4(const uint2& v) {
  return make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
}

__device__ __forceinline__ uint2 load8(const void* source) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source) : "memory");
  return v;
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
