// The fused kernels alone: the products against a plain sum, and the time of every kernel in the 9B's
// shapes with cold weights.   nvcc -std=c++17 -O3 -arch=sm_90 -I engines/kernels tests/gpu/kernel_bench.cu
// With the argument `prompts` only those that take many rows.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "prompt.h"

using T = bf16;

__global__ void fill(bf16* x, size_t n, unsigned seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    unsigned h = unsigned(i) * 2654435761u ^ seed;
    h ^= h >> 15; h *= 2246822519u; h ^= h >> 13;
    x[i] = to_bf16((float(h & 0xffff) / 32768.0f - 1.0f) * scale);
  }
}
__global__ void plain(const bf16* x, const bf16* w, int rows, int depth, int out, float* y) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= out) return;
  for (int r = 0; r < rows; ++r) {
    float sum = 0;
    for (int k = 0; k < depth; ++k) sum += to_float(x[r * depth + k]) * to_float(w[size_t(n) * depth + k]);
    y[size_t(r) * out + n] = sum;
  }
}
void check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) { printf("%s: %s\n", what, cudaGetErrorString(e)); exit(1); }
}
cudaStream_t stream;
// Microseconds of one launch among `count` in a CUDA graph: no time of the host in it.
template <class Work>
float chained_us(int count, Work work) {
  work(0);
  check(cudaStreamSynchronize(stream), "first");
  cudaGraph_t graph; cudaGraphExec_t ready;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
  for (int i = 0; i < count; ++i) work(i);
  check(cudaStreamEndCapture(stream, &graph), "captured");
  check(cudaGraphInstantiate(&ready, graph, 0), "graph");
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  std::vector<float> times;
  for (int t = 0; t < 7; ++t) {
    cudaEventRecord(a, stream); cudaGraphLaunch(ready, stream); cudaEventRecord(b, stream); cudaEventSynchronize(b);
    float ms; cudaEventElapsedTime(&ms, a, b); times.push_back(ms * 1e3f / count);
  }
  check(cudaGetLastError(), "run");
  cudaGraphExecDestroy(ready); cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[3];
}

bf16 *pool, *x, *y;
size_t pool_size = size_t(3) << 30;  // elements

template <int TILES, bool GATED, int AHEAD>
void product(const char* name, int depth, int out, int rows, bool dependent) {
  const size_t each = size_t(depth) * out * (GATED ? 2 : 1);
  const int copies = int(std::max<size_t>(1, std::min<size_t>(pool_size / each, 40)));
  const int step = GATED ? 16 : 16 * TILES, units = (out + step - 1) / step;
  auto work = [&](int i) {
    Segments s = {};
    bf16* w = pool + size_t(i % copies) * each;
    s.weight[0] = w; s.rows[0] = out; s.count = 1;
    if (GATED) { s.weight[1] = w + size_t(depth) * out; s.rows[1] = out; s.count = 2; }
    const char* e = launch(linear<T, TILES, 1, GATED, AHEAD>, dim3(units), LINEAR_THREADS, stream, dependent,
                           (const T*)x, s, Around{}, rows, depth, out, y);
    if (e) printf("%s\n", e);
  };
  const float us = chained_us(std::max(20, copies), work);
  printf("%-22s %6dx%-6d rows %d tiles %d ahead %d%s  %8.2f us  %5.2f TB/s\n", name, depth, out, rows, TILES, AHEAD,
         dependent ? " dep" : "    ", us, each * 2.0 / us / 1e6);
}
template <int TILES, int AHEAD>
void verify(int depth, int out, int rows) {
  float* want; cudaMalloc(&want, size_t(rows) * out * 4);
  plain<<<(out + 127) / 128, 128>>>(x, pool, rows, depth, out, want);
  Segments s = {}; s.weight[0] = pool; s.rows[0] = out; s.count = 1;
  launch(linear<T, TILES, 1, false, AHEAD>, dim3((out + 16 * TILES - 1) / (16 * TILES)), LINEAR_THREADS, stream, true,
         (const T*)x, s, Around{}, rows, depth, out, y);
  check(cudaDeviceSynchronize(), "product");
  std::vector<float> a(size_t(rows) * out); std::vector<bf16> b(a.size());
  cudaMemcpy(a.data(), want, a.size() * 4, cudaMemcpyDeviceToHost);
  cudaMemcpy(b.data(), y, b.size() * 2, cudaMemcpyDeviceToHost);
  check(cudaGetLastError(), "verify");
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    uint32_t u = uint32_t(b[i].bits) << 16; float f; memcpy(&f, &u, 4);
    error += (f - a[i]) * double(f - a[i]); size += a[i] * double(a[i]);
  }
  printf("check %dx%d rows %d tiles %d: relative error %.2e (bf16 rounding: about 2e-3)\n", depth, out, rows, TILES, sqrt(error / size));
  cudaFree(want);
}

// What a linear layer launches for P rows of a prompt, from other states each time; microseconds each.
void prompts() {
  float* f; const size_t floats = size_t(1) << 28;
  check(cudaMalloc(&f, floats * 4), "f"); check(cudaMemset(f, 0x3c, floats * 4), "values");  // 0.0115
  int32_t* counts; cudaMalloc(&counts, 8);
  printf("prompt_walk: %d threads, %zu bytes of shared memory; prompt_solve: %zu bytes\n", WALK_THREADS<32>, walk_bytes<128, 32>(), solve_bytes<128>());
  for (int rows : {256, 512, 1024, 2048}) {
    const int32_t given[2] = {3, rows};
    cudaMemcpy(counts, given, 8, cudaMemcpyHostToDevice);
    PromptSizes n = {rows, rows, 5, 16, 32, 128, 128, 1e-6f};
    const size_t P = size_t(rows), S = 32 * 128 * 128;
    float* free_from = f;
    auto take = [&](size_t count) { float* p = free_from; free_from += count; return p; };
    PromptTensors t = {};
    t.u = pool; t.z = pool + P * n.channels(); t.b = x; t.a = x + 131072; t.window = x;
    t.conv = take(n.channels() * CONV); t.rate = t.bias = t.norm = t.conv;
    t.log_key = t.log_delta = t.log_decay = take(5 * 4096);
    t.next_key = t.next_delta = t.next_decay = take(5 * 4096);
    t.kept = counts; t.valid = counts + 1; t.y = y; t.next_window = y + (1 << 24);
    t.qkv = take(P * n.channels()); t.units = take(2 * P * n.keys()); t.mixed = take(P * n.values());
    t.decay = take(32 * P); t.beta = take(32 * P); t.reach = take(32 * P); t.tail = take(32 * P);
    t.solve = take(32 * P * CHUNK); t.seen = take(32 * P * CHUNK);
    float* states = take(24 * 2 * S);
    check(free_from <= f + floats ? cudaSuccess : cudaErrorMemoryAllocation, "room");
    auto at = [&](int i) { t.S = states + i % 24 * 2 * S; t.next_S = states + (i % 24 * 2 + 1) * S; };
    const bool dep = true;
    auto make_rows = [&] { return launch(prompt_rows<T>, dim3(unsigned(n.channels() / 8 / ROWS_THREADS), unsigned(rows / ROWS_EACH)), ROWS_THREADS, stream, dep, t, n); };
    auto solve = [&] { return launch_pooled(solve_bytes<128>(), prompt_solve<128>, dim3(unsigned(rows / CHUNK), 16), SOLVE_THREADS, stream, dep, t, n); };
    auto walk = [&] { return launch_pooled(walk_bytes<128, 32>(), prompt_walk<128, 32>, dim3(4, 32), WALK_THREADS<32>, stream, dep, t, n); };
    auto norm = [&] { return launch(prompt_norm<T>, dim3(unsigned(rows * 32 / (PROMPT_NORM_THREADS / 32))), PROMPT_NORM_THREADS, stream, dep, t, n); };
    auto said = [](const char* error) { if (error) printf("%s\n", error); };
    printf("P = %d:", rows);
    printf(" rows %.1f", chained_us(24, [&](int i) { at(i); said(make_rows()); }));
    printf(", solve %.1f", chained_us(24, [&](int i) { at(i); said(solve()); }));
    printf(", walk %.1f", chained_us(24, [&](int i) { at(i); said(walk()); }));
    printf(", norm %.1f", chained_us(24, [&](int i) { at(i); said(norm()); }));
    printf(", all four %.1f", chained_us(24, [&](int i) { at(i); said(make_rows()); said(solve()); said(walk()); said(norm()); }));
    const int64_t count = int64_t(rows) * 12288;
    printf("; silu_mul %.1f us\n", chained_us(24, [&](int i) { said(launch(silu_mul<T>, dim3(unsigned(count / 8 / SWIGLU_THREADS)), SWIGLU_THREADS, stream, dep, (const T*)pool + i * count, (const T*)pool + (24 + i) * count, count, y)); }));
  }
  check(cudaDeviceSynchronize(), "prompts");
  cudaFree(f); cudaFree(counts);
}

int main(int argc, char** argv) {
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  check(cudaMalloc(&pool, pool_size * 2), "pool"); check(cudaMalloc(&x, 1 << 24), "x"); check(cudaMalloc(&y, 1 << 26), "y");
  fill<<<2048, 256>>>(pool, pool_size, 1, 0.03f); fill<<<64, 256>>>(x, 1 << 20, 2, 1.0f);
  check(cudaDeviceSynchronize(), "fill");
  prompts();
  if (argc > 1 && strcmp(argv[1], "prompts") == 0) return 0;
  verify<1, 8>(4096, 4096, 5); verify<2, 4>(4096, 12352, 5); verify<2, 4>(12288, 4096, 8); verify<1, 8>(160, 40, 3);
  for (bool dep : {false, true}) {
    product<1, false, 4>("gdn out", 4096, 4096, 5, dep); product<1, false, 8>("gdn out", 4096, 4096, 5, dep);
    product<2, false, 4>("gdn out", 4096, 4096, 5, dep);
    product<1, false, 4>("mlp down", 12288, 4096, 5, dep); product<1, false, 8>("mlp down", 12288, 4096, 5, dep);
    product<2, false, 4>("mlp down", 12288, 4096, 5, dep); product<2, false, 8>("mlp down", 12288, 4096, 5, dep);
    product<1, false, 8>("gdn in", 4096, 12352, 5, dep); product<2, false, 2>("gdn in", 4096, 12352, 5, dep);
    product<2, false, 4>("gdn in", 4096, 12352, 5, dep); product<2, false, 8>("gdn in", 4096, 12352, 5, dep);
    product<2, true, 2>("mlp gate+up", 4096, 12288, 5, dep); product<2, true, 4>("mlp gate+up", 4096, 12288, 5, dep);
    product<2, true, 8>("mlp gate+up", 4096, 12288, 5, dep);
    product<2, false, 4>("head", 4096, 248320, 5, dep); product<1, false, 8>("head", 4096, 248320, 5, dep);
    product<2, false, 4>("head, 1 row", 4096, 248320, 1, dep);
    product<2, false, 4>("draft in", 8192, 6144, 5, dep); product<1, false, 8>("draft in", 8192, 6144, 5, dep);
    product<2, false, 4>("draft head", 4096, 32000, 1, dep);
  }
  // the small kernels
  float* f; check(cudaMalloc(&f, size_t(1) << 30), "f"); cudaMemset(f, 0, size_t(1) << 30);
  int32_t* n3; cudaMalloc(&n3, 4096); cudaMemset(n3, 0, 4096);
  const int32_t three = 3, place = 1000;
  cudaMemcpy(n3, &three, 4, cudaMemcpyHostToDevice); cudaMemcpy(n3 + 1, &place, 4, cudaMemcpyHostToDevice);
  for (bool dep : {false, true}) {
    printf("add_norm 5x4096%s %.2f us\n", dep ? " dep" : "", chained_us(200, [&](int) {
      launch(add_norm<T>, dim3(5), 512, stream, dep, (const T*)x, (const T*)(x + 32768), (const float*)f, 1.0f, 1e-6f, 4096, y, y + 32768); }));
    const size_t S = 32 * 128 * 128, layer = 2 * S + (1 << 20);
    printf("gated_delta%s %.2f us\n", dep ? " dep" : "", chained_us(48, [&](int i) {
      float* base = f + 4096 + size_t(i % 24) * layer;
      DeltaSizes n = {5, 16, 32, 128, 12352, 1e-6f};
      DeltaTensors t = {};
      t.proj = x; t.window = x + (1 << 18); t.S = base; t.log_key = base + 2 * S; t.log_delta = t.log_key + 16384; t.log_decay = t.log_delta + 32768;
      t.kept = n3; t.conv = f; t.rate = f; t.bias = f; t.norm = f; t.y = y; t.next_window = y + (1 << 20); t.next_S = base + S;
      t.next_key = base + 2 * S + 65536; t.next_delta = t.next_key + 16384; t.next_decay = t.next_delta + 32768; t.every_S = nullptr;
      launch_clusters(2, gated_delta_wide<T, 2>, dim3(64), 512, stream, dep, t, n); }));
    for (int position : {1000, 4000}) {
      cudaMemcpy(n3 + 1, &position, 4, cudaMemcpyHostToDevice);
      AttendSizes n = {};
      n.rows = n.query_rows = 5; n.heads = 16; n.kv_heads = 4; n.dim = 256; n.rotary = 64; n.slots = 4101; n.stretches = stretch_of(n.slots - 1) + 1;
      n.query_stride = n.kv_stride = 10240; n.head_stride = 512; n.key_offset = 8192; n.value_offset = 9216; n.eps = 1e-6f; n.offset = 1; n.gated = true;
      AttendTensors t = {};
      t.query = t.kv = x; t.position = t.query_position = n3 + 1; t.cos = f; t.sin = f; t.query_norm = f; t.key_norm = f;
      t.best = f + (1 << 20); t.total = f + (1 << 21); t.mixed = f + (1 << 22); t.y = y;
      const size_t cache = size_t(4) * 4101 * 256;
      auto at = [&](int i) { t.key = pool + size_t(i % 8) * 2 * cache; t.value = pool + (size_t(i % 8) * 2 + 1) * cache; };
      printf("attend at %d%s %.2f us\n", position, dep ? " dep" : "", chained_us(64, [&](int i) { at(i);
        launch(attend_tensor<T, 24, true>, dim3(n.stretches, 4), ATTEND_THREADS, stream, dep, t, n, KvStorage()); }));
      KvStorage more = {};  // planes of both kinds inside the same memory
      more.key.kind = KV_Q8_0;
      more.value.kind = KV_Q5_1;
      printf("attend q8_0/q5_1 at %d%s %.2f us\n", position, dep ? " dep" : "", chained_us(64, [&](int i) { at(i);
        for (int p = 0; p < 3; ++p) {
          more.key.more[p] = static_cast<T*>(t.key) + (p + 1) * (cache / 4);
          more.value.more[p] = static_cast<T*>(t.value) + (p + 1) * (cache / 4);
        }
        launch(attend_tensor<T, 24, false>, dim3(n.stretches, 4), ATTEND_THREADS, stream, dep, t, n, more); }));
      printf("merge at %d%s %.2f us\n", position, dep ? " dep" : "", chained_us(64, [&](int i) { at(i);
        launch(merge_stretches<T>, dim3(16, 5), 256, stream, dep, t, n); }));
    }
    printf("pick_stretch + pick%s %.2f us\n", dep ? " dep" : "", chained_us(50, [&](int) {
      launch(pick_stretch<T>, dim3(PICK_BLOCKS, 5), PICK_THREADS, stream, dep, (const T*)pool, 248320, f, n3 + 64);
      Verdict v = {}; v.next_ids = n3 + 512;
      launch(pick, dim3(1), 160, stream, dep, (const float*)f, (const int32_t*)(n3 + 64), v, 5); }));
  }
  check(cudaDeviceSynchronize(), "end");
  printf("done\n");
}
