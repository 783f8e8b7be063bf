// A verify step of the 9B in the launches of the `ort-fused` profile, without ONNX Runtime.
//   nvcc -std=c++17 -O3 -arch=sm_90 -I engines/kernels tests/gpu/kernel_bench.cu -o bench
//   ./bench           the step, and what every kernel costs in its place
//   ./bench kernels   every kernel alone over cold weights, products in other tilings, attention per KV type
//   ./bench products  the products against a plain sum
//   ./bench prompts   the kernels that take many rows
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "prompt.h"

using T = bf16;
using Bytes = unsigned char;

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  printf("%s: %s\n", what, cudaGetErrorString(e));
  fflush(stdout);
  exit(1);
}
void check(const char* error) {
  if (error == nullptr) return;
  printf("launch: %s\n", error);
  fflush(stdout);
  exit(1);
}
DEVICE float noise(size_t i, unsigned seed) {
  unsigned h = unsigned(i) * 2654435761u ^ seed ^ unsigned(i >> 32) * 40503u;
  h ^= h >> 15;
  h *= 2246822519u;
  return float((h ^ h >> 13) & 0xffff) / 32768.0f - 1.0f;
}
template <class Value>
__global__ void fill(Value* x, size_t n, unsigned seed, float scale) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += step) put(x[i], noise(i, seed) * scale);
}

// One product [rows, depth] x [out, depth]; gated: silu of the first `out` columns times the second.
__global__ void plain_product(const T* x, const T* w, int rows, int depth, int out, bool gated, float* y) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= out) return;
  for (int r = 0; r < rows; ++r) {
    float sum = 0, other = 0;
    for (int k = 0; k < depth; ++k) {
      sum += to_float(x[r * depth + k]) * to_float(w[size_t(n) * depth + k]);
      if (gated) other += to_float(x[r * depth + k]) * to_float(w[size_t(out + n) * depth + k]);
    }
    y[size_t(r) * out + n] = gated ? sum / (1 + expf(-sum)) * other : sum;
  }
}

cudaStream_t stream;
// The median of `times` replays of what `work` launches, captured into a graph.
float captured_us(const std::function<void()>& work, int times) {
  work();
  check(cudaStreamSynchronize(stream), "first");
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
  work();
  check(cudaStreamEndCapture(stream, &graph), "captured");
  check(cudaGraphInstantiate(&ready, graph, 0), "graph");
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  std::vector<float> found(times);
  for (float& us : found) {
    cudaEventRecord(a, stream);
    cudaGraphLaunch(ready, stream);
    cudaEventRecord(b, stream);
    cudaEventSynchronize(b);
    cudaEventElapsedTime(&us, a, b);
    us *= 1e3f;
  }
  check(cudaGetLastError(), "run");
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  std::sort(found.begin(), found.end());
  return found[times / 2];
}

constexpr int LAYERS = 32, HIDDEN = 4096, INNER = 12288, VOCABULARY = 248320, SLOTS = 4101;
struct Shape {
  const char* name;
  int depth, out;
  bool gated;
  std::vector<int> rows;
};
const std::vector<Shape> shapes = {{"in", HIDDEN, 12352, false, {8192, 4096, 32, 32}},
                                   {"qkv", HIDDEN, 10240, false, {8192, 1024, 1024}},
                                   {"out", 4096, HIDDEN, false, {HIDDEN}},
                                   {"gate+up", HIDDEN, INNER, true, {INNER, INNER}},
                                   {"down", INNER, HIDDEN, false, {HIDDEN}},
                                   {"head", HIDDEN, VOCABULARY, false, {VOCABULARY}}};
const Shape& shape_of(const std::string& name) {
  return *std::find_if(shapes.begin(), shapes.end(), [&](const Shape& s) { return name == s.name; });
}
struct Product {
  const T* x;
  Segments s;
  Around around;
  int rows, depth, out;
  bool gated;
  T* y;
  int units(int step) const {
    int sum = 0;
    for (int i = 0; i < (gated ? 1 : s.count); ++i) sum += (s.rows[i] + step - 1) / step;
    return sum;
  }
};
using Kernel = std::function<void(const Product&)>;

int shared_share = -1;  // percent of the first cache level that kernels ask for as shared memory
bool dependent = true;
int launches = 0;
template <class... Parameters, class... Arguments>
void start(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, int threads, Arguments... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, shared_share), "share");
  ++launches;
  check(launch_clusters(cluster, kernel, grid, threads, stream, dependent, arguments...));
}
template <int TILES, int AHEAD>
Kernel plain_kernel() {
  return [](const Product& p) {
    auto go = [&](auto kernel, int step) {
      start(1, kernel, dim3(p.units(step)), LINEAR_THREADS, p.x, p.s, p.around, p.rows, p.depth, p.out, p.y);
    };
    if (!p.gated) go(linear<T, TILES, 1, false, AHEAD>, 16 * TILES);
    else if constexpr (TILES == 2) go(linear<T, 2, 1, true, AHEAD>, 16);
  };
}
Kernel long_kernel() {
  return [](const Product& p) {
    start(1, linear_long<T, 1>, dim3(p.units(16)), LINEAR_THREADS, p.x, p.s, p.around, p.rows, p.depth, p.out, p.y);
  };
}

const std::vector<std::pair<const char*, Kernel>> tilings = {
    {"tiles 1, ahead 4", plain_kernel<1, 4>()}, {"tiles 1, ahead 8", plain_kernel<1, 8>()},
    {"tiles 2, ahead 2", plain_kernel<2, 2>()}, {"tiles 2, ahead 4", plain_kernel<2, 4>()},
    {"tiles 2, ahead 8", plain_kernel<2, 8>()}, {"long", long_kernel()}};

struct Trunk {
  std::map<std::string, Kernel> kernel;
  int rows = 5;
  bool folded = true;   // norms inside the products
  bool quantised = false;  // KV rows in q8_0 and q5_1
  std::string without, only;  // the kernel left out, or the only one that runs, to see what it costs
  Bytes* weights = nullptr;
  T *h, *next_h, *x, *proj, *mixed, *delta, *inner, *logits, *caches, *windows;
  float *squares, *states, *scratch;
  int32_t* numbers;

  template <class Value>
  void take(Value*& to, size_t count, unsigned seed, float scale) {
    check(cudaMalloc(&to, count * sizeof(Value)), "memory");
    fill<<<2048, 256>>>(to, count, seed, scale);
  }
  static size_t bytes_of(const Shape& s) {
    size_t sum = 0;
    for (int r : s.rows) sum += size_t(r) * s.depth * sizeof(T);
    return sum;
  }
  Trunk() {
    size_t bytes = bytes_of(shapes[5]);
    for (int i = 0; i < LAYERS; ++i) {
      for (const char* name : {i % 4 == 3 ? "qkv" : "in", "out", "gate+up", "down"}) bytes += bytes_of(shape_of(name));
    }
    T* all;
    take(all, bytes / sizeof(T), 1, 0.03f);
    weights = reinterpret_cast<Bytes*>(all);
    take(h, 1 << 16, 2, 1.0f);
    for (T** to : {&next_h, &x, &proj, &mixed, &delta, &inner}) take(*to, 1 << 18, 3, 1.0f);
    take(logits, size_t(8) * VOCABULARY, 4, 1.0f);
    take(caches, size_t(16) * 4 * SLOTS * 256, 5, 1.0f);
    take(windows, size_t(LAYERS) * 2 << 17, 6, 1.0f);
    take(squares, 1 << 14, 7, 1.0f);
    take(states, size_t(LAYERS) * STATE, 8, 0.1f);
    take(scratch, 1 << 25, 9, 0.5f);
    check(cudaMalloc(&numbers, 1 << 16), "numbers");
    const int32_t first[2] = {3, 1000};  // kept, position
    check(cudaMemcpy(numbers, first, 8, cudaMemcpyHostToDevice), "numbers");
    for (const char* name : {"in", "qkv", "gate+up"}) kernel[name] = plain_kernel<2, 4>();
    for (const char* name : {"out", "down"}) kernel[name] = plain_kernel<1, 8>();
    kernel["head"] = long_kernel();
    check(cudaDeviceSynchronize(), "fill");
  }
  static constexpr size_t S = 32 * 128 * 128, STATE = 2 * S + (1 << 18);
  bool with(const char* name) const { return only.empty() ? without != name : only == name; }
  Product made(const Shape& s, Bytes*& at, const T* from, const Around& around, T* to) const {
    Product p = {from, {}, around, rows, s.depth, s.out, s.gated, to};
    for (int r : s.rows) {
      p.s.weight[p.s.count] = at;
      p.s.rows[p.s.count++] = r;
      at += size_t(r) * s.depth * sizeof(T);
    }
    return p;
  }
  void product(const char* name, Bytes*& at, const T* from, const Around& around, T* to) {
    const Product p = made(shape_of(name), at, from, around, to);
    if (with(name)) kernel.at(name)(p);
  }
  void rule(int layer) {
    float* base = states + size_t(layer) * STATE;
    DeltaTensors t = {};
    t.proj = proj;
    t.window = windows + (size_t(layer) * 2 << 17);
    t.next_window = windows + (size_t(layer) * 2 + 1 << 17);
    t.S = base;
    t.next_S = base + S;
    t.log_key = base + 2 * S;
    t.log_delta = t.log_key + 32768;
    t.log_decay = t.log_delta + 65536;
    t.next_key = base + 2 * S + 131072;
    t.next_delta = t.next_key + 32768;
    t.next_decay = t.next_delta + 65536;
    t.kept = numbers;
    t.conv = t.rate = t.bias = t.norm = scratch;
    t.y = mixed;
    const DeltaSizes n = {rows, 16, 32, 128, 12352, 1e-6f};
    if (with("delta")) start(2, gated_delta_wide<T, 2>, dim3(64), 512, t, n);
  }
  void attention(int layer) {
    AttendSizes n = {};
    n.rows = n.query_rows = rows;
    n.heads = 16;
    n.kv_heads = 4;
    n.dim = 256;
    n.rotary = 64;
    n.slots = SLOTS;
    n.stretches = stretch_of(SLOTS - 1) + 1;
    n.query_stride = n.kv_stride = 10240;
    n.head_stride = 512;
    n.key_offset = 8192;
    n.value_offset = 9216;
    n.eps = 1e-6f;
    n.offset = 1;
    n.gated = true;
    AttendTensors t = {};
    t.query = t.kv = proj;
    t.position = t.query_position = numbers + 1;
    t.cos = t.sin = t.query_norm = t.key_norm = scratch;
    t.best = scratch + (1 << 20);
    t.total = scratch + (1 << 21);
    t.mixed = scratch + (1 << 22);
    t.y = mixed;
    t.key = caches + size_t(layer / 4) * 2 * 4 * SLOTS * 256;
    t.value = static_cast<T*>(t.key) + size_t(4) * SLOTS * 256;
    if (!with("attend")) return;
    if (quantised) {  // planes of both kinds inside the same memory
      KvStorage more = {};
      more.key.kind = KV_Q8_0;
      more.value.kind = KV_Q5_1;
      for (int p = 0; p < 3; ++p) {
        more.key.more[p] = static_cast<T*>(t.key) + (p + 1) * SLOTS * 256;
        more.value.more[p] = static_cast<T*>(t.value) + (p + 1) * SLOTS * 256;
      }
      start(1, attend_tensor<T, 24, false>, dim3(n.stretches, 4), ATTEND_THREADS, t, n, more);
    } else {
      start(1, attend_tensor<T, 24, true>, dim3(n.stretches, 4), ATTEND_THREADS, t, n, KvStorage());
    }
    start(1, merge_stretches<T>, dim3(16, rows), 256, t, n);
  }
  void norm(const T* from, const T* added, T* sum) {
    if (!with("add_norm")) return;
    start(1, add_norm<T>, dim3(rows), 512, from, added, (const float*)scratch, 1.0f, 1e-6f, HIDDEN, sum, x);
  }
  void run() {
    Bytes* at = weights;
    T *now = h, *next = next_h;
    norm(now, nullptr, nullptr);
    Around around, behind;  // of a product that joins; of the one behind it
    auto join = [&](const char* name, const T* from, bool last) {
      if (!folded || last) {
        product(name, at, from, {}, delta);
        norm(now, delta, next);
      } else {
        around.h = now;
        around.weight = scratch;
        around.offset = 1.0f;
        around.sum = next;
        around.next_squares = squares;
        behind.squares = squares;
        behind.slots = HIDDEN / SLOT;
        behind.eps = 1e-6f;
        product(name, at, from, around, x);
      }
      now = next;
      next = now == next_h ? next_h + (1 << 16) : next_h;
    };
    for (int layer = 0; layer < LAYERS; ++layer) {
      const bool full = layer % 4 == 3;
      product(full ? "qkv" : "in", at, x, behind, proj);
      if (full) attention(layer);
      else rule(layer);
      join("out", mixed, false);
      product("gate+up", at, x, behind, inner);
      join("down", inner, layer == LAYERS - 1);
    }
    product("head", at, x, {}, logits);
    if (!with("pick")) return;
    start(1, pick_stretch<T>, dim3(PICK_BLOCKS, rows), PICK_THREADS, (const T*)logits, VOCABULARY, scratch + (1 << 20), numbers + 64);
    Verdict v = {};
    v.next_ids = numbers + 4096;
    start(1, pick, dim3(1), rows * 32, (const float*)(scratch + (1 << 20)), (const int32_t*)(numbers + 64), v, rows);
  }
  float us(int times = 9) {
    return captured_us([&] { run(); }, times);
  }
  std::vector<uint16_t> result() {
    std::vector<uint16_t> got(size_t(rows) * VOCABULARY);
    check(cudaMemcpy(got.data(), logits, got.size() * 2, cudaMemcpyDeviceToHost), "logits");
    return got;
  }
  void report(const char* what) {
    for (int width : {5, 1}) {
      rows = width;
      const float all = us();
      const auto seen = result();
      dependent = false;
      const float serial = us();
      const bool same = result() == seen;
      dependent = true;
      printf("trunk, %s, W = %d: %.1f us (without dependent launch %.1f us, bits %s)\n", what, rows, all, serial,
             same ? "the same" : "DIFFER");
      for (const char* part : {"add_norm", "delta", "attend", "pick", "in", "qkv", "out", "gate+up", "down", "head"}) {
        without = part;
        const float rest = us(5);
        printf("   without %-10s %8.1f us  (%.1f less)\n", part, rest, all - rest);
      }
      without = "";
    }
    rows = 5;
  }
  // One kernel alone, launch behind launch; the weights of every layer are its own, hence cold.
  void alone(const char* part, const char* what) {
    only = part;
    launches = 0;
    run();
    const int count = launches;
    const float all = us();
    dependent = false;
    const float serial = us();
    dependent = true;
    only = "";
    printf("%-10s %-18s %3d launches %8.2f us each (without dependent launch %8.2f us)\n", part, what, count, all / count,
           serial / count);
  }
  void place(int32_t position) { check(cudaMemcpy(numbers + 1, &position, 4, cudaMemcpyHostToDevice), "position"); }
  void kernels() {
    for (const Shape& s : shapes) {
      const Kernel chosen = kernel.at(s.name);
      for (const auto& [what, other] : tilings) {
        const bool fits = !s.gated || std::string(what).find("tiles 2") == 0;
        if (!fits) continue;
        kernel[s.name] = other;
        alone(s.name, what);
      }
      kernel[s.name] = chosen;
    }
    folded = false;
    for (const char* part : {"add_norm", "delta", "pick"}) alone(part, "");
    folded = true;
    for (int position : {1000, 4000}) {
      place(position);
      for (bool types : {false, true}) {
        quantised = types;
        alone("attend", (std::string(types ? "q8_0/q5_1" : "bf16") + " at " + std::to_string(position)).c_str());
      }
    }
    quantised = false;
    place(1000);
  }
  void compare(const Shape& s, const Kernel& candidate, const char* what, int count) {
    rows = count;
    Bytes* at = weights;
    candidate(made(s, at, inner, {}, logits));
    float* want;
    check(cudaMalloc(&want, size_t(rows) * s.out * sizeof(float)), "memory");
    plain_product<<<(s.out + 127) / 128, 128, 0, stream>>>(inner, reinterpret_cast<T*>(weights), rows, s.depth, s.out, s.gated, want);
    check(cudaStreamSynchronize(stream), "compare");
    std::vector<float> a(size_t(rows) * s.out);
    std::vector<uint16_t> b(a.size());
    check(cudaMemcpy(a.data(), want, a.size() * 4, cudaMemcpyDeviceToHost), "compare");
    check(cudaMemcpy(b.data(), logits, b.size() * 2, cudaMemcpyDeviceToHost), "compare");
    check(cudaFree(want), "memory");
    double error = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      const uint32_t bits = uint32_t(b[i]) << 16;
      float f;
      memcpy(&f, &bits, 4);
      error += (f - a[i]) * double(f - a[i]);
      size += a[i] * double(a[i]);
    }
    printf("%-8s %-18s rows %d: relative error %.2e (bf16 rounding: about 2e-3)\n", s.name, what, rows, sqrt(error / size));
    rows = 5;
  }
  void products() {
    for (const Shape& s : shapes) compare(s, kernel.at(s.name), "", 5);
    compare(shape_of("down"), plain_kernel<2, 4>(), "tiles 2, ahead 4", 8);
    compare({"odd", 160, 40, false, {40}}, plain_kernel<1, 8>(), "tiles 1, ahead 8", 3);
  }
};

__global__ void fill_floats(float* x, size_t n, float centre, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    unsigned h = unsigned(i) * 2654435761u;
    h ^= h >> 15; h *= 2246822519u; h ^= h >> 13;
    x[i] = centre + (float(h & 0xffff) / 32768.0f - 1.0f) * scale;
  }
}
// The delta rule row by row in fp64, one thread a value column; S and out as the kernels leave them.
__global__ void plain_rule(PromptTensors t, PromptSizes n, double* after, double* out) {
  const int head = blockIdx.x, column = threadIdx.x, key_head = head / (n.value_heads / n.key_heads);
  double S[128];
  for (int k = 0; k < 128; ++k) S[k] = t.S[(size_t(head) * 128 + k) * 128 + column];
  for (int r = 0; r < t.kept[0]; ++r) {
    const double delta = t.log_delta[(size_t(r) * n.value_heads + head) * 128 + column];
    for (int k = 0; k < 128; ++k) {
      const double key = t.log_key[(size_t(r) * n.key_heads + key_head) * 128 + k];
      S[k] = S[k] * t.log_decay[r * n.value_heads + head] + key * delta;
    }
  }
  for (int r = 0; r < n.rows; ++r) {
    const float* q = t.qkv + size_t(r) * n.channels() + key_head * 128;
    const float* k = q + n.keys();
    double qq = 1e-6, kk = 1e-6, recalled = 0, asked = 0;
    for (int d = 0; d < 128; ++d) { qq += double(q[d]) * q[d]; kk += double(k[d]) * k[d]; }
    const double fade = t.decay[size_t(head) * n.padded + r];
    for (int d = 0; d < 128; ++d) { S[d] *= fade; recalled += S[d] * k[d]; }
    const double value = t.qkv[size_t(r) * n.channels() + 2 * n.keys() + head * 128 + column];
    const double delta = t.beta[size_t(head) * n.padded + r] * (value - recalled / sqrt(kk));
    for (int d = 0; d < 128; ++d) { S[d] += k[d] / sqrt(kk) * delta; asked += S[d] * q[d]; }
    out[(size_t(r) * n.value_heads + head) * 128 + column] = asked / sqrt(qq * 128);
  }
  for (int k = 0; k < 128; ++k) after[(size_t(head) * 128 + k) * 128 + column] = S[k];
}
double apart(const float* got, const double* want, size_t count) {
  std::vector<float> a(count); std::vector<double> b(count);
  cudaMemcpy(a.data(), got, count * 4, cudaMemcpyDeviceToHost); cudaMemcpy(b.data(), want, count * 8, cudaMemcpyDeviceToHost);
  double worst = 0, size = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!(std::abs(a[i] - b[i]) <= worst)) worst = std::abs(a[i] - b[i]);  // NaN stays
    size = std::max(size, std::abs(b[i]));
  }
  return worst / size;
}

// What a linear layer launches for P rows of a prompt: the rule against fp64, then microseconds of each
// launch from other states each time.
void prompts() {
  T *pool, *x, *y;
  const size_t pooled = size_t(3) << 30;
  check(cudaMalloc(&pool, pooled * sizeof(T)), "pool"); check(cudaMalloc(&x, 1 << 24), "x"); check(cudaMalloc(&y, 1 << 26), "y");
  fill<<<2048, 256>>>(pool, pooled, 1, 0.03f); fill<<<64, 256>>>(x, 1 << 20, 2, 1.0f);
  check(cudaDeviceSynchronize(), "fill");
  auto chained_us = [](int count, auto work) {  // of one launch among `count`
    return captured_us([&] { for (int i = 0; i < count; ++i) work(i); }, 7) / count;
  };
  float* f; const size_t floats = size_t(1) << 28;
  check(cudaMalloc(&f, floats * 4), "f"); check(cudaMemset(f, 0, floats * 4), "zeros");
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
    auto drawn = [&](size_t count, float centre, float scale) { float* p = take(count); fill_floats<<<256, 256>>>(p, count, centre, scale); return p; };
    t.conv = drawn(n.channels() * CONV, 0.0f, 30.0f); t.rate = drawn(32, 0.0f, 1.0f); t.bias = drawn(32, -4.0f, 2.0f); t.norm = drawn(128, 1.0f, 0.1f);
    t.log_key = drawn(5 * 2048, 0.0f, 0.1f); t.log_delta = drawn(5 * 4096, 0.0f, 1.0f); t.log_decay = drawn(5 * 32, 0.9f, 0.1f);
    t.next_key = t.next_delta = t.next_decay = take(5 * 4096);
    t.kept = counts; t.valid = counts + 1; t.y = y; t.next_window = y + (1 << 24);
    t.qkv = take(P * n.channels()); t.units = take(2 * P * n.keys()); t.mixed = take(P * n.values());
    t.decay = take(32 * P); t.beta = take(32 * P); t.reach = take(32 * P); t.tail = take(32 * P);
    t.solve = take(32 * P * CHUNK); t.seen = take(32 * P * CHUNK);
    float* states = drawn(24 * 2 * S, 0.0f, 1.0f);
    check(free_from <= f + floats ? cudaSuccess : cudaErrorMemoryAllocation, "room");
    auto at = [&](int i) { t.S = states + i % 24 * 2 * S; t.next_S = states + (i % 24 * 2 + 1) * S; };
    const bool dep = true;
    auto make_rows = [&] { return launch(prompt_rows<T>, dim3(unsigned(n.channels() / 8 / ROWS_THREADS), unsigned(rows / ROWS_EACH)), ROWS_THREADS, stream, dep, t, n); };
    auto solve = [&] { return launch_pooled(solve_bytes<128>(), prompt_solve<128>, dim3(unsigned(rows / CHUNK), 16), SOLVE_THREADS, stream, dep, t, n); };
    auto walk = [&] { return launch_pooled(walk_bytes<128, 32>(), prompt_walk<128, 32>, dim3(4, 32), WALK_THREADS<32>, stream, dep, t, n); };
    auto norm = [&] { return launch(prompt_norm<T>, dim3(unsigned(rows * 32 / (PROMPT_NORM_THREADS / 32))), PROMPT_NORM_THREADS, stream, dep, t, n); };
    double *S_plain, *out_plain;
    check(cudaMalloc(&S_plain, S * 8), "S"); check(cudaMalloc(&out_plain, P * n.values() * 8), "out");
    check(cudaDeviceSynchronize(), "drawn");
    at(0); check(make_rows()); check(solve()); check(walk()); check(norm());
    check(cudaStreamSynchronize(stream), "the rule");
    plain_rule<<<32, 128>>>(t, n, S_plain, out_plain);
    check(cudaDeviceSynchronize(), "plain rule");
    printf("P = %d: apart from fp64: out %.1e, S %.1e;", rows, apart(t.mixed, out_plain, P * n.values()), apart(t.next_S, S_plain, S));
    cudaFree(S_plain); cudaFree(out_plain);
    printf(" rows %.1f", chained_us(24, [&](int i) { at(i); check(make_rows()); }));
    printf(", solve %.1f", chained_us(24, [&](int i) { at(i); check(solve()); }));
    printf(", walk %.1f", chained_us(24, [&](int i) { at(i); check(walk()); }));
    printf(", norm %.1f", chained_us(24, [&](int i) { at(i); check(norm()); }));
    printf(", all four %.1f", chained_us(24, [&](int i) { at(i); check(make_rows()); check(solve()); check(walk()); check(norm()); }));
    const int64_t count = int64_t(rows) * 12288;
    printf("; silu_mul %.1f us\n", chained_us(24, [&](int i) { check(launch(silu_mul<T>, dim3(unsigned(count / 8 / SWIGLU_THREADS)), SWIGLU_THREADS, stream, dep, (const T*)pool + i * count, (const T*)pool + (24 + i) * count, count, y)); }));
  }
  check(cudaDeviceSynchronize(), "prompts");
  for (void* held : {(void*)f, (void*)counts, (void*)pool, (void*)x, (void*)y}) cudaFree(held);
}

int main(int count, char** words) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const std::string mode = count > 1 ? words[1] : "";
  if (mode == "prompts") {
    prompts();
    return 0;
  }
  Trunk trunk;
  if (mode == "kernels") {
    trunk.kernels();
  } else if (mode == "products") {
    trunk.products();
  } else {
    trunk.report("norms in the products");
    trunk.folded = false;
    trunk.report("norms apart");
  }
  check(cudaDeviceSynchronize(), "end");
}
