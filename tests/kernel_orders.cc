// Every kernel once in small sizes, on fibres; prints a hash of what each leaves, which no order of its
// threads may change, nor what memory held before. Also built with sanitizers: of races, of addresses, of
// alignment.
#include <cstdio>
#include <memory>
#include <string>

#include "prompt.h"

uint32_t state = 1;
float drawn_float() {
  state = state * 1664525u + 1013904223u;
  return float(int32_t(state)) / 2147483648.0f;
}

// Memory of a launch: each piece ends where an allocation ends.
struct Room {
  std::vector<std::unique_ptr<uint4[]>> held;
  std::vector<std::pair<unsigned char*, size_t>> results;
  template <class T>
  T* take(size_t count) {
    const size_t bytes = count * sizeof(T);
    held.emplace_back(new uint4[(bytes + 15) / 16]);
    return reinterpret_cast<T*>(held.back().get());
  }
  template <class T>
  const T* drawn(size_t count, float scale = 1.0f, float centre = 0.0f) {
    T* values = take<T>(count);
    for (size_t i = 0; i < count; ++i) put(values[i], centre + scale * drawn_float());
    return values;
  }
  const int32_t* number(int32_t value) {
    int32_t* place = take<int32_t>(1);
    *place = value;
    return place;
  }
  template <class T>
  T* scratch(size_t count) {  // not numbers, or zeros, until a kernel writes them
    T* values = take<T>(count);
    memset(values, getenv("EAGLE_CHAIN_FIBRES") ? 0xff : 0, count * sizeof(T));
    return values;
  }
  template <class T>
  T* result(size_t count) {
    T* values = scratch<T>(count);
    results.emplace_back(reinterpret_cast<unsigned char*>(values), count * sizeof(T));
    return values;
  }
  ~Room() {
    uint64_t hash = 1469598103934665603u;
    for (auto [bytes, count] : results) {
      for (size_t i = 0; i < count; ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    }
    printf(" %016llx\n", static_cast<unsigned long long>(hash));
  }
};

void told(const char* error) {
  if (error != nullptr) printf(" %s", error);
}
template <class T>
const char* const NAME = sizeof(T) == 4 ? "fp32" : std::is_same_v<T, fp16> ? "fp16" : "bf16";

template <class T>
void norms(int rows, int width) {
  printf("norms %s %d %d:", NAME<T>, rows, width);
  Room room;
  const size_t count = size_t(rows) * width;
  told(launch(add_norm<T>, dim3(unsigned(rows)), (width + 255) / 256 * 32, nullptr, true, room.drawn<T>(count),
              room.drawn<T>(count), room.drawn<float>(width), 1.0f, 1e-6f, width, room.result<T>(count),
              room.result<T>(count)));
  told(launch(silu_mul<T>, dim3(unsigned((count / 8 + SWIGLU_THREADS - 1) / SWIGLU_THREADS)), SWIGLU_THREADS,
              nullptr, true, room.drawn<T>(count), room.drawn<T>(count), int64_t(count), room.result<T>(count)));
}

// A product of two matrices, gated or side by side, or of one with norms around it.
template <class T>
void products(int rows, int depth, int out) {
  printf("products %s %d %d %d:", NAME<T>, rows, depth, out);
  Room room;
  const T* x = room.drawn<T>(size_t(rows) * depth);
  const int slots = (out + SLOT - 1) / SLOT, units = (out + 15) / 16;
  Segments two = {{room.drawn<T>(size_t(out) * depth), room.drawn<T>(size_t(out) * depth)}, {out, out}, 2};
  Segments one = {{two.weight[0]}, {out}, 1};
  Around around;
  around.squares = room.drawn<float>(size_t(rows) * 3, 1.0f, 2.0f);
  around.slots = 3;
  around.h = room.drawn<T>(size_t(rows) * out);
  around.weight = room.drawn<float>(out);
  around.sum = room.result<T>(size_t(rows) * out);
  around.next_squares = room.result<float>(size_t(rows) * slots);
  auto run = [&](auto kernel, int blocks, int threads, const Segments& s, const Around& a, int wide) {
    told(launch(kernel, dim3(unsigned(blocks)), threads, nullptr, true, x, s, a, rows, depth, wide,
                room.result<T>(size_t(rows) * wide)));
  };
  if constexpr (sizeof(T) == 4) {
    run(linear_fp32<true>, units, SLOT * 32, two, Around(), out);
    run(linear_fp32<false>, (2 * out + SLOT - 1) / SLOT, SLOT * 32, two, Around(), 2 * out);
    run(linear_fp32<false>, units, SLOT * 32, one, around, out);
  } else {
    const bool narrow = rows <= 8;
    run(narrow ? linear<T, 2, 1, true, 4> : linear<T, 2, 2, true, 4>, units, LINEAR_THREADS, two, Around(), out);
    run(narrow ? linear<T, 2, 1, false, 4> : linear<T, 2, 2, false, 4>, 2 * ((out + 31) / 32), LINEAR_THREADS,
        two, Around(), 2 * out);
    run(narrow ? linear<T, 1, 1, false, 8> : linear<T, 1, 2, false, 8>, units, LINEAR_THREADS, one, around, out);
    run(narrow ? linear_long<T, 1> : linear_long<T, 2>, units, LINEAR_THREADS, one, Around(), out);
  }
}

template <class T, int DK>
void delta(int rows, int dv) {
  printf("delta %s %d %d %d:", NAME<T>, rows, DK, dv);
  constexpr int keys = 1, heads = 2;
  Room room;
  const int channels = 2 * keys * DK + heads * dv, wide = CONV - 1 + rows;
  const size_t S = size_t(heads) * DK * dv;
  const DeltaSizes n = {rows, keys, heads, dv, channels + heads * dv + 2 * heads, 1e-6f};
  DeltaTensors t = {};
  t.proj = room.drawn<T>(size_t(rows) * n.stride);
  t.window = room.drawn<T>(size_t(channels) * wide);
  t.S = room.drawn<float>(S);
  t.log_key = room.drawn<float>(size_t(rows) * keys * DK);
  t.log_delta = room.drawn<float>(size_t(rows) * heads * dv);
  t.log_decay = room.drawn<float>(size_t(rows) * heads);
  t.kept = room.number(rows > 1 ? 2 : 1);
  t.conv = room.drawn<float>(size_t(channels) * CONV);
  t.rate = room.drawn<float>(heads);
  t.bias = room.drawn<float>(heads);
  t.norm = room.drawn<float>(dv);
  for (const bool all : {false, true}) {
    t.y = room.result<T>(size_t(rows) * heads * dv);
    t.next_window = room.result<T>(size_t(channels) * wide);
    t.next_S = room.result<float>(S);
    t.next_key = room.result<float>(size_t(rows) * keys * DK);
    t.next_delta = room.result<float>(size_t(rows) * heads * dv);
    t.next_decay = room.result<float>(size_t(rows) * heads);
    t.every_S = all ? room.result<float>(rows * S) : nullptr;
    const int threads = (dv * PARTS + 31) / 32 * 32;
    told(launch(gated_delta<T, DK / PARTS>, dim3(heads), threads, nullptr, true, t, n));
    if constexpr (DK == MAX_DIM) {
      told(launch(gated_delta_wide<T, 1>, dim3(heads), SHARES * MAX_DIM, nullptr, true, t, n));
    }
  }
}

// The four launches of a prompt's linear layer.
template <class T, int DK, int DV>
void prompt(int rows, int valid, int keys, int heads) {
  printf("prompt %s %d of %d, %d x %d, %d x %d:", NAME<T>, valid, rows, keys, DK, heads, DV);
  Room room;
  const int padded = (rows + CHUNK - 1) / CHUNK * CHUNK, width = 5;
  const PromptSizes n = {rows, padded, width, keys, heads, DK, DV, 1e-6f};
  const size_t S = size_t(heads) * DK * DV, gates = size_t(heads) * padded;
  PromptTensors t = {};
  t.u = room.drawn<T>(size_t(rows) * n.channels());
  t.z = room.drawn<T>(size_t(rows) * n.values());
  t.b = room.drawn<T>(size_t(rows) * heads);
  t.a = room.drawn<T>(size_t(rows) * heads);
  t.window = room.drawn<T>(size_t(n.channels()) * (CONV - 1 + width));
  t.S = room.drawn<float>(S);
  t.log_key = room.drawn<float>(size_t(width) * n.keys());
  t.log_delta = room.drawn<float>(size_t(width) * n.values());
  t.log_decay = room.drawn<float>(size_t(width) * heads);
  t.kept = room.number(2);
  t.valid = room.number(valid);
  t.conv = room.drawn<float>(size_t(n.channels()) * CONV);
  t.rate = room.drawn<float>(heads);
  t.bias = room.drawn<float>(heads);
  t.norm = room.drawn<float>(DV);
  t.y = room.result<T>(size_t(rows) * n.values());
  t.next_window = room.result<T>(size_t(n.channels()) * (CONV - 1 + width));
  t.next_S = room.result<float>(S);
  t.next_key = room.result<float>(size_t(width) * n.keys());
  t.next_delta = room.result<float>(size_t(width) * n.values());
  t.next_decay = room.result<float>(size_t(width) * heads);
  t.qkv = room.scratch<float>(size_t(rows) * n.channels());
  t.units = room.scratch<float>(size_t(2) * keys * padded * DK);
  t.decay = room.scratch<float>(4 * gates);
  t.beta = t.decay + gates;
  t.reach = t.beta + gates;
  t.tail = t.reach + gates;
  t.solve = room.scratch<float>(2 * gates * CHUNK);
  t.seen = t.solve + gates * CHUNK;
  t.mixed = room.scratch<float>(size_t(rows) * n.values());
  constexpr int COLUMNS = DV % 32 ? 8 : 32;
  const unsigned wide = unsigned((n.channels() / 8 + ROWS_THREADS - 1) / ROWS_THREADS);
  const unsigned warps = PROMPT_NORM_THREADS / 32;
  told(launch(prompt_rows<T>, dim3(wide, unsigned((rows + ROWS_EACH - 1) / ROWS_EACH)), ROWS_THREADS, nullptr,
              true, t, n));
  told(launch_pooled(solve_bytes<DK>(), prompt_solve<DK>, dim3(unsigned(padded / CHUNK), unsigned(keys)),
                     SOLVE_THREADS, nullptr, true, t, n));
  told(launch_pooled(walk_bytes<DK, COLUMNS>(), prompt_walk<DK, COLUMNS>,
                     dim3(unsigned(DV / COLUMNS), unsigned(heads)), WALK_THREADS<COLUMNS>, nullptr, true, t, n));
  told(launch(prompt_norm<T>, dim3((unsigned(rows * heads) + warps - 1) / warps), PROMPT_NORM_THREADS, nullptr,
              true, t, n));
}

template <class T, int QUERIES>
void attention(int rows, int dim, int position, bool quantised) {
  printf("attention %s %d %d at %d, kv %d:", NAME<T>, rows, dim, position, quantised);
  Room room;
  AttendSizes n = {};
  n.rows = n.query_rows = rows;
  n.heads = 4;
  n.kv_heads = 1;
  n.dim = dim;
  n.rotary = 16;
  n.slots = position + rows + 3;
  n.stretches = stretch_of(n.slots - 1) + 1;
  n.eps = 1e-6f;
  n.gated = true;
  n.head_stride = 2 * dim;
  n.key_offset = n.heads * n.head_stride;
  n.value_offset = n.key_offset + n.kv_heads * dim;
  n.query_stride = n.kv_stride = n.value_offset + n.kv_heads * dim;
  const size_t cached = size_t(n.kv_heads) * n.slots * dim, pairs = size_t(rows) * n.heads;
  KvStorage more = {};
  AttendTensors t = {};
  auto plane = [&](KvPlanes& planes, KvKind kind) -> void* {
    auto bytes = [&](size_t count) {
      uint8_t* values = room.result<uint8_t>(count);
      for (size_t i = 0; i < count; ++i) values[i] = uint8_t(int(drawn_float() * 127));
      return values;
    };
    auto scales = [&] {
      fp16* values = room.result<fp16>(cached / KV_BLOCK);
      for (size_t i = 0; i < cached / KV_BLOCK; ++i) put(values[i], 0.01f + 0.005f * drawn_float());
      return values;
    };
    planes.kind = kind;
    if (kind == KV_OWN) {
      T* values = room.result<T>(cached);
      for (size_t i = 0; i < cached; ++i) put(values[i], drawn_float());
      return values;
    }
    if (kind == KV_Q5_1) planes.more[0] = bytes(cached / 8);
    planes.more[kind == KV_Q5_1 ? 1 : 0] = scales();
    if (kind == KV_Q5_1) planes.more[2] = scales();
    return bytes(kind == KV_Q5_1 ? cached / 2 : cached);
  };
  t.key = plane(more.key, quantised ? KV_Q8_0 : KV_OWN);
  t.value = plane(more.value, quantised ? KV_Q5_1 : KV_OWN);
  t.query = t.kv = room.drawn<T>(size_t(rows) * n.kv_stride);
  t.position = t.query_position = room.number(position);
  t.cos = room.drawn<float>(size_t(n.slots) * n.rotary / 2);
  t.sin = room.drawn<float>(size_t(n.slots) * n.rotary / 2);
  t.query_norm = room.drawn<float>(dim, 0.3f, 1.0f);
  t.key_norm = room.drawn<float>(dim, 0.3f, 1.0f);
  t.best = room.scratch<float>(pairs * n.stretches);
  t.total = room.scratch<float>(pairs * n.stretches);
  t.mixed = room.scratch<float>(pairs * n.stretches * dim);
  t.y = room.result<T>(pairs * dim);
  const dim3 grid(unsigned(n.stretches), unsigned(n.kv_heads));
  auto start = [&](auto kernel) { told(launch(kernel, grid, ATTEND_THREADS, nullptr, true, t, n, more)); };
  if constexpr (sizeof(T) == 2) {
    start(quantised ? attend_tensor<T, QUERIES, false> : attend_tensor<T, QUERIES, true>);
  } else {
    start(quantised ? attend<T, QUERIES, false> : attend<T, QUERIES, true>);
  }
  told(launch(merge_stretches<T>, dim3(unsigned(n.heads), unsigned(rows)), MAX_HEAD, nullptr, true, t, n));
}

template <class T>
void picks(int rows, int vocabulary) {
  printf("picks %s %d %d:", NAME<T>, rows, vocabulary);
  Room room;
  float* best = room.result<float>(size_t(rows) * PICK_BLOCKS);
  int32_t* places = room.result<int32_t>(size_t(rows) * PICK_BLOCKS);
  told(launch(pick_stretch<T>, dim3(PICK_BLOCKS, unsigned(rows)), PICK_THREADS, nullptr, true,
              room.drawn<T>(size_t(rows) * vocabulary), vocabulary, best, places));
  Verdict v = {};
  int32_t* ids = room.take<int32_t>(rows);
  for (int i = 0; i < rows; ++i) ids[i] = i;
  v.ids = ids;
  v.position = room.number(7);
  v.rows = room.number(rows);
  v.next_ids = room.result<int32_t>(rows);
  for (int32_t** number : {&v.accepted, &v.pending, &v.next_kept, &v.next_position}) {
    *number = room.result<int32_t>(1);
  }
  told(launch(pick, dim3(1), rows * 32, nullptr, true, best, places, v, rows));
}

int main(int count, char**) {
  norms<float>(2, 72), norms<fp16>(1, 520), norms<bf16>(3, 1024);
  products<float>(3, 72, 40), products<fp16>(3, 328, 40), products<bf16>(9, 72, 24);
  delta<float, 16>(2, 8), delta<fp16, 64>(3, 96), delta<bf16, 128>(3, 128);
  prompt<float, 16, 8>(70, 69, 1, 2);
  prompt<fp16, 32, 32>(1, 1, 1, 1);
  prompt<bf16, 64, 64>(65, 65, 1, 3);
  prompt<bf16, 128, 128>(130, 129, 1, 1);
  attention<float, 24>(5, 64, 3, false), attention<float, 36>(9, 32, 30, true);
  attention<fp16, 8>(2, 64, 40, true), attention<bf16, 24>(5, 256, 35, false), attention<bf16, 40>(9, 64, 9, true);
  picks<float>(1, 100), picks<fp16>(5, 700), picks<bf16>(9, 70);
  if (count == 1) return 0;
  for (int rows : {1, 63, 64, 65, 200}) {  // all heads of the 9B
    for (int valid : {1, rows}) prompt<bf16, 128, 128>(rows, valid, 16, 32);
  }
}
