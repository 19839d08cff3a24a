// Thin wrappers around PTX instructions. NVRTC compiles this file, so it includes no header.
typedef unsigned short bf16;  // the bits of a bfloat16
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- bfloat16

DEVICE u32 pack2(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// The same after a ReLU.
DEVICE u32 pack2_relu(float low, float high) {
  u32 v;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// All bits set in each half that is above 0.
DEVICE u32 positive2(u32 v) {
  u32 mask;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(v), "r"(0));
  return mask;
}
DEVICE float low_of(u32 v) { return __uint_as_float(v << 16); }
DEVICE float high_of(u32 v) { return __uint_as_float(v & 0xffff0000u); }

// ---- tensor cores

DEVICE void load_matrices(u32 address, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
DEVICE void load_matrices_transposed(u32 address, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
// sum += a (16 x 16) times b (16 x 8).
DEVICE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if NF_WGMMA
// ---- tensor cores of Hopper: four warps multiply matrices that lie in shared memory

// Where a matrix lies: rows of 16-byte chunks in groups of 8; `swizzle` is 0 for none, 1, 2, 3 for 128, 64, 32 bytes.
DEVICE u64 matrix_at(u32 address, int leading, int stride, int swizzle) {
  return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)swizzle << 62;
}
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
#define NF_F4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
// d += a (64 x 16) times b (16 x 8N).
DEVICE void multiply64(float (&d)[4][4], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
      "%16, %17, 1, 1, 1, 0, 0;"
      : NF_F4(0), NF_F4(1), NF_F4(2), NF_F4(3) : "l"(a), "l"(b));
}
DEVICE void multiply64(float (&d)[8][4], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
      : NF_F4(0), NF_F4(1), NF_F4(2), NF_F4(3), NF_F4(4), NF_F4(5), NF_F4(6), NF_F4(7) : "l"(a), "l"(b));
}
#endif
// Makes this thread's shared-memory writes visible to the tensor cores; a barrier follows.
DEVICE void publish_to_tensor_cores() {
#if NF_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- shared memory

DEVICE uint4 load_shared16(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
DEVICE void store_shared16(u32 address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_shared8(u32 address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

// ---- asynchronous copies from global to shared memory

DEVICE void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void copy_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// ---- barriers in shared memory, which count arrivals and bytes

DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra.uni DONE;\n"
      "bra.uni AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same address in the shared memory of another thread block of the cluster.
DEVICE u32 peer_address(u32 address, int rank) {
  u32 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(rank));
  return v;
}
// Write to another thread block of the cluster; its barrier counts the bytes, so no fence is needed.
DEVICE void store_peer8(u32 address, int rank, uint2 v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(
                   peer_address(address, rank)), "r"(v.x), "r"(v.y), "r"(peer_address(barrier, rank)) : "memory");
}
// One thread copies a contiguous piece; the barrier counts its bytes.
DEVICE void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE int cluster_rank() {
  int v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
  return v;
}
DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void barrier_init_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
