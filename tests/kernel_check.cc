// The kernels for the big model's sizes against plain sums or their simpler siblings, on fibres, row by
// row as well; attention over quantised rows against the same rows as values. Prints what is wrong.
#include <cstdio>
#include <random>

#include "kernels.h"

using T = bf16;
std::mt19937 generator(1);
int failures = 0;

float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(generator);
}
std::vector<T> random_values(size_t count, float scale) {
  std::vector<T> values(count);
  for (T& v : values) v = to_bf16(normal() * scale);
  return values;
}
template <class Value>
double distance(const std::vector<Value>& got, const std::vector<Value>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += pow(to_float(got[i]) - to_float(want[i]), 2);
    size += pow(to_float(want[i]), 2);
  }
  return sqrt(error / size);
}
void expect(bool holds, const char* what, int a, int b) {
  if (holds) return;
  printf("%s: %d, %d\n", what, a, b);
  ++failures;
}

struct Attention {
  AttendSizes n = {};
  std::vector<T> proj, key, value;
  std::vector<float> cos, sin, query_norm, key_norm;

  Attention() {
    n.rows = n.query_rows = 5;
    n.heads = 4;
    n.kv_heads = 1;
    n.dim = 256;
    n.rotary = 64;
    n.slots = 8500;
    n.stretches = stretch_of(n.slots - 1) + 1;
    n.eps = 1e-6f;
    n.offset = 1.0f;
    n.gated = true;
    n.head_stride = 2 * n.dim;
    n.key_offset = n.heads * n.head_stride;
    n.value_offset = n.key_offset + n.kv_heads * n.dim;
    n.query_stride = n.kv_stride = n.value_offset + n.kv_heads * n.dim;
    proj = random_values(size_t(2 * n.rows) * n.kv_stride, 1.0f);
    key = random_values(size_t(n.kv_heads) * n.slots * n.dim, 1.0f);
    value = random_values(key.size(), 1.0f);
    for (int i = 0; i < n.slots * n.rotary / 2; ++i) {
      const float angle = float(i / 32) * powf(1e-4f, float(i % 32) / 32);
      cos.push_back(cosf(angle));
      sin.push_back(sinf(angle));
    }
    for (int i = 0; i < n.dim; ++i) {
      query_norm.push_back(normal() * 0.3f);
      key_norm.push_back(normal() * 0.3f);
    }
  }
  // Rows from `row` on at their places; the keys and values it leaves are kept.
  std::vector<T> run(bool tensor, int position, int row, std::vector<T>& keys, std::vector<T>& values) {
    const size_t pairs = size_t(n.rows) * n.heads * n.stretches;
    std::vector<float> best(pairs), total(pairs), mixed(pairs * n.dim);
    std::vector<T> y(size_t(n.rows) * n.heads * n.dim);
    const int32_t place = position + row;
    AttendTensors t = {};
    t.query = t.kv = proj.data() + size_t(row) * n.kv_stride;
    t.key = keys.data();
    t.value = values.data();
    t.position = t.query_position = &place;
    t.cos = cos.data();
    t.sin = sin.data();
    t.query_norm = query_norm.data();
    t.key_norm = key_norm.data();
    t.best = best.data();
    t.total = total.data();
    t.mixed = mixed.data();
    t.y = y.data();
    const dim3 grid(unsigned(n.stretches), unsigned(n.kv_heads));
    launch(tensor ? attend_tensor<T, 24, true> : attend<T, 24, true>, grid, ATTEND_THREADS, nullptr, false, t, n,
           KvStorage());
    launch(merge_stretches<T>, dim3(unsigned(n.heads), unsigned(n.rows)), MAX_HEAD, nullptr, false, t, n);
    return y;
  }
  void check(int position) {
    std::vector<T> keys[3] = {key, key, key}, values[3] = {value, value, value};
    const std::vector<T> want = run(false, position, 0, keys[0], values[0]);
    const std::vector<T> got = run(true, position, 0, keys[1], values[1]);
    expect(distance(got, want) < 5e-3, "attention differs", position, 0);
    const size_t width = size_t(n.heads) * n.dim;
    for (int row : {0, 4}) {
      const std::vector<T> alone = run(true, position, row, keys[2], values[2]);
      const bool equal = memcmp(alone.data(), got.data() + row * width, width * sizeof(T)) == 0;
      expect(equal, "a row has other bits alone", position, row);
    }
    const bool same = memcmp(keys[0].data(), keys[1].data(), keys[0].size() * sizeof(T)) == 0;
    expect(same, "the new keys differ", position, 0);
  }
};

// A product of many rows, with the division that its norm left to it.
void check_long_product(int rows) {
  const int depth = 328, out = 40, slots = 3;
  const std::vector<T> x = random_values(size_t(rows) * depth, 1.0f);
  const std::vector<T> w = random_values(size_t(out) * depth, 0.05f);
  std::vector<float> squares(size_t(rows) * slots);
  for (float& square : squares) square = float(depth) * (0.1f + fabsf(normal()));
  Segments s = {{w.data()}, {out}, 1};
  auto run = [&](int first, int count) {
    std::vector<T> y(size_t(count) * out);
    Around around;
    around.squares = squares.data() + size_t(first) * slots;
    around.slots = slots;
    around.eps = 1e-6f;
    launch(count <= 8 ? linear_long<T, 1> : linear_long<T, 2>, dim3((out + 15) / 16), LINEAR_THREADS,
           nullptr, false, x.data() + size_t(first) * depth, s, around, count, depth, out, y.data());
    return y;
  };
  const std::vector<T> got = run(0, rows);
  std::vector<T> want(got.size());
  for (int r = 0; r < rows; ++r) {
    double square = 0;
    for (int i = 0; i < slots; ++i) square += squares[size_t(r) * slots + i];
    for (int n = 0; n < out; ++n) {
      double sum = 0;
      for (int k = 0; k < depth; ++k) {
        sum += double(to_float(x[size_t(r) * depth + k])) * to_float(w[size_t(n) * depth + k]);
      }
      want[size_t(r) * out + n] = to_bf16(float(sum / sqrt(square / depth + 1e-6)));
    }
    const std::vector<T> alone = run(r, 1);
    const bool equal = memcmp(alone.data(), got.data() + size_t(r) * out, out * sizeof(T)) == 0;
    expect(equal, "a row of a long product has other bits alone", rows, r);
  }
  expect(distance(got, want) < 1e-3, "a long product is wrong", rows, 0);
}

// A residual that a product joins and the product behind its norm, in fp16 near the end of its range.
void check_joined_products(int rows) {
  const int depth = 64, hidden = 48, slots = hidden / SLOT, out = 24;
  auto halves = [](size_t count, float scale) {
    std::vector<fp16> values(count);
    for (fp16& v : values) v = to_fp16(normal() * scale);
    return values;
  };
  const std::vector<fp16> x = halves(size_t(rows) * depth, 1.0f), w = halves(size_t(hidden) * depth, 100.0f);
  const std::vector<fp16> h = halves(size_t(rows) * hidden, 9000.0f), v = halves(size_t(out) * hidden, 0.1f);
  const std::vector<float> weight(hidden, 6.0f);
  std::vector<fp16> sum(h.size()), scaled(h.size()), y(size_t(rows) * out);
  std::vector<float> squares(size_t(rows) * slots);
  auto run = [&](const fp16* from, const fp16* matrix, int k, int n, const Around& around, fp16* to) {
    const Segments s = {{matrix}, {n}, 1};
    launch(rows <= 8 ? linear<fp16, 1, 1, false, 8> : linear<fp16, 1, 2, false, 8>, dim3((n + 15) / 16),
           LINEAR_THREADS, nullptr, false, from, s, around, rows, k, n, to);
  };
  Around joins, divides;
  joins.h = h.data();
  joins.weight = weight.data();
  joins.offset = 1.0f;
  joins.sum = sum.data();
  joins.next_squares = squares.data();
  divides.squares = squares.data();
  divides.slots = slots;
  divides.eps = 1e-6f;
  run(x.data(), w.data(), depth, hidden, joins, scaled.data());
  run(scaled.data(), v.data(), hidden, out, divides, y.data());
  double error = 0, size = 0;
  for (int r = 0; r < rows; ++r) {
    std::vector<double> total(hidden);
    double square = 0;
    for (int n = 0; n < hidden; ++n) {
      double delta = 0;
      for (int k = 0; k < depth; ++k) delta += double(to_float(x[r * depth + k])) * to_float(w[n * depth + k]);
      const double exact = to_float(h[r * hidden + n]) + delta;
      total[n] = to_float(sum[r * hidden + n]);
      expect(fabs(total[n] - exact) < 32 + fabs(exact) * 1e-3, "a joined sum is wrong", r, n);
      square += total[n] * total[n];
    }
    for (int n = 0; n < out; ++n) {
      double want = 0;
      for (int k = 0; k < hidden; ++k) want += total[k] * 7 * to_float(v[n * hidden + k]);
      want /= sqrt(square / hidden + 1e-6);
      error += pow(to_float(y[r * out + n]) - want, 2);
      size += want * want;
    }
  }
  expect(sqrt(error / size) < 2e-3, "the product behind a joined norm is wrong", rows, 0);
}

// The delta rule with dims of 128: its two kernels agree, and a fold has the bits of the rows themselves.
struct Delta {
  static constexpr int ROWS = 5, KEYS = 2, HEADS = 4, DIM = MAX_DIM, CHANNELS = (2 * KEYS + HEADS) * DIM;
  DeltaSizes n = {ROWS, KEYS, HEADS, DIM, CHANNELS + HEADS * DIM + 2 * HEADS, 1e-6f};
  std::vector<T> proj = random_values(size_t(ROWS) * n.stride, 1.0f), window, y;
  std::vector<float> S, log_key, log_delta, log_decay, every;
  std::vector<float> conv = random_floats(CHANNELS * CONV), rate = random_floats(HEADS);
  std::vector<float> bias = random_floats(HEADS), norm = random_floats(DIM);
  int32_t kept = 3;

  static std::vector<float> random_floats(size_t count) {
    std::vector<float> values(count);
    for (float& v : values) v = normal() * 0.3f;
    return values;
  }
  Delta() {
    window = random_values(size_t(CHANNELS) * (CONV - 1 + ROWS), 1.0f);
    S = random_floats(size_t(HEADS) * DIM * DIM);
    log_key = random_floats(size_t(ROWS) * KEYS * DIM);
    log_delta = random_floats(size_t(ROWS) * HEADS * DIM);
    log_decay = random_floats(size_t(ROWS) * HEADS);
  }
  Delta after(bool wide) const {
    Delta next = *this;
    next.y.resize(size_t(ROWS) * HEADS * DIM);
    next.every.resize(size_t(ROWS) * HEADS * DIM * DIM);
    DeltaTensors t = {};
    t.proj = proj.data();
    t.window = window.data();
    t.S = S.data();
    t.log_key = log_key.data();
    t.log_delta = log_delta.data();
    t.log_decay = log_decay.data();
    t.kept = &kept;
    t.conv = conv.data();
    t.rate = rate.data();
    t.bias = bias.data();
    t.norm = norm.data();
    t.y = next.y.data();
    t.next_window = next.window.data();
    t.next_S = next.S.data();
    t.next_key = next.log_key.data();
    t.next_delta = next.log_delta.data();
    t.next_decay = next.log_decay.data();
    t.every_S = next.every.data();
    if (wide) launch(gated_delta_wide<T, 1>, dim3(HEADS), SHARES * DIM, nullptr, false, t, n);
    else launch(gated_delta<T, DIM / PARTS>, dim3(HEADS), DELTA_THREADS, nullptr, false, t, n);
    return next;
  }
  void check() const {
    const Delta want = after(false), got = after(true), next = got.after(true);
    expect(distance(got.y, want.y) < 5e-3, "the wide delta rule differs", 0, 0);
    expect(distance(got.every, want.every) < 1e-5, "its states differ", 0, 0);
    expect(distance(got.S, want.S) < 1e-6, "its fold differs", 0, 0);
    expect(distance(got.log_key, want.log_key) < 1e-5, "its keys differ", 0, 0);
    expect(distance(got.log_delta, want.log_delta) < 1e-5, "its deltas differ", 0, 0);
    expect(distance(got.log_decay, want.log_decay) < 1e-5, "its decays differ", 0, 0);
    expect(distance(got.window, want.window) == 0, "its window differs", 0, 0);
    const float* rows = got.every.data() + size_t(kept - 1) * HEADS * DIM * DIM;
    const bool same = memcmp(next.S.data(), rows, next.S.size() * sizeof(float)) == 0;
    expect(same, "a fold has other bits than the rows", kept, 0);
  }
};

// A cache in q8_0 or q5_1 with random bits, and the values that they stand for.
struct Quantised {
  std::vector<uint8_t> bytes;  // codes or nibbles
  std::vector<uint8_t> high;
  std::vector<fp16> scale, least;
  std::vector<T> values;
  KvPlanes planes = {};

  Quantised(KvKind kind, size_t rows, int dim) {
    const bool wide = kind == KV_Q8_0;
    std::uniform_int_distribution<int> byte(0, 255);
    for (size_t i = 0; i < rows * dim / (wide ? 1 : 2); ++i) bytes.push_back(uint8_t(byte(generator)));
    for (size_t i = 0; i < rows * dim / 8; ++i) high.push_back(uint8_t(byte(generator)));
    for (size_t i = 0; i < rows * dim / 32; ++i) {
      scale.push_back(to_fp16(fabsf(normal()) * (wide ? 0.01f : 0.05f)));
      least.push_back(to_fp16(-fabsf(normal())));
    }
    for (size_t i = 0; i < rows * dim; ++i) {
      const size_t block = i / 32, j = i % 32;
      float code = float(int8_t(bytes[wide ? i : 0]));
      if (!wide) {
        const int nibble = bytes[block * 16 + j % 16] / (j < 16 ? 1 : 16) % 16;
        code = float(nibble + high[i / 8] / (1 << i % 8) % 2 * 16);
      }
      values.push_back(to_bf16(code * to_float(scale[block]) + (wide ? 0.0f : to_float(least[block]))));
    }
    planes.kind = kind;
    planes.more[0] = wide ? static_cast<void*>(scale.data()) : high.data();
    planes.more[1] = scale.data();
    planes.more[2] = least.data();
  }
};

// Queries that do not reach the new rows, so that both see the same keys and values.
std::vector<T> behind(const Attention& a, int asked, Quantised& key, Quantised& value, bool own, bool tensor) {
  const AttendSizes& n = a.n;
  const size_t pairs = size_t(n.rows) * n.heads * n.stretches;
  std::vector<float> best(pairs), total(pairs), mixed(pairs * n.dim);
  std::vector<T> y(size_t(n.rows) * n.heads * n.dim), keys = key.values, values = value.values;
  const int32_t place = n.slots - n.rows, query_place = asked;
  AttendTensors t = {};
  t.query = t.kv = a.proj.data();
  t.key = own ? static_cast<void*>(keys.data()) : key.bytes.data();
  t.value = own ? static_cast<void*>(values.data()) : value.bytes.data();
  t.position = &place;
  t.query_position = &query_place;
  t.cos = a.cos.data();
  t.sin = a.sin.data();
  t.query_norm = a.query_norm.data();
  t.key_norm = a.key_norm.data();
  t.best = best.data();
  t.total = total.data();
  t.mixed = mixed.data();
  t.y = y.data();
  const dim3 grid(unsigned(n.stretches), unsigned(n.kv_heads));
  auto kernel = tensor ? (own ? attend_tensor<T, 24, true> : attend_tensor<T, 24, false>)
                       : (own ? attend<T, 24, true> : attend<T, 24, false>);
  launch(kernel, grid, ATTEND_THREADS, nullptr, false, t, n, KvStorage{key.planes, value.planes});
  launch(merge_stretches<T>, dim3(unsigned(n.heads), unsigned(n.rows)), MAX_HEAD, nullptr, false, t, n);
  return y;
}

void check_quantised(const Attention& attention) {
  const size_t rows = size_t(attention.n.kv_heads) * attention.n.slots;
  Quantised key(KV_Q8_0, rows, attention.n.dim);
  for (KvKind kind : {KV_Q8_0, KV_Q5_1}) {
    Quantised value(kind, rows, attention.n.dim);
    for (int asked : {29, 4094}) {
      for (bool tensor : {false, true}) {
        if (!tensor && asked > 1000) continue;  // slow
        const std::vector<T> want = behind(attention, asked, key, value, true, tensor);
        const std::vector<T> got = behind(attention, asked, key, value, false, tensor);
        const bool equal = memcmp(got.data(), want.data(), want.size() * sizeof(T)) == 0;
        expect(equal, "quantised rows give other bits than their values", asked, kind * 2 + tensor);
      }
    }
  }
}

int main() {
  for (int rows : {5, 9}) check_long_product(rows);
  for (int rows : {5, 9}) check_joined_products(rows);
  Delta().check();
  Attention attention;
  for (int position : {29, 1085, 4094, 8190}) attention.check(position);
  check_quantised(attention);
  return failures != 0;
}
