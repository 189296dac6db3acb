// warpgroup: what sm_90 has for warpgroups: barriers in shared memory, bulk copies, asynchronous products, clusters.
//
// Source    PTX ISA 8.5: mbarrier, cp.async.bulk, wgmma.mma_async, 128-byte swizzle

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(num_bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, int parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
               "@!done bra again;\n}" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_box(u32 target, const TensorMap& map, u32 barrier, int column, int inner,
                                         int outer) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %4, %5, %6}], [%2];"
               :: "r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(0), "r"(inner), "r"(outer) : "memory");
}

__device__ __forceinline__ void copy_rows(u32 target, const TensorMap& map, u32 barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               :: "r"(target), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// A whole number of 16 bytes that lie together.
__device__ __forceinline__ void copy_bytes(u32 target, const void* source, int num_bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(target), "l"(source), "r"(num_bytes), "r"(barrier) : "memory");
}

// Rows of 64 bfloat16 under each other, 128-byte swizzle; eight rows are an atom of 1024 bytes.
__device__ __forceinline__ u64 operand_of(u32 address) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// The accumulators of a product with N columns are %0 to %(N / 2 - 1).
#define D4 "{%0, %1, %2, %3"
#define D8 D4 ", %4, %5, %6, %7"
#define D16 D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D32 D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D64 D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define F4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F8 F4(0), F4(4)
#define F16 F8, F4(8), F4(12)
#define F32 F16, F4(16), F4(20), F4(24), F4(28)
#define F64 F32, F4(32), F4(36), F4(40), F4(44), F4(48), F4(52), F4(56), F4(60)
#define WGMMA(N) "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 "
#define WHERE(adds) "{\n.reg .pred p;\nsetp.ne.b32 p, " adds ", 0;\n"

// c[64 x N] = or += a[64 x 16] b[N x 16]^T, both from shared memory.
__device__ __forceinline__ void warpgroup_mma(float (&c)[4], u64 a, u64 b, int adds) {
  asm volatile(WHERE("%6") WGMMA("8") D4 "}, %4, %5, p, 1, 1, 0, 0;\n}"
               : F4(0) : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[8], u64 a, u64 b, int adds) {
  asm volatile(WHERE("%10") WGMMA("16") D8 "}, %8, %9, p, 1, 1, 0, 0;\n}"
               : F8 : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[16], u64 a, u64 b, int adds) {
  asm volatile(WHERE("%18") WGMMA("32") D16 "}, %16, %17, p, 1, 1, 0, 0;\n}"
               : F16 : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[32], u64 a, u64 b, int adds) {
  asm volatile(WHERE("%34") WGMMA("64") D32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
               : F32 : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[64], u64 a, u64 b, int adds) {
  asm volatile(WHERE("%66") WGMMA("128") D64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
               : F64 : "l"(a), "l"(b), "r"(adds));
}

// The same with a from registers: rows l / 4 and l / 4 + 8 of a warp's 16, columns 2 (l % 4) and 8 more, of lane l.
__device__ __forceinline__ void warpgroup_mma(float (&c)[4], const u32 (&a)[4], u64 b, int adds) {
  asm volatile(WHERE("%9") WGMMA("8") D4 "}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;\n}"
               : F4(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[8], const u32 (&a)[4], u64 b, int adds) {
  asm volatile(WHERE("%13") WGMMA("16") D8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
               : F8 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[16], const u32 (&a)[4], u64 b, int adds) {
  asm volatile(WHERE("%21") WGMMA("32") D16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
               : F16 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[32], const u32 (&a)[4], u64 b, int adds) {
  asm volatile(WHERE("%37") WGMMA("64") D32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
               : F32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

__device__ __forceinline__ void warpgroup_mma(float (&c)[64], const u32 (&a)[4], u64 b, int adds) {
  asm volatile(WHERE("%69") WGMMA("128") D64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
               : F64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING committed groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// Writes before it are seen by all blocks of the cluster behind cluster_wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }

// Says nothing of writes, so it waits for none.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Of a place in our shared memory, the same place in that of a block of the cluster.
__device__ __forceinline__ u32 address_in(const void* place, int block) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(place)), "r"(block));
  return remote;
}
