// Tensor-core attention against its simpler sibling, on fibres: over every size of stretch, row by row
// as well. Prints what is wrong.
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
double distance(const std::vector<T>& got, const std::vector<T>& want) {
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
    launch(tensor ? attend_tensor<T, 24> : attend<T, 24>, grid, ATTEND_THREADS, nullptr, false, t, n);
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

int main() {
  Attention attention;
  for (int position : {29, 1085, 4094, 8190}) attention.check(position);
  return failures != 0;
}
