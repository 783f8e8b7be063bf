// The CUDA programming model on one host thread: see device.h. Slow, exact, for tests only.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#define DEVICE static inline
#define KERNEL(threads, blocks) static void
#define KERNEL_OF(registers) static void
#define METHOD
#define BOTH inline
#define SHARED static
#define SHARED_WIDE alignas(16) static
#define SHARED_POOL(name) unsigned char* const name = block.pool.data()
#define UNROLL
#define UNROLL_BY_2
#define UNROLL_BY_4
using Stream = void*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

struct Barrier {
  int waiting = 0, generation = 0;
};
struct Fibre {  // lives as long as the process; each block wakes it again
  ucontext_t birth;
  jmp_buf context;
  std::vector<char> stack = std::vector<char>(65536);
  bool born = false, done = false;
};
struct Block {
  int threads = 0;
  jmp_buf scheduler;
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<Barrier> warps;
  Barrier all;
  std::vector<uint32_t> slots;  // what each thread shows to its warp
  std::vector<uint32_t> fragments;
  std::vector<unsigned char> pool;  // memory from `new` is aligned to 16 bytes
  int current = 0;
  std::function<void()> body;
};
inline Block block;
inline dim3 blockIdx, gridDim, blockDim;
struct ThreadIndex {
  struct {
    operator unsigned() const { return unsigned(block.current); }
  } x;
};
inline ThreadIndex threadIdx;

// Jumps instead of swapcontext, which makes a system call each time.
inline void yield() {
  if (_setjmp(block.fibres[block.current]->context) == 0) _longjmp(block.scheduler, 1);
}
inline void wait_at(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.waiting == count) {
    barrier.waiting = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}
inline void sync_block() { wait_at(block.all, block.threads); }
inline void sync_warp() {
  const int warp = block.current / 32;
  const int left = block.threads - warp * 32;
  wait_at(block.warps[warp], left < 32 ? left : 32);
}
inline void wait_for_inputs() {}
inline void let_next_start() {}
inline void cluster_arrive() {}  // blocks run one by one: no kernel of clusters can be tested here
inline void cluster_wait() {}
inline void store_at_rank(float*, unsigned, float) {}

DEVICE float bits_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
DEVICE uint32_t float_bits(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
DEVICE float to_float(fp16 x) {
  _Float16 h;
  memcpy(&h, &x.bits, 2);
  return float(h);
}
DEVICE fp16 to_fp16(float x) {
  const _Float16 h = _Float16(x);
  fp16 r;
  memcpy(&r.bits, &h, 2);
  return r;
}
DEVICE uint32_t exchange(uint32_t x, int mask) {
  const int self = block.current;
  block.slots[self] = x;
  sync_warp();
  const int other = (self & ~31) | ((self & 31) ^ mask);
  const uint32_t y = other < block.threads ? block.slots[other] : 0;
  sync_warp();
  return y;
}
DEVICE float shuffle_xor(float x, int mask) { return bits_float(exchange(float_bits(x), mask)); }
DEVICE int shuffle_xor(int x, int mask) { return int(exchange(uint32_t(x), mask)); }
DEVICE float fused(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float product(float a, float b) { return a * b; }
DEVICE float load_constant(const float* p) { return *p; }
DEVICE uint4 load_once(const void* p) {
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}

DEVICE float half_of(uint32_t pair, int i, fp16) {
  return to_float(fp16{uint16_t(i ? pair >> 16 : pair)});
}
DEVICE float half_of(uint32_t pair, int i, bf16) {
  return bits_float(i ? pair & 0xffff0000u : pair << 16);
}
template <class T>
DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T t) {
  const int self = block.current, warp = self & ~31, lane = self & 31;
  uint32_t* mine = &block.fragments[size_t(self) * 6];
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  for (int i = 0; i < 2; ++i) mine[4 + i] = b[i];
  sync_warp();
  for (int i = 0; i < 4; ++i) {  // d[i] stands at this row and column
    const int row = lane / 4 + (i / 2) * 8, column = lane % 4 * 2 + i % 2;
    float sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const uint32_t* left = &block.fragments[size_t(warp + row % 8 * 4 + k % 8 / 2) * 6];
      const uint32_t* right = &block.fragments[size_t(warp + column * 4 + k % 8 / 2) * 6];
      sum += half_of(left[row / 8 + k / 8 * 2], k % 2, t) * half_of(right[4 + k / 8], k % 2, t);
    }
    d[i] = sum;
  }
  sync_warp();
}

inline void fibre_main() {
  for (;;) {
    block.body();
    block.fibres[block.current]->done = true;
    yield();
  }
}
__attribute__((noinline)) inline void resume(int thread) {
  block.current = thread;
  if (_setjmp(block.scheduler) != 0) return;
  Fibre& fibre = *block.fibres[thread];
  if (fibre.born) _longjmp(fibre.context, 1);
  fibre.born = true;
  getcontext(&fibre.birth);
  fibre.birth.uc_stack.ss_sp = fibre.stack.data();
  fibre.birth.uc_stack.ss_size = fibre.stack.size();
  fibre.birth.uc_link = nullptr;
  makecontext(&fibre.birth, fibre_main, 0);
  setcontext(&fibre.birth);
}
template <class... Parameters, class... Arguments>
const char* launch_as(unsigned, size_t bytes, void (*kernel)(Parameters...), dim3 grid, int threads, Stream,
                      bool, Arguments... arguments) {
  gridDim = grid;
  blockDim = dim3(threads);
  while (int(block.fibres.size()) < threads) block.fibres.push_back(std::make_unique<Fibre>());
  block.threads = threads;
  block.slots.assign(threads, 0);
  block.fragments.assign(size_t(threads) * 6, 0);
  block.pool.assign(bytes, 0xff);  // not numbers
  block.body = [&] { kernel(Parameters(arguments)...); };
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        block.warps.assign((threads + 31) / 32, Barrier());
        block.all = Barrier();
        for (int i = 0; i < threads; ++i) block.fibres[i]->done = false;
        const bool backwards = (x + y + z) % 2;  // every other block: a missing barrier shows in one
        for (int left = threads; left > 0;) {
          for (int n = 0; n < threads; ++n) {
            const int i = backwards ? threads - 1 - n : n;
            if (block.fibres[i]->done) continue;
            resume(i);
            left -= block.fibres[i]->done;
          }
        }
      }
  return nullptr;
}
inline const char* copy_bytes(void* to, const void* from, size_t size, Stream) {
  memcpy(to, from, size);
  return nullptr;
}

