// mma: asynchronous copies to shared memory, matrix loads and the bfloat16 tensor core product.

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory; zeros where `is_inside` is false. Below sm_80 it is synchronous.
__device__ __forceinline__ void copy16_async(u32 target, const void* source, bool is_inside) {
#if __CUDA_ARCH__ >= 800
  const int num_bytes = is_inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(target), "l"(source), "r"(num_bytes) : "memory");
#else
  uint4 v = make_uint4(0, 0, 0, 0);
  if (is_inside) v = load16(source);
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "r"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `PENDING` of this thread's committed groups are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}

// Four 8 x 8 matrices of bfloat16; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&out)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&out)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. In the terms of PTX's m16n8k16: g = lane / 4, t = lane % 4;
// a: rows g, g + 8, columns 2t.. and 2t + 8..; b: rows 2t.., 2t + 8.., column g; c: rows g, g + 8, columns 2t..
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // sm_75 has no bfloat16 product: every lane gathers its rows and columns
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 upper = __shfl_sync(~0u, a[2 * half], g * 4 + s);
      const u32 lower = __shfl_sync(~0u, a[2 * half + 1], g * 4 + s);
      const u32 left = __shfl_sync(~0u, half ? b1 : b0, 8 * t + s);
      const u32 right = __shfl_sync(~0u, half ? b1 : b0, 8 * t + 4 + s);
      c[0] += bf16_low(upper) * bf16_low(left) + bf16_high(upper) * bf16_high(left);
      c[1] += bf16_low(upper) * bf16_low(right) + bf16_high(upper) * bf16_high(right);
      c[2] += bf16_low(lower) * bf16_low(left) + bf16_high(lower) * bf16_high(left);
      c[3] += bf16_low(lower) * bf16_low(right) + bf16_high(lower) * bf16_high(right);
    }
  }
#endif
}
