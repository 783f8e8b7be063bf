// The CUDA programming model on one host thread: see device.h. Slow, exact, for tests only.
//
// EAGLE_CHAIN_FIBRES=SEED runs the blocks of a launch, and the threads of a block from one barrier to the
// next, in a random order, and makes shared memory not-a-number before each block. Built with
// -fsanitize=thread each thread is one to the sanitizer as well, ordered with others by barriers alone:
// it reports races in shared memory, whatever the order. -fsanitize=alignment checks vector accesses.
#pragma once
#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#define DEVICE static inline
#define KERNEL(threads, blocks) static void
#define KERNEL_OF(registers) static void
#define METHOD
#define BOTH inline
#define SHARED static thread_local  // what is local to a thread lies in one place: see `spoil`
#define SHARED_WIDE alignas(16) static thread_local
#define SHARED_POOL(name) unsigned char* const name = block.pool.data()
#define UNROLL
#define UNROLL_BY_2
#define UNROLL_BY_4
using Stream = void*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// What the sanitizer of races is told; nothing without it.
#ifdef __SANITIZE_THREAD__
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#else
#define UNSEEN
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void __tsan_switch_to_fiber(void*, unsigned) {}
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
#endif

struct Barrier {
  int waiting = 0, generation = 0;
  char turns[2] = {};  // the sanitizer orders those who meet, turn by turn
};
struct Fibre {  // lives as long as the process; each block wakes it again
  ucontext_t birth;
  jmp_buf context;
  std::vector<char> stack = std::vector<char>(65536);
  void* known = __tsan_create_fiber(0);
  bool born = false, done = false;
};
struct Block {
  int threads = 0;
  jmp_buf scheduler;
  ucontext_t slow_scheduler;
  void* known = nullptr;
  Fibre* fibres[1024] = {};
  Barrier warps[32];
  Barrier all;
  std::vector<uint32_t> slots;  // what each thread shows to its warp
  std::vector<uint32_t> fragments;
  std::vector<unsigned char> pool;  // memory from `new` is aligned to 16 bytes
  std::vector<int> order;
  int current = 0;
  std::function<void()> body;
};
inline Block block;
inline dim3 blockIdx, gridDim, blockDim;
UNSEEN inline int current_thread() { return block.current; }
struct ThreadIndex {
  struct {
    operator unsigned() const { return unsigned(current_thread()); }
  } x;
};
inline ThreadIndex threadIdx;

// Jumps instead of swapcontext, which makes a system call each time; the sanitizer follows only that.
UNSEEN inline void yield() {
  Fibre& fibre = *block.fibres[block.current];
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(block.known, 1);
  swapcontext(&fibre.birth, &block.slow_scheduler);
#else
  if (_setjmp(fibre.context) == 0) _longjmp(block.scheduler, 1);
#endif
}
UNSEEN inline void wait_at(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  __tsan_release(&barrier.turns[generation % 2]);
  if (++barrier.waiting == count) {
    barrier.waiting = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) yield();
  }
  __tsan_acquire(&barrier.turns[generation % 2]);
}
inline void sync_block() { wait_at(block.all, block.threads); }
inline void sync_warp() {
  const int warp = current_thread() / 32;
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
  const int self = current_thread();
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
  const int self = current_thread(), warp = self & ~31, lane = self & 31;
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

UNSEEN inline void fibre_main() {
  for (;;) {
    __tsan_acquire(&block.body);
    block.body();
    __tsan_release(&block.threads);
    block.fibres[block.current]->done = true;
    yield();
  }
}
UNSEEN __attribute__((noinline)) inline void resume(int thread) {
  block.current = thread;
  Fibre& fibre = *block.fibres[thread];
  const bool born = fibre.born;
  if (!born) {
    fibre.born = true;
    getcontext(&fibre.birth);
    fibre.birth.uc_stack.ss_sp = fibre.stack.data();
    fibre.birth.uc_stack.ss_size = fibre.stack.size();
    fibre.birth.uc_link = nullptr;
    makecontext(&fibre.birth, fibre_main, 0);
  }
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(fibre.known, 1);
  swapcontext(&block.slow_scheduler, &fibre.birth);
#else
  if (_setjmp(block.scheduler) != 0) return;
  if (born) _longjmp(fibre.context, 1);
  setcontext(&fibre.birth);
#endif
}
// Shared memory as a block finds it: not numbers. Variables local to a thread lie side by side.
inline thread_local char somewhere;
inline void spoil() {
  somewhere = 1;  // so that the place exists
  auto one = [](dl_phdr_info* module, size_t, void*) {
    for (int i = 0; i < module->dlpi_phnum; ++i) {
      const auto& part = module->dlpi_phdr[i];
      char* from = static_cast<char*>(module->dlpi_tls_data);
      if (part.p_type != PT_TLS || &somewhere < from || &somewhere >= from + part.p_memsz) continue;
      memset(from, 0xff, part.p_memsz);
      return 1;
    }
    return 0;
  };
  if (dl_iterate_phdr(one, nullptr) == 0) abort();
  std::fill(block.pool.begin(), block.pool.end(), uint8_t(0xff));
}
UNSEEN inline void run_block(std::minstd_rand* random, bool backwards) {
  const int threads = block.threads;
  for (int i = 0; i < threads; ++i) block.fibres[i]->done = false;
  block.order.resize(threads);
  for (int i = 0; i < threads; ++i) block.order[i] = backwards ? threads - 1 - i : i;
  __tsan_release(&block.body);
  for (int left = threads; left > 0;) {
    if (random) std::shuffle(block.order.begin(), block.order.end(), *random);
    for (int i : block.order) {
      if (block.fibres[i]->done) continue;
      resume(i);
      left -= block.fibres[i]->done;
    }
  }
  __tsan_acquire(&block.threads);
}
template <class... Parameters, class... Arguments>
const char* launch_as(unsigned, size_t bytes, void (*kernel)(Parameters...), dim3 grid, int threads, Stream,
                      bool, Arguments... arguments) {
  const char* seed = getenv("EAGLE_CHAIN_FIBRES");
  std::minstd_rand random(seed ? unsigned(atoi(seed)) : 0);
  const bool some = grid.x > 0 && grid.y > 0 && grid.z > 0 && threads > 0;
  const bool fits = grid.x < 1u << 31 && grid.y < 1 << 16 && grid.z < 1 << 16 && threads <= 1024 && bytes <= 227 * 1024;
  if (!some || !fits) return "beyond the limits of CUDA";
  gridDim = grid;
  blockDim = dim3(threads);
  block.known = __tsan_get_current_fiber();
  for (int i = 0; i < threads; ++i) {
    if (block.fibres[i] == nullptr) block.fibres[i] = new Fibre;
  }
  block.threads = threads;
  block.slots.assign(threads, 0);
  block.fragments.assign(size_t(threads) * 6, 0);
  block.pool.assign(bytes, 0xff);  // not numbers
  block.body = [&] { kernel(Parameters(arguments)...); };
  std::vector<dim3> places;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) places.push_back(dim3(x, y, z));
  if (seed) std::shuffle(places.begin(), places.end(), random);
  for (const dim3& place : places) {
    blockIdx = place;
    for (Barrier& warp : block.warps) warp = Barrier();
    block.all = Barrier();
    if (seed) spoil();
    // Every other block backwards: a missing barrier shows in one.
    run_block(seed ? &random : nullptr, (place.x + place.y + place.z) % 2);
  }
  return nullptr;
}
inline const char* copy_bytes(void* to, const void* from, size_t size, Stream) {
  memcpy(to, from, size);
  return nullptr;
}

