// The kernels of the `ort-fused` profile. R rows of a call (at most MAX_ROWS), one sequence.
//
// Every row is computed by the same operations in the same order wherever it stands in the call and
// whatever the other rows hold, so a verified row has the bits of a plainly decoded one.
#pragma once
#include "device.h"

constexpr int MAX_ROWS = 9;
constexpr int MAX_SEGMENTS = 4;

DEVICE float sum_of_warp(float x) {
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
DEVICE float max_of_warp(float x) {
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}
// Eight neighbouring values, from an address that is a multiple of 16 bytes.
template <class T>
DEVICE void load_eight(const T* from, float (&to)[8]) {
  union {
    uint4 words[sizeof(T) / 2];
    T values[8];
  } held;
  UNROLL
  for (size_t i = 0; i < sizeof(T) / 2; ++i) held.words[i] = reinterpret_cast<const uint4*>(from)[i];
  UNROLL
  for (int i = 0; i < 8; ++i) to[i] = to_float(held.values[i]);
}
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---------------------------------------------------------------------------------------------
// Residual sum and RMSNorm: sum = h + delta, x = sum / rms(sum) * weight. One block a row.

constexpr int NORM_THREADS = 1024;
constexpr int NORM_VALUES = 8;  // kept in registers: hidden sizes up to 8192

template <class T>
KERNEL(NORM_THREADS, 1)
add_norm(const T* h, const T* delta, const float* weight, float offset, float eps, int n, T* sum, T* x) {
  SHARED float partial[NORM_THREADS / 32];
  wait_for_inputs();
  let_next_start();
  const int64_t row = int64_t(blockIdx.x) * n;
  const int threads = int(blockDim.x), t = int(threadIdx.x);
  float values[NORM_VALUES], square = 0.0f;
  UNROLL
  for (int j = 0; j < NORM_VALUES; ++j) {
    const int i = t + j * threads;
    values[j] = 0.0f;
    if (i < n) {
      float v = to_float(h[row + i]);
      if (delta != nullptr) {
        v = rounded<T>(v + to_float(delta[row + i]));
        put(sum[row + i], v);
      }
      values[j] = v;
      square = fused(v, v, square);
    }
  }
  square = sum_of_warp(square);
  if (t % 32 == 0) partial[t / 32] = square;
  sync_block();
  float total = 0.0f;
  for (int w = 0; w < threads / 32; ++w) total += partial[w];
  const float scale = 1.0f / sqrtf(total / float(n) + eps);
  UNROLL
  for (int j = 0; j < NORM_VALUES; ++j) {
    const int i = t + j * threads;
    if (i < n) put(x[row + i], values[j] * scale * (weight[i] + offset));
  }
}

// ---------------------------------------------------------------------------------------------
// y[R, N] = x[R, K] w[N, K]^T for a few rows: one pass over the weights as the checkpoint holds them.
//
// A block takes 16 * TILES rows of w, its 8 warps an eighth of K each. A lane reads 16 bytes of a row;
// which k such a lane holds is the same for w and x, so the tensor core sums over a permuted k. The
// eight partial sums are added in one fixed order.

constexpr int LINEAR_THREADS = 256;
constexpr int LINEAR_WARPS = LINEAR_THREADS / 32;

struct Segments {  // matrices that share x; their rows stand one after the other in y
  const void* weight[MAX_SEGMENTS];
  int rows[MAX_SEGMENTS];
  int count;
};

// TILES 16-row tiles a block; GATED: tile 0 is of segment 0, tile 1 of segment 1, y = silu(0) * 1.
template <class T, int TILES, int COLUMNS, bool GATED, int AHEAD>
KERNEL(LINEAR_THREADS, 2)
linear(const T* x, Segments segments, int rows, int depth, int out, T* y) {
  SHARED float partial[LINEAR_WARPS][TILES][COLUMNS][128];
  const int t = int(threadIdx.x), warp = t / 32, lane = t % 32, group = lane / 4, quad = lane % 4;

  // Which rows of which matrix.
  int unit = int(blockIdx.x), segment = 0, first = 0;
  const int step = GATED ? 16 : 16 * TILES;
  if (!GATED) {
    while (segment + 1 < segments.count) {
      const int units = (segments.rows[segment] + step - 1) / step;
      if (unit < units) break;
      unit -= units;
      first += segments.rows[segment];
      ++segment;
    }
  }
  const T* weights[TILES][2];
  UNROLL
  for (int tile = 0; tile < TILES; ++tile) {
    const int from = GATED ? tile : segment;
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = unit * step + (GATED ? 0 : tile * 16) + half * 8 + group;
      weights[tile][half] = row < segments.rows[from]
                                ? static_cast<const T*>(segments.weight[from]) + int64_t(row) * depth
                                : nullptr;
    }
  }

  const int steps = (depth + 31) / 32, share = (steps + LINEAR_WARPS - 1) / LINEAR_WARPS;
  const int begin = warp * share, end = begin + share < steps ? begin + share : steps;
  const uint4 zero = {0, 0, 0, 0};
  float sums[TILES][COLUMNS][4] = {};
  uint4 a[AHEAD][TILES][2], b[COLUMNS];

  for (int s = begin; s < end; s += AHEAD) {
    UNROLL
    for (int u = 0; u < AHEAD; ++u) {
      const int k = (s + u) * 32 + quad * 8;
      const bool inside = s + u < end && k < depth;
      UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
          const T* w = weights[tile][half];
          a[u][tile][half] = inside && w != nullptr ? load_once(w + k) : zero;
        }
      }
    }
    if (s == begin) {  // the weights do not depend on the kernel before this one
      wait_for_inputs();
      let_next_start();
    }
    UNROLL
    for (int u = 0; u < AHEAD; ++u) {
      const int k = (s + u) * 32 + quad * 8;
      const bool inside = s + u < end && k < depth;
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) {
        const int row = c * 8 + group;
        b[c] = inside && row < rows
                   ? *reinterpret_cast<const uint4*>(x + int64_t(row) * depth + k)
                   : zero;
      }
      UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 low = a[u][tile][0], high = a[u][tile][1];
        const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
        const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
          const uint32_t b0[2] = {b[c].x, b[c].y}, b1[2] = {b[c].z, b[c].w};
          multiply(sums[tile][c], a0, b0, T{});
          multiply(sums[tile][c], a1, b1, T{});
        }
      }
    }
  }
  if (begin >= end) {
    wait_for_inputs();
    let_next_start();
  }
  UNROLL
  for (int tile = 0; tile < TILES; ++tile) {
    UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLL
      for (int i = 0; i < 4; ++i) partial[warp][tile][c][lane * 4 + i] = sums[tile][c][i];
    }
  }
  sync_block();

  // Output (row of x, row of w): neighbouring threads write neighbouring columns of y.
  constexpr int OUTPUTS = (GATED ? 1 : TILES) * 16 * COLUMNS * 8;
  for (int o = t; o < OUTPUTS; o += LINEAR_THREADS) {
    const int n = o % (GATED ? 16 : 16 * TILES), row = o / (GATED ? 16 : 16 * TILES);
    const int c = row / 8, column = row % 8, tile = n / 16, r = n % 16;
    const int slot = (r % 8 * 4 + column / 2) * 4 + r / 8 * 2 + column % 2;
    const int target = unit * step + n;
    if (row >= rows || target >= segments.rows[segment]) continue;
    float value = 0.0f;
    UNROLL
    for (int w = 0; w < LINEAR_WARPS; ++w) value += partial[w][tile][c][slot];
    if (GATED) {
      float up = 0.0f;
      UNROLL
      for (int w = 0; w < LINEAR_WARPS; ++w) up += partial[w][TILES - 1][c][slot];
      value = value * sigmoid(value) * up;
    }
    put(y[int64_t(row) * out + first + target], value);
  }
}

// The same in fp32, without tensor cores: one warp a row of w.
template <bool GATED>
KERNEL(LINEAR_THREADS, 1)
linear_fp32(const float* x, Segments segments, int rows, int depth, int out, float* y) {
  wait_for_inputs();
  let_next_start();
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int target = int(blockIdx.x) * LINEAR_WARPS + warp;
  int segment = 0, row = target;
  while (!GATED && segment + 1 < segments.count && row >= segments.rows[segment]) {
    row -= segments.rows[segment++];
  }
  const bool inside = row < segments.rows[segment];
  float sums[2][MAX_ROWS] = {};
  UNROLL
  for (int m = 0; m < (GATED ? 2 : 1); ++m) {
    const float* w = static_cast<const float*>(segments.weight[segment + m]) + int64_t(row) * depth;
    for (int k = lane; inside && k < depth; k += 32) {
      UNROLL
      for (int r = 0; r < MAX_ROWS; ++r) {
        if (r < rows) sums[m][r] = fused(w[k], x[int64_t(r) * depth + k], sums[m][r]);
      }
    }
  }
  UNROLL
  for (int r = 0; r < MAX_ROWS; ++r) {
    if (r >= rows) continue;
    float value = sum_of_warp(sums[0][r]);
    if (GATED) value = value * sigmoid(value) * sum_of_warp(sums[1][r]);
    if (lane == 0 && inside) y[int64_t(r) * out + target] = value;
  }
}

// ---------------------------------------------------------------------------------------------
// Gated DeltaNet: convolution, gates, fold of the last call's kept rows, delta rule, gated norm.
// One block a value head, `columns` threads for each of PARTS stretches of the key dim.

constexpr int PARTS = 4;
constexpr int MAX_DIM = 128;
constexpr int DELTA_THREADS = PARTS * MAX_DIM;
constexpr int CONV = 4;  // taps

struct DeltaSizes {
  int rows, key_heads, value_heads, value_dim, stride;  // stride: of a row of proj
  float eps;
};
struct DeltaTensors {  // `proj` holds u (q, k, v channels), z, b, a of every row
  const void *proj, *window;
  const float *S, *log_key, *log_delta, *log_decay;
  const int32_t* kept;
  const float *conv, *rate, *bias, *norm;
  void *y, *next_window;
  float *next_S, *next_key, *next_delta, *next_decay, *every_S;
};

template <class T, int DEPTH>  // DEPTH: entries of the key dim that one thread holds
KERNEL(DELTA_THREADS, 1)
gated_delta(DeltaTensors t, DeltaSizes n) {
  SHARED_WIDE float query[MAX_ROWS][MAX_DIM], key[MAX_ROWS][MAX_DIM];
  SHARED float value[MAX_ROWS][MAX_DIM], recalled[2][PARTS][MAX_DIM];
  SHARED float output[MAX_ROWS][PARTS][MAX_DIM], decay[MAX_ROWS], beta[MAX_ROWS];
  const int threads = int(blockDim.x), thread = int(threadIdx.x), lane = thread % 32;
  const int warp = thread / 32, warps = threads / 32;
  const int head = int(blockIdx.x), group = n.value_heads / n.key_heads, key_head = head / group;
  const bool leads = head % group == 0;  // writes what the heads of a group share
  constexpr int dk = DEPTH * PARTS;
  const int dv = n.value_dim, rows = n.rows;
  const int keys = n.key_heads * dk, channels = 2 * keys + n.value_heads * dv;

  // S as it was stored does not depend on the kernel before: fetch it first.
  const int column = thread % dv, part = thread / dv, k0 = part * DEPTH;
  const bool holds = part < PARTS;
  const int64_t base = (int64_t(head) * dk + k0) * dv + column;
  float S[DEPTH];
  UNROLL
  for (int j = 0; j < DEPTH; ++j) S[j] = holds ? t.S[base + int64_t(j) * dv] : 0.0f;
  wait_for_inputs();
  let_next_start();
  int kept = t.kept[0];
  kept = kept < 0 ? 0 : kept > rows ? rows : kept;

  // Convolution and silu, one channel a thread.
  const T* proj = static_cast<const T*>(t.proj);
  const T* window = static_cast<const T*>(t.window);
  T* next_window = static_cast<T*>(t.next_window);
  constexpr int history = CONV - 1;
  const int wide = history + rows;
  for (int i = thread; i < 2 * dk + dv; i += threads) {
    const bool is_value = i >= 2 * dk, is_key = !is_value && i >= dk;
    const int within = is_value ? i - 2 * dk : is_key ? i - dk : i;
    const int c = is_value  ? 2 * keys + head * dv + within
                  : is_key ? keys + key_head * dk + within
                           : key_head * dk + within;
    float seen[CONV], taps[CONV];  // seen: the last raw values, then the row at hand
    UNROLL
    for (int j = 0; j < CONV; ++j) taps[j] = t.conv[int64_t(c) * CONV + j];
    UNROLL
    for (int j = 0; j < history; ++j) {
      const T raw = window[int64_t(c) * wide + kept + j];
      seen[j] = to_float(raw);
      if (is_value || leads) next_window[int64_t(c) * wide + j] = raw;
    }
    for (int r = 0; r < rows; ++r) {
      const T raw = proj[int64_t(r) * n.stride + c];
      seen[history] = to_float(raw);
      if (is_value || leads) next_window[int64_t(c) * wide + history + r] = raw;
      float total = 0.0f;
      UNROLL
      for (int j = 0; j < CONV; ++j) total = fused(taps[j], seen[j], total);
      total = rounded<T>(total);
      total = rounded<T>(total * sigmoid(total));
      if (is_value) value[r][within] = total;
      else if (is_key) key[r][within] = total;
      else query[r][within] = total;
      UNROLL
      for (int j = 0; j < history; ++j) seen[j] = seen[j + 1];
    }
  }
  if (thread < rows) {
    const T* gates = proj + int64_t(thread) * n.stride + channels + n.value_heads * dv;
    const float a = to_float(gates[n.value_heads + head]) + t.bias[head];
    const float softplus = a > 20.0f ? a : log1pf(expf(a));
    decay[thread] = expf(-expf(t.rate[head]) * softplus);
    beta[thread] = sigmoid(to_float(gates[head]));
    t.next_decay[thread * n.value_heads + head] = decay[thread];
  }
  sync_block();

  // Unit queries and keys, one warp a vector.
  for (int i = warp; i < 2 * rows; i += warps) {
    float* vector = i < rows ? query[i] : key[i - rows];
    float square = 0.0f;
    for (int d = lane; d < dk; d += 32) square = fused(vector[d], vector[d], square);
    square = sum_of_warp(square);
    const float length = sqrtf(square + 1e-6f), scale = i < rows ? 1.0f / sqrtf(float(dk)) : 1.0f;
    for (int d = lane; d < dk; d += 32) {
      vector[d] = vector[d] / length * scale;
      if (i >= rows && leads) {
        t.next_key[(int64_t(i - rows) * n.key_heads + key_head) * dk + d] = vector[d];
      }
    }
  }

  // The rows of the last call that were kept. The two operations on S are those of the rule below.
  for (int r = 0; r < kept; ++r) {
    if (!holds) break;
    const float fade = t.log_decay[r * n.value_heads + head];
    const float delta = t.log_delta[(int64_t(r) * n.value_heads + head) * dv + column];
    const float* row = t.log_key + (int64_t(r) * n.key_heads + key_head) * dk + k0;
    UNROLL
    for (int j = 0; j < DEPTH; j += 4) {
      const float4 k = *reinterpret_cast<const float4*>(row + j);
      S[j] = fused(k.x, delta, product(S[j], fade));
      S[j + 1] = fused(k.y, delta, product(S[j + 1], fade));
      S[j + 2] = fused(k.z, delta, product(S[j + 2], fade));
      S[j + 3] = fused(k.w, delta, product(S[j + 3], fade));
    }
  }
  UNROLL
  for (int j = 0; j < DEPTH; ++j) {
    if (holds) t.next_S[base + int64_t(j) * dv] = S[j];
  }
  sync_block();

  for (int r = 0; r < rows; ++r) {
    const float fade = decay[r];
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (holds) {
      UNROLL
      for (int j = 0; j < DEPTH; j += 4) {
        const float4 k = *reinterpret_cast<const float4*>(&key[r][k0 + j]);
        sums[0] = fused(S[j] = product(S[j], fade), k.x, sums[0]);
        sums[1] = fused(S[j + 1] = product(S[j + 1], fade), k.y, sums[1]);
        sums[2] = fused(S[j + 2] = product(S[j + 2], fade), k.z, sums[2]);
        sums[3] = fused(S[j + 3] = product(S[j + 3], fade), k.w, sums[3]);
      }
      recalled[r % 2][part][column] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    sync_block();
    if (!holds) continue;
    float total = 0.0f;
    UNROLL
    for (int p = 0; p < PARTS; ++p) total += recalled[r % 2][p][column];
    const float delta = beta[r] * (value[r][column] - total);
    UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    UNROLL
    for (int j = 0; j < DEPTH; j += 4) {
      const float4 k = *reinterpret_cast<const float4*>(&key[r][k0 + j]);
      const float4 q = *reinterpret_cast<const float4*>(&query[r][k0 + j]);
      sums[0] = fused(S[j] = fused(k.x, delta, S[j]), q.x, sums[0]);
      sums[1] = fused(S[j + 1] = fused(k.y, delta, S[j + 1]), q.y, sums[1]);
      sums[2] = fused(S[j + 2] = fused(k.z, delta, S[j + 2]), q.z, sums[2]);
      sums[3] = fused(S[j + 3] = fused(k.w, delta, S[j + 3]), q.w, sums[3]);
    }
    output[r][part][column] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (part == 0) t.next_delta[(int64_t(r) * n.value_heads + head) * dv + column] = delta;
    if (t.every_S != nullptr) {
      UNROLL
      for (int j = 0; j < DEPTH; ++j) {
        t.every_S[int64_t(r) * n.value_heads * dk * dv + base + int64_t(j) * dv] = S[j];
      }
    }
  }
  sync_block();

  // RMSNorm over the head's outputs, times silu(z); one warp a row.
  T* y = static_cast<T*>(t.y);
  for (int r = warp; r < rows; r += warps) {
    float mixed[MAX_DIM / 32], square = 0.0f;
    UNROLL
    for (int j = 0; j < MAX_DIM / 32; ++j) {
      const int d = lane + j * 32;
      mixed[j] = 0.0f;
      if (d < dv) {
        for (int p = 0; p < PARTS; ++p) mixed[j] += output[r][p][d];
        square = fused(mixed[j], mixed[j], square);
      }
    }
    const float scale = 1.0f / sqrtf(sum_of_warp(square) / float(dv) + n.eps);
    UNROLL
    for (int j = 0; j < MAX_DIM / 32; ++j) {
      const int d = lane + j * 32;
      if (d >= dv) continue;
      const float z = to_float(proj[int64_t(r) * n.stride + channels + head * dv + d]);
      put(y[(int64_t(r) * n.value_heads + head) * dv + d],
          mixed[j] * scale * t.norm[d] * (z * sigmoid(z)));
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Grouped attention over a KV cache written in place: norms and rotary of q and k, the new KV rows,
// scores, softmax, gate. Keys are cut into stretches at fixed positions, one block each, whose
// results are then merged in order: the sums of a row do not depend on how far the call reaches.

constexpr int ATTEND_THREADS = 256;
constexpr int TILE = 32;  // slots taken at a time
constexpr int MAX_HEAD = 256;

struct AttendSizes {
  int rows, query_rows, heads, kv_heads, dim, rotary, slots, stretch, stretches;
  int query_stride, head_stride, kv_stride, key_offset, value_offset;
  float eps, offset;  // of the q and k norms
  bool gated;
};
struct AttendTensors {
  const void *query, *kv;
  void *key, *value;  // caches [kv_heads, slots, dim]
  const int32_t *position, *query_position;
  const float *cos, *sin;  // [slots, rotary / 2]
  const float *query_norm, *key_norm;  // null: none
  float *best, *total, *mixed;  // [query rows, heads, stretches(, dim)]
  void* y;
};

// Norm and rotary of one head of one row into `to`, by one warp.
template <class T>
DEVICE void turned_head(const T* from, const float* norm, const AttendTensors& t, const AttendSizes& n,
                        int position, float* to, float scale) {
  const int lane = int(threadIdx.x) % 32, half = n.rotary / 2;
  float square = 0.0f;
  for (int d = lane; d < n.dim; d += 32) {
    const float v = to_float(from[d]);
    square = fused(v, v, square);
  }
  float length = 1.0f;
  if (norm != nullptr) length = 1.0f / sqrtf(sum_of_warp(square) / float(n.dim) + n.eps);
  for (int d = lane; d < n.dim; d += 32) {
    const float weight = norm != nullptr ? norm[d] + n.offset : 1.0f;
    to[d] = to_float(from[d]) * length * weight;
  }
  sync_warp();
  const float* cos = t.cos + int64_t(position) * half;
  const float* sin = t.sin + int64_t(position) * half;
  for (int d = lane; d < half; d += 32) {
    const float a = to[d], b = to[d + half];
    to[d] = a * cos[d] - b * sin[d];
    to[d + half] = b * cos[d] + a * sin[d];
  }
  sync_warp();
  for (int d = lane; d < n.dim; d += 32) to[d] *= scale;
}

template <class T, int QUERIES>  // QUERIES: most (row, head) pairs of one kv head, 8 or more
KERNEL(ATTEND_THREADS, 1)
attend(AttendTensors t, AttendSizes n) {
  SHARED_WIDE float query[QUERIES][MAX_HEAD];
  SHARED_WIDE float scores[TILE][QUERIES + 4];  // padded against bank conflicts
  SHARED float best[QUERIES], total[QUERIES], fade[QUERIES];
  constexpr int CHUNKS = MAX_HEAD / 64;
  wait_for_inputs();
  let_next_start();
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  constexpr int WARPS = ATTEND_THREADS / 32;
  const int kv_head = int(blockIdx.y), group = n.heads / n.kv_heads, queries = n.query_rows * group;
  const int start = int(blockIdx.x) * n.stretch;
  const int stop = start + n.stretch < n.slots ? start + n.stretch : n.slots;
  const int position = t.position[0], asked = t.query_position[0];
  T* key = static_cast<T*>(t.key) + int64_t(kv_head) * n.slots * n.dim;
  T* value = static_cast<T*>(t.value) + int64_t(kv_head) * n.slots * n.dim;

  // The new rows that stand in this stretch, turned in what will hold the queries.
  for (int r = warp; r < n.rows; r += WARPS) {
    const int slot = position + r;
    if (slot < start || slot >= stop) continue;
    const T* from = static_cast<const T*>(t.kv) + int64_t(r) * n.kv_stride + kv_head * n.dim;
    turned_head(from + n.key_offset, t.key_norm, t, n, slot, query[warp], 1.0f);
    for (int d = lane; d < n.dim; d += 32) {
      put(key[int64_t(slot) * n.dim + d], query[warp][d]);
      value[int64_t(slot) * n.dim + d] = from[n.value_offset + d];
    }
  }
  if (start > asked + n.query_rows - 1) return;  // the whole block: nobody asks for this stretch
  sync_block();
  for (int i = warp; i < queries; i += WARPS) {
    const int row = i / group, head = kv_head * group + i % group;
    const T* from = static_cast<const T*>(t.query) + int64_t(row) * n.query_stride +
                    int64_t(head) * n.head_stride;
    turned_head(from, t.query_norm, t, n, asked + row, query[i], 1.0f / sqrtf(float(n.dim)));
  }
  for (int i = thread; i < queries; i += ATTEND_THREADS) {
    best[i] = -INFINITY;
    total[i] = 0.0f;
  }
  sync_block();

  float mixed[QUERIES];
  UNROLL
  for (int i = 0; i < QUERIES; ++i) mixed[i] = 0.0f;
  const int last = asked + n.query_rows < stop ? asked + n.query_rows : stop;
  for (int tile = start; tile < last; tile += TILE) {
    // Scores: a warp takes four slots, eight lanes each, which share the dims.
    const int j = warp * 4 + lane / 8, share = lane % 8, slot = tile + j;
    float keys[CHUNKS][8];
    UNROLL
    for (int c = 0; c < CHUNKS; ++c) {
      const int d = c * 64 + share * 8;
      UNROLL
      for (int e = 0; e < 8; ++e) keys[c][e] = 0.0f;
      if (slot < last && d < n.dim) load_eight(key + int64_t(slot) * n.dim + d, keys[c]);
    }
    for (int i = 0; i < queries; ++i) {
      float score = 0.0f;
      UNROLL
      for (int c = 0; c < CHUNKS; ++c) {
        const int d = c * 64 + share * 8;
        if (d < n.dim) {
          float q[8];
          load_eight(&query[i][d], q);
          UNROLL
          for (int e = 0; e < 8; ++e) score = fused(keys[c][e], q[e], score);
        }
      }
      UNROLL
      for (int mask = 4; mask > 0; mask /= 2) score += shuffle_xor(score, mask);
      if (share == 0) scores[j][i] = slot <= asked + i / group ? score : -INFINITY;
    }
    sync_block();
    for (int i = warp; i < queries; i += WARPS) {
      const float score = scores[lane][i];
      const float top = fmaxf(best[i], max_of_warp(score));
      const float weight = score == -INFINITY ? 0.0f : expf(score - top);
      const float sum = sum_of_warp(weight);
      scores[lane][i] = weight;
      sync_warp();
      if (lane == 0) {
        fade[i] = best[i] == -INFINITY ? 0.0f : expf(best[i] - top);
        total[i] = total[i] * fade[i] + sum;
        best[i] = top;
      }
    }
    sync_block();
    if (thread < n.dim) {
      UNROLL
      for (int i = 0; i < QUERIES; ++i) {
        if (i < queries) mixed[i] *= fade[i];
      }
      const int many = last - tile < TILE ? last - tile : TILE;
      for (int s = 0; s < many; ++s) {
        const float v = to_float(value[int64_t(tile + s) * n.dim + thread]);
        UNROLL
        for (int i = 0; i < QUERIES; i += 4) {
          const float4 weight = *reinterpret_cast<const float4*>(&scores[s][i]);
          mixed[i] = fused(weight.x, v, mixed[i]);
          mixed[i + 1] = fused(weight.y, v, mixed[i + 1]);
          mixed[i + 2] = fused(weight.z, v, mixed[i + 2]);
          mixed[i + 3] = fused(weight.w, v, mixed[i + 3]);
        }
      }
    }
    sync_block();
  }
  UNROLL
  for (int i = 0; i < QUERIES; ++i) {
    if (i < queries && thread < n.dim) {
      const int row = i / group, head = kv_head * group + i % group;
      const int64_t place = (int64_t(row) * n.heads + head) * n.stretches + blockIdx.x;
      t.mixed[place * n.dim + thread] = mixed[i];
      if (thread == 0) {
        t.best[place] = best[i];
        t.total[place] = total[i];
      }
    }
  }
}

template <class T>
KERNEL(MAX_HEAD, 1)
merge_stretches(AttendTensors t, AttendSizes n) {
  wait_for_inputs();
  let_next_start();
  const int d = int(threadIdx.x), head = int(blockIdx.x), row = int(blockIdx.y);
  if (d >= n.dim) return;
  const int used = (t.query_position[0] + row) / n.stretch + 1;
  const int64_t place = (int64_t(row) * n.heads + head) * n.stretches;
  float top = -INFINITY, sum = 0.0f, mixed = 0.0f;
  for (int s = 0; s < used; ++s) top = fmaxf(top, t.best[place + s]);
  for (int s = 0; s < used; ++s) {
    const float weight = expf(t.best[place + s] - top);
    sum = fused(t.total[place + s], weight, sum);
    mixed = fused(t.mixed[(place + s) * n.dim + d], weight, mixed);
  }
  mixed /= sum;
  if (n.gated) {
    const T* gate = static_cast<const T*>(t.query) + int64_t(row) * n.query_stride +
                    int64_t(head) * n.head_stride + n.dim;
    mixed *= sigmoid(to_float(gate[d]));
  }
  put(static_cast<T*>(t.y)[(int64_t(row) * n.heads + head) * n.dim + d], mixed);
}

// ---------------------------------------------------------------------------------------------
// Greedy choice per row (-1 where a logit is not finite; of equals the lowest id), and the accepted count.

constexpr int PICK_THREADS = 256;
constexpr int PICK_BLOCKS = 64;  // stretches of the vocabulary

DEVICE void better(float& best, int& id, float other, int other_id) {
  if (other > best || (other == best && other_id < id)) {
    best = other;
    id = other_id;
  }
}

template <class T>
KERNEL(PICK_THREADS, 1)
pick_stretch(const T* logits, int vocabulary, float* best, int32_t* ids) {
  SHARED float tops[PICK_THREADS / 32];
  SHARED int places[PICK_THREADS / 32];
  wait_for_inputs();
  let_next_start();
  const int thread = int(threadIdx.x), row = int(blockIdx.y);
  const int share = (vocabulary + PICK_BLOCKS - 1) / PICK_BLOCKS, start = int(blockIdx.x) * share;
  const int stop = start + share < vocabulary ? start + share : vocabulary;
  float top = -INFINITY;
  int id = 0x7fffffff, broken = 0;
  for (int i = start + thread; i < stop; i += PICK_THREADS) {
    const float x = to_float(logits[int64_t(row) * vocabulary + i]);
    if (!(fabsf(x) < INFINITY)) broken = 1;
    better(top, id, x, i);
  }
  if (broken) {  // beats everything, and stays
    top = INFINITY;
    id = -1;
  }
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(top, mask);
    const int other_id = shuffle_xor(id, mask);
    better(top, id, other, other_id);
  }
  if (thread % 32 == 0) {
    tops[thread / 32] = top;
    places[thread / 32] = id;
  }
  sync_block();
  if (thread == 0) {
    for (int w = 1; w < PICK_THREADS / 32; ++w) better(top, id, tops[w], places[w]);
    best[row * PICK_BLOCKS + blockIdx.x] = top;
    ids[row * PICK_BLOCKS + blockIdx.x] = id;
  }
}

struct Verdict {  // all but `next_ids` may be null
  const int32_t *ids, *position, *rows;
  int32_t *next_ids, *accepted, *pending, *next_kept, *next_position;
};

KERNEL(MAX_ROWS * 32, 1)
pick(const float* best, const int32_t* places, Verdict v, int rows) {
  SHARED int chosen[MAX_ROWS];
  wait_for_inputs();
  let_next_start();
  const int row = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float top = -INFINITY;
  int id = 0x7fffffff;
  for (int i = lane; i < PICK_BLOCKS; i += 32) {
    better(top, id, best[row * PICK_BLOCKS + i], places[row * PICK_BLOCKS + i]);
  }
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(top, mask);
    const int other_id = shuffle_xor(id, mask);
    better(top, id, other, other_id);
  }
  if (lane == 0) {
    chosen[row] = id;
    v.next_ids[row] = id;
  }
  sync_block();
  if (threadIdx.x != 0 || v.ids == nullptr) return;
  int accepted = 0;
  while (accepted + 1 < rows && accepted + 1 < v.rows[0] && v.ids[accepted + 1] >= 0 &&
         v.ids[accepted + 1] == chosen[accepted]) {
    ++accepted;
  }
  v.accepted[0] = accepted;
  v.pending[0] = chosen[accepted];
  v.next_kept[0] = accepted + 1;
  v.next_position[0] = v.position[0] + accepted + 1;
}
