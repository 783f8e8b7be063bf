// One source for two targets: CUDA (nvcc), and a plain C++ compiler that runs every thread of a block
// as a fibre, so that the kernels can be tested where there is no GPU.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

struct fp16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

#ifdef __CUDACC__

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define KERNEL_OF(registers) __global__ void __maxnreg__(registers)  // of a thread, at most
#define METHOD __device__ __forceinline__
#define BOTH __host__ __device__ inline
#define SHARED __shared__
#define SHARED_WIDE __shared__ __align__(16)
#define SHARED_POOL(name) extern __shared__ __align__(16) unsigned char name[]  // sized at the launch
#define UNROLL _Pragma("unroll")
#define UNROLL_BY_2 _Pragma("unroll 2")
#define UNROLL_BY_4 _Pragma("unroll 4")
using Stream = cudaStream_t;

DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
DEVICE float to_float(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }
DEVICE fp16 to_fp16(float x) { return {__half_as_ushort(__float2half_rn(x))}; }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float product(float a, float b) { return __fmul_rn(a, b); }

// Weights are read once per call: past the first cache level, which keeps the activations.
DEVICE uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// A table that no kernel of the process writes.
DEVICE float load_constant(const float* p) { return __ldg(p); }

// With programmatic dependent launch a kernel starts before the one in front of it has ended: nothing
// may be read that it writes, and nothing written at all, before this wait. As every kernel waits, the
// end of one means the end of all before it. A kernel may let the next one start before its own wait,
// so several can be under way: what they read early has to be older than all of them. States are: a
// run begins with kernels of ONNX Runtime, which start only when everything before them has ended.
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Blocks of a cluster wait for one another, and write into each other's shared memory.
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
DEVICE void store_at_rank(float* p, unsigned rank, float x) {
#if __CUDA_ARCH__ >= 900
  uint32_t there, here = uint32_t(__cvta_generic_to_shared(p));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
#endif
}

// d[16x8] += a[16x16] b[16x8], fp32 sums.
DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], fp16) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bf16) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Launches `kernel` in clusters of `cluster` blocks with a pool of `bytes` each; `dependent` lets it start
// while the kernel before it drains.
template <class... Parameters, class... Arguments>
const char* launch_as(unsigned cluster, size_t bytes, void (*kernel)(Parameters...), dim3 grid, int threads,
                      Stream stream, bool dependent, Arguments... arguments) {
  if (bytes > 32 * 1024) {  // 48 KB come without asking, of which the kernel's own variables take a part
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  cudaLaunchConfig_t config = {};
  config.dynamicSmemBytes = bytes;
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (dependent) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
inline const char* copy_bytes(void* to, const void* from, size_t size, Stream stream) {
  const cudaError_t error = cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

#else
#include "fibres.h"
#endif

template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), dim3 grid, int threads, Stream stream, bool dependent,
                   Arguments... arguments) {
  return launch_as(1, 0, kernel, grid, threads, stream, dependent, arguments...);
}
template <class... Parameters, class... Arguments>
const char* launch_clusters(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, int threads,
                            Stream stream, bool dependent, Arguments... arguments) {
  return launch_as(cluster, 0, kernel, grid, threads, stream, dependent, arguments...);
}
template <class... Parameters, class... Arguments>
const char* launch_pooled(size_t bytes, void (*kernel)(Parameters...), dim3 grid, int threads, Stream stream,
                          bool dependent, Arguments... arguments) {
  return launch_as(1, bytes, kernel, grid, threads, stream, dependent, arguments...);
}

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
DEVICE bf16 to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 64)};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
DEVICE void put(float& to, float x) { to = x; }
DEVICE void put(fp16& to, float x) { to = to_fp16(x); }
DEVICE void put(bf16& to, float x) { to = to_bf16(x); }
template <class T>
DEVICE float rounded(float x) {
  T t;
  put(t, x);
  return to_float(t);
}
