// The operators of domain `eagle_chain` as a custom-operator library of ONNX Runtime. Built with nvcc
// they belong to the CUDA provider; built with a C++ compiler, to the CPU provider (tests).
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "ort_abi.h"
#include "prompt.h"

// Tuning of the products: 16-byte loads that a lane has under way for each row of weights, and how many
// blocks of 32 rows there must be before blocks take 32 rows instead of 16.
constexpr int LINEAR_AHEAD = 4;
constexpr int LINEAR_WIDE = 300;
constexpr int LINEAR_LONG = 1500;  // blocks of 16 rows from which the kernel for long matrices pays

// Blocks of a cluster that share a value head; 0 where the GPU has no clusters.
#ifndef __CUDACC__
constexpr int DELTA_SPLIT = 1;
#elif __CUDA_ARCH_LIST__ >= 900
constexpr int DELTA_SPLIT = 2;
#else
constexpr int DELTA_SPLIT = 0;
#endif
constexpr int DELTA_WIDE_THREADS = SHARES * MAX_DIM / (DELTA_SPLIT == 2 ? 2 : 1);

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// An argument of a kernel call: address, element type, shape.
struct Tensor {
  void* data = nullptr;
  int type = ort::UNDEFINED;
  std::vector<int64_t> shape;
  int64_t operator[](int axis) const { return shape[axis < 0 ? axis + int(shape.size()) : axis]; }
  int64_t rows() const {  // product of all axes but the last
    int64_t n = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
    return n;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

struct Failure {
  std::string text;
};
void require(bool holds, const char* text) {
  if (!holds) throw Failure{text};
}
void done(const char* error) {
  if (error != nullptr) throw Failure{error};
}

// Whether a kernel may start while the one before it drains; asked at each call, settled by a capture.
bool dependent_launch() {
  const char* text = std::getenv("EAGLE_CHAIN_DEPENDENT_LAUNCH");
  return text == nullptr || text[0] != '0';
}

// A block of memory until the end of the scope.
class Block {
 public:
  Block(const ort::Api* api, ort::Allocator* allocator, void* data)
      : api_(api), allocator_(allocator), data_(data) {}
  Block(const Block&) = delete;
  ~Block() {
    ort::Status* status = ort::free(api_, allocator_, data_);
    if (status != nullptr) ort::release_status(api_, status);
  }

 private:
  const ort::Api* api_;
  ort::Allocator* allocator_;
  void* data_;
};

// One call of an operator: inputs, outputs and scratch memory on demand, stream.
class Call {
 public:
  Call(const ort::Api* api, ort::Context* context, ort::Allocator* allocator)
      : api_(api), context_(context), allocator_(allocator) {}
  void check(ort::Status* status) const {
    if (status == nullptr) return;
    const char* text = ort::entry<2, const char* (*)(const ort::Status*)>(api_)(status);
    Failure failure{text};
    ort::release_status(api_, status);
    throw failure;
  }
  Tensor input(size_t i) const {
    size_t count = 0;
    check(ort::input_count(api_, context_, &count));
    const ort::Value* value = nullptr;
    if (i < count) check(ort::input(api_, context_, i, &value));
    Tensor tensor;
    if (value == nullptr) return tensor;
    ort::TypeAndShape* info = nullptr;
    check(ort::type_and_shape(api_, value, &info));
    size_t rank = 0;
    check(ort::element_type(api_, info, &tensor.type));
    check(ort::dimension_count(api_, info, &rank));
    tensor.shape.resize(rank);
    check(ort::dimensions(api_, info, tensor.shape.data(), rank));
    ort::release_type_and_shape(api_, info);
    check(ort::tensor_data(api_, const_cast<ort::Value*>(value), &tensor.data));
    return tensor;
  }
  // Null where the graph does not ask for it.
  void* output(size_t i, std::vector<int64_t> shape) const {
    size_t count = 0;
    check(ort::output_count(api_, context_, &count));
    if (i >= count) return nullptr;
    ort::Value* value = nullptr;
    void* data = nullptr;
    check(ort::output(api_, context_, i, shape.data(), shape.size(), &value));
    if (value != nullptr) check(ort::tensor_data(api_, value, &data));
    return data;
  }
  struct Part {
    float** place;
    int64_t count;
  };
  // A place for what kernels of this call leave for one another, where there is none yet. As outputs
  // that no node reads they would be held to the end of a run, those of all layers at once. The block
  // may go when the kernels are queued, as those of ONNX Runtime's own kernels do: it belongs to the
  // stream of the call, where its next owner is queued behind them.
  Block scratch(std::initializer_list<Part> parts) const {
    constexpr size_t LINE = 256;
    auto bytes = [](const Part& part) {
      return (size_t(part.count) * sizeof(float) + LINE - 1) / LINE * LINE;
    };
    size_t total = 0;
    for (const Part& part : parts) total += *part.place == nullptr ? bytes(part) : 0;
    void* data = nullptr;
#ifdef __CUDACC__
    const ort::MemoryInfo* device = nullptr;
    check(ort::allocator_info(api_, allocator_, &device));
    check(ort::scratch(api_, context_, device, total, &data));
#else
    check(ort::allocate(api_, allocator_, total, &data));  // the other one needs a stream
#endif
    char* next = static_cast<char*>(data);
    for (const Part& part : parts) {
      if (*part.place != nullptr) continue;
      *part.place = reinterpret_cast<float*>(next);
      next += bytes(part);
    }
    return Block(api_, allocator_, data);
  }
  Stream stream() const {
    void* stream = nullptr;
#ifdef __CUDACC__
    check(ort::stream(api_, context_, &stream));
#endif
    return static_cast<Stream>(stream);
  }

 private:
  const ort::Api* api_;
  ort::Context* context_;
  ort::Allocator* allocator_;
};

struct Attributes {
  float eps = 1e-6f;
  int64_t centred = 0, heads = 0, gated = 0, kv_offset = 0, key_kind = KV_OWN, value_kind = KV_OWN;
};

template <class Work>
void by_type(int type, Work work) {
  if (type == ort::FLOAT) return work(float{});
  if (type == ort::FLOAT16) return work(fp16{});
  if (type == ort::BFLOAT16) return work(bf16{});
  throw Failure{"activations are fp32, fp16 or bf16"};
}

// Calls `work` with the key dim of a linear layer as a type.
template <class Work>
void by_key_dim(int key_dim, Work work) {
  if (key_dim == 128) return work(std::integral_constant<int, 128>{});
  if (key_dim == 64) return work(std::integral_constant<int, 64>{});
  if (key_dim == 32) return work(std::integral_constant<int, 32>{});
  if (key_dim == 16) return work(std::integral_constant<int, 16>{});
  throw Failure{"key dims of linear layers are 16, 32, 64 or 128"};
}

// AddNorm(h, delta, weight) -> sum, x; Norm(h, weight) -> x.
void run_norm(const Call& call, const Attributes& a, bool adds) {
  const Tensor h = call.input(0), delta = adds ? call.input(1) : Tensor();
  const Tensor weight = call.input(adds ? 2 : 1);
  const int n = int(h[-1]);
  void* sum = adds ? call.output(0, h.shape) : nullptr;
  void* x = call.output(adds ? 1 : 0, h.shape);
  require(n % 8 == 0 && n <= 8 * NORM_THREADS, "hidden sizes above 8192 or not of 8");
  const int threads = (n + 255) / 256 * 32;  // eight values a thread
  by_type(h.type, [&](auto t) {
    using T = decltype(t);
    done(launch(add_norm<T>, dim3(unsigned(h.rows())), threads, call.stream(), dependent_launch(),
                h.as<T>(), delta.as<T>(), weight.as<const float>(), a.centred ? 1.0f : 0.0f, a.eps, n,
                static_cast<T*>(sum), static_cast<T*>(x)));
  });
}

template <class T, int TILES, bool GATED, int AHEAD>
void launch_linear(const Call& call, const Tensor& x, const Segments& s, const Around& around, int units,
                   int out, T* y) {
  const int rows = int(x.rows()), depth = int(x[-1]);
  const bool narrow = rows <= 8;
  done(launch(narrow ? linear<T, TILES, 1, GATED, AHEAD> : linear<T, TILES, 2, GATED, AHEAD>,
              dim3(unsigned(units)), LINEAR_THREADS, call.stream(), dependent_launch(), x.as<T>(), s,
              around, rows, depth, out, y));
}

// x times the weights from input `first` on, -> y [R, out] with the norms around it.
struct Product {
  Segments s = {};
  int out = 0, narrow = 0, wide = 0;  // blocks of 16 and of 32 rows
  Product(const Call& call, const Tensor& x, size_t first, bool gated) {
    for (int i = 0; i < MAX_SEGMENTS; ++i) {
      const Tensor w = call.input(first + size_t(i));
      if (w.data == nullptr) break;
      require(w.type == x.type, "a weight's dtype is not that of the activations");
      require(w[-1] == x[-1], "a weight does not have the width of x");
      s.weight[i] = w.data;
      s.rows[i] = int(w[0]);
      s.count = i + 1;
      out += s.rows[i];
      narrow += (s.rows[i] + 15) / 16;
      wide += (s.rows[i] + 31) / 32;
    }
    require(x.rows() <= MAX_ROWS, "too many rows for the fused kernels");
    require(x[-1] % 8 == 0, "the width of a matrix is a multiple of 8");
    if (!gated) return;
    require(s.count == 2 && s.rows[0] == s.rows[1], "gate and up have the same shape");
    out = s.rows[0];
    narrow = (out + 15) / 16;
  }
  void run(const Call& call, const Tensor& x, const Around& around, bool gated, void* y) const {
    const int rows = int(x.rows()), depth = int(x[-1]);
    by_type(x.type, [&](auto t) {
      using T = decltype(t);
      T* to = static_cast<T*>(y);
      if constexpr (sizeof(T) == 4) {
        const dim3 blocks{unsigned((out + SLOT - 1) / SLOT)};
        done(launch(gated ? linear_fp32<true> : linear_fp32<false>, blocks, SLOT * 32, call.stream(),
                    dependent_launch(), x.as<T>(), s, around, rows, depth, out, to));
      } else if (gated) {
        launch_linear<T, 2, true, LINEAR_AHEAD>(call, x, s, around, narrow, out, to);
      } else if (narrow >= LINEAR_LONG && s.count == 1) {
        done(launch(rows <= 8 ? linear_long<T, 1> : linear_long<T, 2>, dim3(unsigned(narrow)),
                    LINEAR_THREADS, call.stream(), dependent_launch(), x.as<T>(), s, around, rows, depth,
                    out, to));
      } else if (wide >= LINEAR_WIDE) {
        launch_linear<T, 2, false, LINEAR_AHEAD>(call, x, s, around, wide, out, to);
      } else {
        launch_linear<T, 1, false, 2 * LINEAR_AHEAD>(call, x, s, around, narrow, out, to);
      }
    });
  }
};

// Linear(x, w0[, w1, w2, w3]) -> [R, sum of rows]; GatedLinear(x, gate, up) -> silu(gate x) * up x.
void run_linear(const Call& call, bool gated) {
  const Tensor x = call.input(0);
  const Product product(call, x, 1, gated);
  std::vector<int64_t> shape = x.shape;
  shape.back() = product.out;
  product.run(call, x, Around{}, gated, call.output(0, shape));
}

// What both ways to run a linear layer ask of it; `rows` fill the window behind the convolution's past.
void check_linear(int value_dim, const Tensor& window, int rows) {
  require(value_dim <= MAX_DIM && value_dim % 8 == 0, "value dims above 128 or not of 8");
  require(window[-1] == CONV - 1 + rows, "the convolution has four taps");
}

// GatedDelta(proj, window, S, log_key, log_delta, log_decay, kept, conv, A_log, dt_bias, norm)
//   -> y, next S, log_key, log_delta, log_decay, window[, S after every row]
void run_delta(const Call& call, const Attributes& a) {
  const Tensor proj = call.input(0), window = call.input(1), S = call.input(2);
  const Tensor log_key = call.input(3), log_delta = call.input(4), log_decay = call.input(5);
  DeltaSizes n = {};
  n.rows = int(proj.rows());
  n.key_heads = int(log_key[1]);
  n.value_heads = int(S[0]);
  n.value_dim = int(S[2]);
  n.stride = int(proj[-1]);
  n.eps = a.eps;
  const int key_dim = int(S[1]);
  require(n.rows <= MAX_ROWS, "too many rows for the fused kernels");
  check_linear(n.value_dim, window, n.rows);
  DeltaTensors t = {};
  t.proj = proj.data;
  t.window = window.data;
  t.S = S.as<float>();
  t.log_key = log_key.as<float>();
  t.log_delta = log_delta.as<float>();
  t.log_decay = log_decay.as<float>();
  t.kept = call.input(6).as<int32_t>();
  t.conv = call.input(7).as<const float>();
  t.rate = call.input(8).as<const float>();
  t.bias = call.input(9).as<const float>();
  t.norm = call.input(10).as<const float>();
  std::vector<int64_t> every = S.shape;
  every.insert(every.begin(), n.rows);
  t.y = call.output(0, {n.rows, int64_t(n.value_heads) * n.value_dim});
  t.next_S = static_cast<float*>(call.output(1, S.shape));
  t.next_key = static_cast<float*>(call.output(2, log_key.shape));
  t.next_delta = static_cast<float*>(call.output(3, log_delta.shape));
  t.next_decay = static_cast<float*>(call.output(4, log_decay.shape));
  t.next_window = call.output(5, window.shape);
  t.every_S = static_cast<float*>(call.output(6, every));
  const int threads = (n.value_dim * PARTS + 31) / 32 * 32;
  const dim3 grid{unsigned(n.value_heads)};
  by_type(proj.type, [&](auto type) {
    using T = decltype(type);
    auto start = [&](auto kernel) {
      done(launch(kernel, grid, threads, call.stream(), dependent_launch(), t, n));
    };
    if constexpr (DELTA_SPLIT != 0) {
      if (key_dim == 128 && n.value_dim == 128) {
        done(launch_clusters(DELTA_SPLIT, gated_delta_wide<T, DELTA_SPLIT>,
                             dim3(unsigned(n.value_heads * DELTA_SPLIT)), DELTA_WIDE_THREADS,
                             call.stream(), dependent_launch(), t, n));
        return;
      }
    }
    by_key_dim(key_dim, [&](auto dim) { start(gated_delta<T, decltype(dim)::value / PARTS>); });
  });
}

template <int DK>
void launch_prompt(const Call& call, const PromptTensors& t, const PromptSizes& n) {
  const unsigned chunks = unsigned(n.padded / CHUNK), heads = unsigned(n.value_heads);
  done(launch_pooled(solve_bytes<DK>(), prompt_solve<DK>, dim3(chunks, unsigned(n.key_heads)), SOLVE_THREADS,
                     call.stream(), dependent_launch(), t, n));
  auto walk = [&](auto kernel, size_t bytes, int columns, int threads) {
    done(launch_pooled(bytes, kernel, dim3(unsigned(n.value_dim / columns), heads), threads, call.stream(),
                       dependent_launch(), t, n));
  };
  if (n.value_dim % 32 == 0) walk(prompt_walk<DK, 32>, walk_bytes<DK, 32>(), 32, WALK_THREADS<32>);
  else walk(prompt_walk<DK, 8>, walk_bytes<DK, 8>(), 8, WALK_THREADS<8>);
}

// GatedDeltaPrompt(u, z, b, a, window, S, log_key, log_delta, log_decay, kept, rows, conv, A_log, dt_bias,
//   norm) -> y, next S, log_key, log_delta, log_decay, window; qkv and mixed if a graph asks (tests)
void run_prompt(const Call& call, const Attributes& a) {
  const Tensor u = call.input(0), window = call.input(4), S = call.input(5), log_key = call.input(6);
  const Tensor log_delta = call.input(7), log_decay = call.input(8);
  PromptSizes n = {};
  n.rows = int(u[0]);
  n.padded = (n.rows + CHUNK - 1) / CHUNK * CHUNK;
  n.width = int(log_key[0]);
  n.key_heads = int(log_key[1]);
  n.value_heads = int(S[0]);
  n.key_dim = int(S[1]);
  n.value_dim = int(S[2]);
  n.eps = a.eps;
  check_linear(n.value_dim, window, n.width);
  require(u[-1] == n.channels(), "the width of u is not that of queries, keys and values");
  PromptTensors t = {};
  t.u = u.data;
  t.z = call.input(1).data;
  t.b = call.input(2).data;
  t.a = call.input(3).data;
  t.window = window.data;
  t.S = S.as<float>();
  t.log_key = log_key.as<float>();
  t.log_delta = log_delta.as<float>();
  t.log_decay = log_decay.as<float>();
  t.kept = call.input(9).as<int32_t>();
  t.valid = call.input(10).as<int32_t>();
  t.conv = call.input(11).as<const float>();
  t.rate = call.input(12).as<const float>();
  t.bias = call.input(13).as<const float>();
  t.norm = call.input(14).as<const float>();
  auto result = [&](size_t i, std::vector<int64_t> shape) {
    return static_cast<float*>(call.output(i, std::move(shape)));
  };
  t.y = call.output(0, {n.rows, n.values()});
  t.next_S = result(1, S.shape);
  t.next_key = result(2, log_key.shape);
  t.next_delta = result(3, log_delta.shape);
  t.next_decay = result(4, log_decay.shape);
  t.next_window = call.output(5, window.shape);
  t.qkv = result(6, u.shape);
  t.mixed = result(7, {n.rows, n.values()});
  const int64_t units = int64_t(n.key_heads) * n.padded * n.key_dim;
  const int64_t gates = int64_t(n.value_heads) * n.padded, triangles = gates * CHUNK;
  const Block block = call.scratch({
      {&t.qkv, int64_t(n.rows) * n.channels()},
      {&t.units, 2 * units},
      {&t.decay, gates},
      {&t.beta, gates},
      {&t.reach, gates},
      {&t.tail, gates},
      {&t.solve, triangles},
      {&t.seen, triangles},
      {&t.mixed, int64_t(n.rows) * n.values()},
  });
  const unsigned wide = unsigned((n.channels() / 8 + ROWS_THREADS - 1) / ROWS_THREADS);
  const unsigned pieces = unsigned((n.rows + ROWS_EACH - 1) / ROWS_EACH);
  const unsigned items = unsigned(n.rows * n.value_heads), warps = PROMPT_NORM_THREADS / 32;
  by_type(u.type, [&](auto type) {
    done(launch(prompt_rows<decltype(type)>, dim3(wide, pieces), ROWS_THREADS, call.stream(),
                dependent_launch(), t, n));
  });
  by_key_dim(n.key_dim, [&](auto dim) { launch_prompt<decltype(dim)::value>(call, t, n); });
  by_type(u.type, [&](auto type) {
    done(launch(prompt_norm<decltype(type)>, dim3((items + warps - 1) / warps), PROMPT_NORM_THREADS,
                call.stream(), dependent_launch(), t, n));
  });
}

// SiluMul(gate, up) -> silu(gate) * up
void run_silu_mul(const Call& call) {
  const Tensor gate = call.input(0), up = call.input(1);
  const int64_t count = gate.rows() * gate[-1], each = SWIGLU_THREADS * 8;
  void* y = call.output(0, gate.shape);
  require(count % 8 == 0, "the values of gate and up are a multiple of 8");
  by_type(gate.type, [&](auto type) {
    using T = decltype(type);
    done(launch(silu_mul<T>, dim3(unsigned((count + each - 1) / each)), SWIGLU_THREADS, call.stream(),
                dependent_launch(), gate.as<const T>(), up.as<const T>(), count, static_cast<T*>(y)));
  });
}

int64_t item_bytes(int type) { return type == ort::FLOAT ? 4 : type == ort::INT8 ? 1 : 2; }

// The planes of keys or of values: inputs from `first` on, written to outputs from `result` on.
struct Stored {
  void* plane;
  KvPlanes planes = {};
  int count, heads, slots, dim;
};
Stored stored(const Call& call, size_t first, size_t result, int64_t kind, int activations) {
  const Tensor lead = call.input(first);
  Stored s;
  s.count = kind == KV_Q8_0 ? 2 : kind == KV_Q5_1 ? 4 : 1;
  s.planes.kind = int(kind);
  if (s.count == 1) {
    s.planes.kind = lead.type == activations    ? KV_OWN
                    : lead.type == ort::FLOAT   ? KV_FP32
                    : lead.type == ort::FLOAT16 ? KV_FP16
                                                : KV_BF16;
  }
  s.heads = int(lead[1]);
  s.slots = int(lead[2]);
  s.dim = int(lead[3]) * (kind == KV_Q5_1 ? 2 : 1);
  require(s.count == 1 || s.dim % KV_BLOCK == 0, "head dims of quantised rows not of 32");
  for (int i = 0; i < s.count; ++i) {
    const Tensor from = call.input(first + i);
    void*& to = i == 0 ? s.plane : s.planes.more[i - 1];
    to = call.output(result + i, from.shape);
    const size_t bytes = size_t(from.rows() * from[-1] * item_bytes(from.type));
    if (to != from.data) done(copy_bytes(to, from.data, bytes, call.stream()));  // not in place
  }
  return s;
}

template <class T, bool OWN>
const char* launch_attend(const Stream stream, const AttendTensors& t, const AttendSizes& n,
                          const KvStorage& more) {
  const int queries = n.query_rows * (n.heads / n.kv_heads);
  const dim3 grid(unsigned(n.stretches), unsigned(n.kv_heads));
  auto start = [&](auto kernel) {
    return launch(kernel, grid, ATTEND_THREADS, stream, dependent_launch(), t, n, more);
  };
  require(queries <= 36, "more than 36 query rows for one key head");
  if constexpr (sizeof(T) == 2) {
    if (queries <= 8) return start(attend_tensor<T, 8, OWN>);
    if (queries <= 24) return start(attend_tensor<T, 24, OWN>);
    return start(attend_tensor<T, 40, OWN>);
  } else {
    if (queries <= 8) return start(attend<T, 8, OWN>);
    if (queries <= 24) return start(attend<T, 24, OWN>);
    return start(attend<T, 36, OWN>);
  }
}

// Attend(query, kv, position, query_position, cos, sin, q_norm, k_norm, planes of keys, of values)
//   -> y, three scratch tensors, next planes; q_norm and k_norm may be left out
void run_attend(const Call& call, const Attributes& a) {
  const Tensor query = call.input(0), kv = call.input(1), cos = call.input(4);
  const Stored key = stored(call, 8, 4, a.key_kind, query.type);
  const Stored value = stored(call, 8 + key.count, 4 + key.count, a.value_kind, query.type);
  AttendSizes n = {};
  n.rows = int(kv.rows());
  n.query_rows = int(query.rows());
  n.heads = int(a.heads);
  n.kv_heads = key.heads;
  n.slots = key.slots;
  n.dim = key.dim;
  n.rotary = int(cos[-1]) * 2;
  n.gated = a.gated != 0;
  n.query_stride = int(query[-1]);
  n.head_stride = n.gated ? 2 * n.dim : n.dim;
  n.kv_stride = int(kv[-1]);
  n.key_offset = int(a.kv_offset);
  n.value_offset = n.key_offset + n.kv_heads * n.dim;
  n.eps = a.eps;
  n.offset = a.centred ? 1.0f : 0.0f;
  n.stretches = stretch_of(n.slots - 1) + 1;
  require(n.dim <= MAX_HEAD && n.dim % 8 == 0, "head dims above 256 or not of 8");
  AttendTensors t = {};
  t.query = query.data;
  t.kv = kv.data;
  t.position = call.input(2).as<int32_t>();
  t.query_position = call.input(3).as<int32_t>();
  t.cos = cos.as<float>();
  t.sin = call.input(5).as<float>();
  t.query_norm = call.input(6).as<const float>();
  t.key_norm = call.input(7).as<const float>();
  t.key = key.plane;
  t.value = value.plane;
  const int64_t pairs = int64_t(n.query_rows) * n.heads;
  t.y = call.output(0, {n.query_rows, int64_t(n.heads) * n.dim});
  t.best = static_cast<float*>(call.output(1, {pairs, n.stretches}));
  t.total = static_cast<float*>(call.output(2, {pairs, n.stretches}));
  t.mixed = static_cast<float*>(call.output(3, {pairs, n.stretches, n.dim}));
  const Stream stream = call.stream();
  const KvStorage more = {key.planes, value.planes};
  const bool own = key.planes.kind == KV_OWN && value.planes.kind == KV_OWN;
  by_type(query.type, [&](auto type) {
    using T = decltype(type);
    done(own ? launch_attend<T, true>(stream, t, n, more)
             : launch_attend<T, false>(stream, t, n, more));
    done(launch(merge_stretches<T>, dim3(unsigned(n.heads), unsigned(n.query_rows)),
                MAX_HEAD, stream, dependent_launch(), t, n));
  });
}

// Greedy(logits) -> ids, scratch, scratch
// Verify(logits, ids, position, rows) -> next_ids, accepted, pending, next_kept, next_position,
//   scratch, scratch
void run_pick(const Call& call, bool verifies) {
  const Tensor logits = call.input(0);
  const int rows = int(logits.rows());
  require(rows <= MAX_ROWS, "too many rows for the fused kernels");
  Verdict v = {};
  v.next_ids = static_cast<int32_t*>(call.output(0, {rows}));
  if (verifies) {
    v.ids = call.input(1).as<int32_t>();
    v.position = call.input(2).as<int32_t>();
    v.rows = call.input(3).as<int32_t>();
    v.accepted = static_cast<int32_t*>(call.output(1, {1}));
    v.pending = static_cast<int32_t*>(call.output(2, {1}));
    v.next_kept = static_cast<int32_t*>(call.output(3, {1}));
    v.next_position = static_cast<int32_t*>(call.output(4, {1}));
  }
  const size_t scratch = verifies ? 5 : 1;
  float* best = static_cast<float*>(call.output(scratch, {rows, PICK_BLOCKS}));
  int32_t* ids = static_cast<int32_t*>(call.output(scratch + 1, {rows, PICK_BLOCKS}));
  by_type(logits.type, [&](auto type) {
    using T = decltype(type);
    done(launch(pick_stretch<T>, dim3(PICK_BLOCKS, unsigned(rows)), PICK_THREADS, call.stream(),
                dependent_launch(), logits.as<T>(), int(logits[-1]), best, ids));
  });
  done(launch(pick, dim3(1), rows * 32, call.stream(), dependent_launch(), best, ids, v, rows));
}

enum Kind { NORM, ADD_NORM, LINEAR, GATED_LINEAR, DELTA, PROMPT, SILU_MUL, ATTEND, GREEDY, VERIFY };

struct Operator : ort::CustomOp {
  Kind kind;
  const char* title;
  size_t takes, least;  // `least` of the inputs are required
  std::vector<int> types;      // of the inputs, then of the outputs
};
struct Kernel {
  const ort::Api* api;
  Kind kind;
  Attributes attributes = {};
  ort::Allocator* allocator = nullptr;  // of scratch memory, where an operator needs it
  ~Kernel() {
    if (allocator != nullptr) ort::release_allocator(api, allocator);
  }
};

const Operator& as_operator(const ort::CustomOp* op) { return *static_cast<const Operator*>(op); }

ort::Status* create(const ort::CustomOp* op, const ort::Api* api, const ort::Info* info, void** to) {
  auto* kernel = new Kernel{api, as_operator(op).kind};
  auto read = [&](const char* name, int64_t* value) {  // absent: the default stays
    ort::Status* status = ort::attribute_int(api, info, name, value);
    if (status != nullptr) ort::release_status(api, status);
  };
  Attributes& a = kernel->attributes;
  ort::Status* status = ort::attribute_float(api, info, "epsilon", &a.eps);
  if (status != nullptr) ort::release_status(api, status);
  read("centred", &a.centred);
  read("heads", &a.heads);
  read("gated", &a.gated);
  read("kv_offset", &a.kv_offset);
  read("key_kind", &a.key_kind);
  read("value_kind", &a.value_kind);
  *to = kernel;
  if (kernel->kind != PROMPT) return nullptr;
  return ort::kernel_allocator(api, info, ort::OWN, &kernel->allocator);
}

ort::Status* compute(void* self, ort::Context* context) {
  const Kernel& kernel = *static_cast<Kernel*>(self);
  try {
    const Call call(kernel.api, context, kernel.allocator);
    switch (kernel.kind) {
      case NORM: run_norm(call, kernel.attributes, false); break;
      case ADD_NORM: run_norm(call, kernel.attributes, true); break;
      case LINEAR: run_linear(call, false); break;
      case GATED_LINEAR: run_linear(call, true); break;
      case DELTA: run_delta(call, kernel.attributes); break;
      case PROMPT: run_prompt(call, kernel.attributes); break;
      case SILU_MUL: run_silu_mul(call); break;
      case ATTEND: run_attend(call, kernel.attributes); break;
      case GREEDY: run_pick(call, false); break;
      case VERIFY: run_pick(call, true); break;
    }
    return nullptr;
  } catch (const Failure& failure) {
    return ort::create_status(kernel.api, ort::FAIL, failure.text.c_str());
  }
}

Operator* make(Kind kind, const char* title, size_t least, std::vector<int> inputs,
               std::vector<int> outputs) {
  auto* op = new Operator;
  op->kind = kind;
  op->title = title;
  op->takes = inputs.size();
  op->least = least;
  op->types = inputs;
  op->types.insert(op->types.end(), outputs.begin(), outputs.end());
  op->name = [](const ort::CustomOp* o) { return as_operator(o).title; };
#ifdef __CUDACC__
  op->provider = [](const ort::CustomOp*) { return "CUDAExecutionProvider"; };
#else
  op->provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
#endif
  op->input_type = [](const ort::CustomOp* o, size_t i) { return as_operator(o).types[i]; };
  op->inputs = [](const ort::CustomOp* o) { return as_operator(o).takes; };
  op->output_type = [](const ort::CustomOp* o, size_t i) {
    return as_operator(o).types[as_operator(o).takes + i];
  };
  op->outputs = [](const ort::CustomOp* o) {
    return as_operator(o).types.size() - as_operator(o).takes;
  };
  op->destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op->input_presence = [](const ort::CustomOp* o, size_t i) {
    return int(i < as_operator(o).least ? ort::REQUIRED : ort::OPTIONAL);
  };
  op->output_presence = [](const ort::CustomOp*, size_t i) {
    return int(i == 0 ? ort::REQUIRED : ort::OPTIONAL);
  };
  op->input_memory = [](const ort::CustomOp*, size_t) { return 0; };
  op->variadic_input_least = [](const ort::CustomOp*) { return 1; };
  op->variadic_input_homogeneous = [](const ort::CustomOp*) { return 0; };
  op->variadic_output_least = [](const ort::CustomOp*) { return 1; };
  op->variadic_output_homogeneous = [](const ort::CustomOp*) { return 0; };
  op->create_checked = create;
  op->compute = compute;
  // The graph states the type and shape of every result.
  op->infer = [](const ort::CustomOp*, void*) -> ort::Status* { return nullptr; };
  op->start_version = [](const ort::CustomOp*) { return 1; };
  op->end_version = [](const ort::CustomOp*) { return 2147483647; };
  return op;
}

}  // namespace

EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  const ort::Api* api = base->get(ort::VERSION);
  static const std::vector<Operator*> operators = [] {
    constexpr int F = ort::FLOAT, H = ort::FLOAT16, I = ort::INT32, C = ort::INT8;
    std::vector<Operator*> made;
    for (const int T : {ort::FLOAT, ort::FLOAT16, ort::BFLOAT16}) {
      made.push_back(make(NORM, "Norm", 2, {T, F}, {T}));
      made.push_back(make(ADD_NORM, "AddNorm", 3, {T, T, F}, {T, T}));
      made.push_back(make(LINEAR, "Linear", 2, {T, T, T, T, T}, {T}));
      made.push_back(make(GATED_LINEAR, "GatedLinear", 3, {T, T, T}, {T}));
      made.push_back(make(DELTA, "GatedDelta", 11, {T, T, F, F, F, F, I, F, F, F, F},
                          {T, F, F, F, F, T, F}));
      made.push_back(make(PROMPT, "GatedDeltaPrompt", 15, {T, T, T, T, T, F, F, F, F, I, I, F, F, F, F},
                          {T, F, F, F, F, T, F, F}));
      made.push_back(make(SILU_MUL, "SiluMul", 2, {T, T}, {T}));
      const std::vector<int> q8_0 = {C, H}, q5_1 = {C, C, H, H};
      auto attend = [&](const char* title, const std::vector<int>& key, const std::vector<int>& value) {
        std::vector<int> takes = {T, T, I, I, F, F, F, F}, gives = {T, F, F, F};
        for (std::vector<int>* types : {&takes, &gives}) {
          types->insert(types->end(), key.begin(), key.end());
          types->insert(types->end(), value.begin(), value.end());
        }
        made.push_back(make(ATTEND, title, 6, takes, gives));
      };
      for (const int K : {F, H, int(ort::BFLOAT16)}) attend("Attend", {K}, {K});
      attend("AttendQ8", q8_0, q8_0);
      attend("AttendQ8Q5", q8_0, q5_1);
      made.push_back(make(GREEDY, "Greedy", 1, {T}, {I, F, I}));
      made.push_back(make(VERIFY, "Verify", 4, {T, I, I, I}, {I, I, I, I, I, F, I}));
    }
    return made;
  }();
  // Domains and operators live as long as the process: sessions keep pointers to them.
  static ort::Domain* domain = nullptr;
  if (domain == nullptr) {
    if (ort::Status* status = ort::create_domain(api, "eagle_chain", &domain)) return status;
    for (const Operator* op : operators) {
      if (ort::Status* status = ort::add_op(api, domain, static_cast<const ort::CustomOp*>(op))) return status;
    }
  }
  return ort::add_domain(api, options, domain);
}
