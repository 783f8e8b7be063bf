// The kernels of the `ort-fused` profile. R rows of a call (at most MAX_ROWS), one sequence.
//
// Every row is computed by the same operations in the same order wherever it stands in the call and
// whatever the other rows hold, so a verified row has the bits of a plainly decoded one.
#pragma once
#include "kv_rows.h"

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
DEVICE uint32_t word_of(const uint4& x, int i) {  // i: known at compile time
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---------------------------------------------------------------------------------------------
// Residual sum and RMSNorm: sum = h + delta, x = sum / rms(sum) * weight. One block a row, eight
// neighbouring values a thread.

constexpr int NORM_THREADS = 1024;  // hidden sizes up to 8192

template <class T>
KERNEL(NORM_THREADS, 1)
add_norm(const T* h, const T* delta, const float* weight, float offset, float eps, int n, T* sum, T* x) {
  SHARED float partial[NORM_THREADS / 32];
  const int threads = int(blockDim.x), t = int(threadIdx.x), i = t * 8;
  const int64_t place = int64_t(blockIdx.x) * n + i;
  let_next_start();
  float factors[8], values[8], square = 0.0f;
  if (i < n) load_eight(weight + i, factors);
  wait_for_inputs();
  if (i < n) {
    load_eight(h + place, values);
    if (delta != nullptr) {
      float added[8];
      load_eight(delta + place, added);
      UNROLL
      for (int e = 0; e < 8; ++e) values[e] = rounded<T>(values[e] + added[e]);
    }
    UNROLL
    for (int e = 0; e < 8; ++e) square = fused(values[e], values[e], square);
  }
  square = sum_of_warp(square);
  if (t % 32 == 0) partial[t / 32] = square;
  sync_block();
  float total = 0.0f;
  for (int w = 0; w < threads / 32; ++w) total += partial[w];
  const float scale = 1.0f / sqrtf(total / float(n) + eps);
  if (i >= n) return;
  if (delta != nullptr) store_eight(sum + place, values);
  UNROLL
  for (int e = 0; e < 8; ++e) values[e] = values[e] * scale * (factors[e] + offset);
  store_eight(x + place, values);
}

// ---------------------------------------------------------------------------------------------
// y[R, N] = x[R, K] w[N, K]^T for a few rows: one pass over the weights as the checkpoint holds them.
//
// A block takes 16 * TILES rows of w, its 8 warps an eighth of K each. A lane reads 16 bytes of a row;
// which k such a lane holds is the same for w and x, so the tensor core sums over a permuted k. The
// eight partial sums are added in one fixed order.
//
// Tried on an H200, where this reads 3.4 to 4.0 TB/s: a ring of bulk copies of 4096 bytes reads 4.1 to 4.3
// in a row of its own kind, but a trunk with one such product loses 0.5 to 1 ms: probably the kernels
// around it are left with too little of the first cache level. A bigger shared-memory share for all
// kernels is slower for that reason too.

constexpr int LINEAR_THREADS = 256;
constexpr int LINEAR_WARPS = LINEAR_THREADS / 32;

constexpr int SLOT = 16;  // columns of one partial sum of squares

struct Segments {  // matrices that share x; their rows stand one after the other in y
  const void* weight[MAX_SEGMENTS];
  int rows[MAX_SEGMENTS];
  int count;
};
// The RMSNorms around a product, without kernels of their own. In front: x is multiplied by the norm's
// weight but not yet divided by its length, of which `squares` [R, slots] holds the parts; the division
// waits until y. Behind: sum = h + y is kept with the parts of its length, and y becomes sum times the
// next norm's weight. Every sum runs in a fixed order.
struct Around {
  const float* squares = nullptr;
  int slots = 0;
  float eps = 0.0f;
  const void* h = nullptr;
  const float* weight = nullptr;
  float offset = 0.0f;
  void* sum = nullptr;
  float* next_squares = nullptr;
};
// The residual times a norm's weight has to stay in the range of fp16: a sixteenth of it is kept.
template <class T>
DEVICE float calm(T) {
  return 1.0f;
}
DEVICE float calm(fp16) { return 1.0f / 16; }

// What the rows of y are multiplied by; a warp a row.
template <class T>
DEVICE void row_scales(const Around& around, int depth, int rows, float* scales, T type) {
  const int lane = int(threadIdx.x) % 32;
  for (int row = int(threadIdx.x) / 32; row < rows; row += int(blockDim.x) / 32) {
    float sum = 0.0f;
    if (around.squares != nullptr) {
      UNROLL_BY_4
      for (int i = lane; i < around.slots; i += 32) sum += around.squares[row * around.slots + i];
      sum = 1.0f / (sqrtf(sum_of_warp(sum) / float(depth) + around.eps) * calm(type));
    }
    if (lane == 0) scales[row] = around.squares != nullptr ? sum : 1.0f;
  }
}
// `value` of one row and column joins the residual `h` there; 16 neighbouring lanes hold a slot.
template <class T>
DEVICE void join(const Around& around, int row, int column, int out, bool inside, float value, float h,
                 float weight, T* y) {
  const float total = inside ? rounded<T>(h + rounded<T>(value)) : 0.0f;
  const int64_t place = int64_t(row) * out + column;
  if (inside) {
    put(static_cast<T*>(around.sum)[place], total);
    put(y[place], total * (weight + around.offset) * calm(T{}));
  }
  float square = product(total, total);
  UNROLL
  for (int mask = SLOT / 2; mask > 0; mask /= 2) square += shuffle_xor(square, mask);
  if (inside && column % SLOT == 0) {
    around.next_squares[row * ((out + SLOT - 1) / SLOT) + column / SLOT] = square;
  }
}

// TILES 16-row tiles a block; GATED: tile 0 is of segment 0, tile 1 of segment 1, y = silu(0) * 1.
template <class T, int TILES, int COLUMNS, bool GATED, int AHEAD>
KERNEL(LINEAR_THREADS, 2)
linear(const T* x, Segments segments, Around around, int rows, int depth, int out, T* y) {
  SHARED float partial[LINEAR_WARPS][TILES][COLUMNS][128], scales[MAX_ROWS];
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
  auto begin_reading = [&] {  // the weights do not depend on the kernel before this one
    wait_for_inputs();
    let_next_start();
    row_scales(around, depth, rows, scales, T{});
  };

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
    if (s == begin) begin_reading();
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
  if (begin >= end) begin_reading();
  constexpr bool MAY_JOIN = TILES == 1 && !GATED;  // then a thread has one output at most
  float h = 0.0f, weight = 0.0f;
  if (MAY_JOIN && around.h != nullptr) {
    const int row = t / SLOT, column = unit * step + t % SLOT;
    if (row < rows && column < out) {
      h = to_float(static_cast<const T*>(around.h)[int64_t(row) * out + column]);
      weight = load_constant(around.weight + column);
    }
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
    const bool inside = row < rows && target < segments.rows[segment];
    if (!inside && !(MAY_JOIN && around.h != nullptr)) continue;
    const float scale = inside ? scales[row] : 0.0f;
    float value = 0.0f;
    UNROLL
    for (int w = 0; w < LINEAR_WARPS; ++w) value += partial[w][tile][c][slot];
    value *= scale;
    if (GATED) {
      float up = 0.0f;
      UNROLL
      for (int w = 0; w < LINEAR_WARPS; ++w) up += partial[w][TILES - 1][c][slot];
      value = value * sigmoid(value) * (up * scale);
    }
    if (MAY_JOIN && around.h != nullptr) join(around, row, target, out, inside, value, h, weight, y);
    else put(y[int64_t(row) * out + first + target], value);
  }
}

// The same for a matrix of very many rows: 8 rows a tile, of which a load takes 128 bytes at once. Even
// and odd rows of a fragment are the two halves of 64 k, each with its own sums; the next loads are
// under way while a step is computed.
template <class T, int COLUMNS>
KERNEL(LINEAR_THREADS, COLUMNS == 1 ? 2 : 1)
linear_long(const T* x, Segments segments, Around around, int rows, int depth, int out, T* y) {
  constexpr int TILES = 2, TILE = 8, AHEAD = 4, K = 64;
  SHARED float partial[LINEAR_WARPS][TILES][TILE][COLUMNS * 8 + 1], scales[MAX_ROWS];
  const int t = int(threadIdx.x), warp = t / 32, lane = t % 32, group = lane / 4, quad = lane % 4;
  const int begin = int(blockIdx.x) * SLOT, eighth = lane % 8 * 8;
  const T* weights[TILES][2];
  UNROLL
  for (int tile = 0; tile < TILES; ++tile) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = begin + tile * TILE + half * 4 + lane / 8;
      const int held = row < out ? row : out - 1;  // the results of others are not kept
      weights[tile][half] = static_cast<const T*>(segments.weight[0]) + int64_t(held) * depth + eighth;
    }
  }
  const int steps = (depth + K - 1) / K, share = (steps + LINEAR_WARPS - 1) / LINEAR_WARPS;
  const int start = warp * share * K, stop = start + share * K < depth ? start + share * K : depth;
  const uint4 zero = {0, 0, 0, 0};
  uint4 a[AHEAD][TILES][2], b[2][2][COLUMNS];
  auto load = [&](int u, int k) {
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
      UNROLL
      for (int half = 0; half < 2; ++half) {
        a[u][tile][half] = k + eighth < stop ? load_once(weights[tile][half] + k) : zero;
      }
    }
  };
  auto load_x = [&](int u, int k) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) {
        const int row = c * 8 + group, at = k + half * 32 + quad * 8;
        const T* from = x + int64_t(row) * depth + at;
        b[u][half][c] = row < rows && at < stop ? *reinterpret_cast<const uint4*>(from) : zero;
      }
    }
  };
  UNROLL
  for (int u = 0; u < AHEAD; ++u) load(u, start + u * K);
  wait_for_inputs();
  let_next_start();
  row_scales(around, depth, rows, scales, T{});
  float sums[TILES][2][COLUMNS][4] = {};
  load_x(0, start);
  for (int k = start; k < stop; k += AHEAD * K) {
    UNROLL
    for (int u = 0; u < AHEAD; ++u) {
      load_x((u + 1) % 2, k + (u + 1) * K);
      UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 low = a[u][tile][0], high = a[u][tile][1];
        const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
        const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
        UNROLL
        for (int half = 0; half < 2; ++half) {
          UNROLL
          for (int c = 0; c < COLUMNS; ++c) {
            const uint4 held = b[u % 2][half][c];
            const uint32_t b0[2] = {held.x, held.y}, b1[2] = {held.z, held.w};
            multiply(sums[tile][half][c], a0, b0, T{});
            multiply(sums[tile][half][c], a1, b1, T{});
          }
        }
      }
      load(u, k + (u + AHEAD) * K);
    }
  }
  UNROLL
  for (int tile = 0; tile < TILES; ++tile) {
    UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLL
      for (int e = 0; e < 4; ++e) {
        const float mine = group % 2 ? sums[tile][1][c][e] : sums[tile][0][c][e];
        const float both = mine + shuffle_xor(mine, 4);
        const int row = e / 2 * 4 + group / 2, column = c * 8 + quad * 2 + e % 2;
        if (group % 2 == 0) partial[warp][tile][row][column] = both;
      }
    }
  }
  sync_block();
  for (int o = t; o < SLOT * rows; o += LINEAR_THREADS) {
    const int n = o % SLOT, row = o / SLOT;
    if (begin + n >= out) continue;
    float value = 0.0f;
    UNROLL
    for (int w = 0; w < LINEAR_WARPS; ++w) value += partial[w][n / TILE][n % TILE][row];
    put(y[int64_t(row) * out + begin + n], value * scales[row]);
  }
}

// The same in fp32, without tensor cores: one warp a row of w.
template <bool GATED>
KERNEL(SLOT * 32, 1)
linear_fp32(const float* x, Segments segments, Around around, int rows, int depth, int out, float* y) {
  SHARED float scales[MAX_ROWS], values[MAX_ROWS][SLOT];
  wait_for_inputs();
  let_next_start();
  row_scales(around, depth, rows, scales, 0.0f);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int target = int(blockIdx.x) * SLOT + warp;
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
  sync_block();
  UNROLL
  for (int r = 0; r < MAX_ROWS; ++r) {
    if (r >= rows) continue;
    float value = sum_of_warp(sums[0][r]) * scales[r];
    if (GATED) value = value * sigmoid(value) * (sum_of_warp(sums[1][r]) * scales[r]);
    if (lane == 0) values[r][warp] = value;
  }
  sync_block();
  const int mine = int(threadIdx.x) / SLOT, column = int(blockIdx.x) * SLOT + int(threadIdx.x) % SLOT;
  const bool kept = mine < rows && column < out;
  const float value = kept ? values[mine][threadIdx.x % SLOT] : 0.0f;
  const int64_t place = int64_t(mine) * out + column;
  if (around.h == nullptr) {
    if (kept) y[place] = value;
    return;
  }
  const float h = kept ? static_cast<const float*>(around.h)[place] : 0.0f;
  join(around, mine, column, out, kept, value, h, kept ? around.weight[column] : 0.0f, y);
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

// The rule for one row on the entries of S that a thread holds; `key` and `query` begin at them. The
// fold and the rule change S by the same two operations, so a folded log gives the same bits.
template <int DEPTH>
DEVICE void fold_row(float (&S)[DEPTH], const float* key, float delta, float fade) {
  UNROLL
  for (int j = 0; j < DEPTH; j += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + j);
    S[j] = fused(k.x, delta, product(S[j], fade));
    S[j + 1] = fused(k.y, delta, product(S[j + 1], fade));
    S[j + 2] = fused(k.z, delta, product(S[j + 2], fade));
    S[j + 3] = fused(k.w, delta, product(S[j + 3], fade));
  }
}

// Queries and keys of the rows to length one, the queries over sqrt(dk), one warp a vector; the head
// that leads its group writes the keys to the log.
template <int dk, int WIDE>
DEVICE void unit_vectors(float (&query)[MAX_ROWS][WIDE], float (&key)[MAX_ROWS][WIDE], int warps, int warp,
                         int lane, bool leads, int key_head, const DeltaTensors& t, const DeltaSizes& n) {
  const int rows = n.rows;
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
}

// S <- fade S; returns this thread's part of S^T key.
template <int DEPTH>
DEVICE float fade_and_recall(float (&S)[DEPTH], const float* key, float fade) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  UNROLL
  for (int j = 0; j < DEPTH; j += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + j);
    sums[0] = fused(S[j] = product(S[j], fade), k.x, sums[0]);
    sums[1] = fused(S[j + 1] = product(S[j + 1], fade), k.y, sums[1]);
    sums[2] = fused(S[j + 2] = product(S[j + 2], fade), k.z, sums[2]);
    sums[3] = fused(S[j + 3] = product(S[j + 3], fade), k.w, sums[3]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// S <- S + key delta^T; returns this thread's part of S^T query.
template <int DEPTH>
DEVICE float add_and_ask(float (&S)[DEPTH], const float* key, const float* query, float delta) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  UNROLL
  for (int j = 0; j < DEPTH; j += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + j);
    const float4 q = *reinterpret_cast<const float4*>(query + j);
    sums[0] = fused(S[j] = fused(k.x, delta, S[j]), q.x, sums[0]);
    sums[1] = fused(S[j + 1] = fused(k.y, delta, S[j + 1]), q.y, sums[1]);
    sums[2] = fused(S[j + 2] = fused(k.z, delta, S[j + 2]), q.z, sums[2]);
    sums[3] = fused(S[j + 3] = fused(k.w, delta, S[j + 3]), q.w, sums[3]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// 88 registers a thread, as measured: a block of 512 leaves a third of a multiprocessor's to others.
template <class T, int DEPTH>  // DEPTH: entries of the key dim that one thread holds
KERNEL_OF(88)
gated_delta(DeltaTensors t, DeltaSizes n) {
  SHARED_WIDE float query[MAX_ROWS][MAX_DIM], key[MAX_ROWS][MAX_DIM];
  SHARED float value[MAX_ROWS][MAX_DIM], recalled[2][PARTS][MAX_DIM];
  SHARED_WIDE float output[MAX_ROWS][PARTS][MAX_DIM];  // before: key, delta and decay of the log
  SHARED float gate[MAX_ROWS][MAX_DIM], weight[MAX_DIM], decay[MAX_ROWS], beta[MAX_ROWS];
  const int threads = int(blockDim.x), thread = int(threadIdx.x), lane = thread % 32;
  const int warp = thread / 32, warps = threads / 32;
  const int head = int(blockIdx.x), group = n.value_heads / n.key_heads, key_head = head / group;
  const bool leads = head % group == 0;  // writes what the heads of a group share
  constexpr int dk = DEPTH * PARTS;
  const int dv = n.value_dim, rows = n.rows;
  const int keys = n.key_heads * dk, channels = 2 * keys + n.value_heads * dv;

  // The states do not depend on the kernel before: S, and the fold of the rows of the last call that
  // were kept, first. The two operations on S are those of the rule below.
  let_next_start();
  const int column = thread % dv, part = thread / dv, k0 = part * DEPTH;
  const bool holds = part < PARTS;
  const int64_t base = (int64_t(head) * dk + k0) * dv + column;
  float S[DEPTH];
  UNROLL
  for (int j = 0; j < DEPTH; ++j) S[j] = holds ? t.S[base + int64_t(j) * dv] : 0.0f;
  int kept = t.kept[0];
  kept = kept < 0 ? 0 : kept > rows ? rows : kept;
  for (int i = thread; i < rows * dk; i += threads) {
    output[i / dk][0][i % dk] = t.log_key[int64_t(i / dk * n.key_heads + key_head) * dk + i % dk];
  }
  for (int i = thread; i < rows * dv; i += threads) {
    output[i / dv][1][i % dv] = t.log_delta[int64_t(i / dv * n.value_heads + head) * dv + i % dv];
  }
  if (thread < rows) output[thread][2][0] = t.log_decay[thread * n.value_heads + head];
  if (thread < dv) weight[thread] = t.norm[thread];
  sync_block();
  for (int r = 0; r < kept; ++r) {
    if (!holds) break;
    const float fade = output[r][2][0], delta = output[r][1][column];
    fold_row(S, &output[r][0][k0], delta, fade);
  }
  wait_for_inputs();

  // Convolution and silu, one channel a thread. Everything is loaded before anything is stored.
  const T* proj = static_cast<const T*>(t.proj);
  const T* window = static_cast<const T*>(t.window);
  T* next_window = static_cast<T*>(t.next_window);
  constexpr int history = CONV - 1;
  const int wide = history + rows;
  const int gating = threads - 1 - thread;  // the last threads: most have no channel
  for (int i = thread; i < 2 * dk + dv; i += threads) {
    const bool is_value = i >= 2 * dk, is_key = !is_value && i >= dk;
    const int within = is_value ? i - 2 * dk : is_key ? i - dk : i;
    const int c = is_value  ? 2 * keys + head * dv + within
                  : is_key ? keys + key_head * dk + within
                           : key_head * dk + within;
    T raw[history + MAX_ROWS];  // the last values before row 0, then the rows
    UNROLL
    for (int r = 0; r < MAX_ROWS; ++r) {
      if (r < rows) raw[history + r] = proj[int64_t(r) * n.stride + c];
    }
    UNROLL
    for (int j = 0; j < history; ++j) raw[j] = window[int64_t(c) * wide + kept + j];
    float taps[CONV];
    UNROLL
    for (int j = 0; j < CONV; ++j) taps[j] = load_constant(t.conv + int64_t(c) * CONV + j);
    UNROLL
    for (int r = 0; r < MAX_ROWS; ++r) {
      if (r >= rows) continue;
      float sum = 0.0f;
      UNROLL
      for (int j = 0; j < CONV; ++j) sum = fused(taps[j], to_float(raw[r + j]), sum);
      sum = rounded<T>(sum);
      sum = rounded<T>(sum * sigmoid(sum));
      if (is_value) value[r][within] = sum;
      else if (is_key) key[r][within] = sum;
      else query[r][within] = sum;
    }
    UNROLL
    for (int j = 0; j < history + MAX_ROWS; ++j) {
      if (j < wide && (is_value || leads)) next_window[int64_t(c) * wide + j] = raw[j];
    }
  }
  if (gating < rows) {
    const T* gates = proj + int64_t(gating) * n.stride + channels + n.value_heads * dv;
    const float a = to_float(gates[n.value_heads + head]) + load_constant(t.bias + head);
    const float b = to_float(gates[head]), rate = load_constant(t.rate + head);
    const float softplus = a > 20.0f ? a : log1pf(expf(a));
    decay[gating] = expf(-expf(rate) * softplus);
    beta[gating] = sigmoid(b);
    t.next_decay[gating * n.value_heads + head] = decay[gating];
  }
  for (int i = thread; i < rows * dv; i += threads) {
    const float z = to_float(proj[int64_t(i / dv) * n.stride + channels + head * dv + i % dv]);
    gate[i / dv][i % dv] = z * sigmoid(z);
  }
  sync_block();

  unit_vectors<dk>(query, key, warps, warp, lane, leads, key_head, t, n);

  UNROLL
  for (int j = 0; j < DEPTH; ++j) {
    if (holds) t.next_S[base + int64_t(j) * dv] = S[j];
  }
  sync_block();

  for (int r = 0; r < rows; ++r) {
    const float fade = decay[r];
    if (holds) recalled[r % 2][part][column] = fade_and_recall(S, &key[r][k0], fade);
    sync_block();
    if (!holds) continue;
    float total = 0.0f;
    UNROLL
    for (int p = 0; p < PARTS; ++p) total += recalled[r % 2][p][column];
    const float delta = beta[r] * (value[r][column] - total);
    output[r][part][column] = add_and_ask(S, &key[r][k0], &query[r][k0], delta);
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
      put(y[(int64_t(r) * n.value_heads + head) * dv + d],
          mixed[j] * scale * weight[d] * gate[r][d]);
    }
  }
}

// The same for key and value dims of 128, with more threads: everything older than the run is loaded
// before the wait, and a head's value columns are dealt to SPLIT blocks of a cluster, which add up their
// squares for the norm.
constexpr int SHARES = 8;  // of the key dim

template <class T, int SPLIT>
KERNEL(SHARES * MAX_DIM / SPLIT, 1)
gated_delta_wide(DeltaTensors t, DeltaSizes n) {
  constexpr int dk = MAX_DIM, dv = MAX_DIM, DEPTH = dk / SHARES, COLUMNS = dv / SPLIT;
  constexpr int THREADS = SHARES * COLUMNS, WARPS = THREADS / 32;
  constexpr int CHANNELS = 2 * dk + COLUMNS, TURNS = (CHANNELS + THREADS - 1) / THREADS;
  SHARED_WIDE float query[MAX_ROWS][dk], key[MAX_ROWS][dk];
  SHARED float value[MAX_ROWS][COLUMNS], recalled[2][SHARES][COLUMNS];
  SHARED_WIDE float output[MAX_ROWS][SHARES][COLUMNS];
  SHARED_WIDE float log_key[MAX_ROWS][dk];
  SHARED float log_delta[MAX_ROWS][COLUMNS], log_decay[MAX_ROWS];
  SHARED float gate[MAX_ROWS][COLUMNS], decay[MAX_ROWS], beta[MAX_ROWS], squares[MAX_ROWS][SPLIT];
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int rank = int(blockIdx.x) % SPLIT, head = int(blockIdx.x) / SPLIT, first = rank * COLUMNS;
  const int group = n.value_heads / n.key_heads, key_head = head / group;
  const bool leads = head % group == 0 && rank == 0;
  const int rows = n.rows, keys = n.key_heads * dk, channels = 2 * keys + n.value_heads * dv;
  const int column = thread % COLUMNS, part = thread / COLUMNS, k0 = part * DEPTH;
  const int64_t base = (int64_t(head) * dk + k0) * dv + first + column;

  let_next_start();
  if (SPLIT > 1) cluster_arrive();
  float S[DEPTH];
  UNROLL
  for (int j = 0; j < DEPTH; ++j) S[j] = t.S[base + int64_t(j) * dv];
  int kept = t.kept[0];
  kept = kept < 0 ? 0 : kept > rows ? rows : kept;
  for (int i = thread; i < rows * dk; i += THREADS) {
    log_key[i / dk][i % dk] = t.log_key[int64_t(i / dk * n.key_heads + key_head) * dk + i % dk];
  }
  for (int i = thread; i < rows * COLUMNS; i += THREADS) {
    const int r = i / COLUMNS, c = i % COLUMNS;
    log_delta[r][c] = t.log_delta[int64_t(r * n.value_heads + head) * dv + first + c];
  }
  if (thread < rows) log_decay[thread] = t.log_decay[thread * n.value_heads + head];
  constexpr int history = CONV - 1;
  const int wide = history + rows;
  const T* window = static_cast<const T*>(t.window);
  T* next_window = static_cast<T*>(t.next_window);
  T past[TURNS][history];
  float taps[TURNS][CONV];
  auto channel_of = [&](int i) {
    return i >= 2 * dk ? 2 * keys + head * dv + first + i - 2 * dk
           : i >= dk   ? keys + key_head * dk + i - dk
                       : key_head * dk + i;
  };
  UNROLL
  for (int u = 0; u < TURNS; ++u) {
    const int i = thread + u * THREADS, c = channel_of(i);
    if (i >= CHANNELS) continue;
    UNROLL
    for (int j = 0; j < history; ++j) past[u][j] = window[int64_t(c) * wide + kept + j];
    UNROLL
    for (int j = 0; j < CONV; ++j) taps[u][j] = load_constant(t.conv + int64_t(c) * CONV + j);
  }
  const int gating = THREADS - 1 - thread;
  constexpr int EACH = COLUMNS / 32, LINES = (MAX_ROWS + WARPS - 1) / WARPS;
  float weight[EACH];
  UNROLL
  for (int j = 0; j < EACH; ++j) weight[j] = load_constant(t.norm + first + lane + j * 32);
  float bias = 0.0f, rate = 0.0f;
  if (gating < rows) {
    bias = load_constant(t.bias + head);
    rate = -expf(load_constant(t.rate + head));
  }
  sync_block();
  for (int r = 0; r < kept; ++r) {
    const float fade = log_decay[r], delta = log_delta[r][column];
    fold_row(S, &log_key[r][k0], delta, fade);
  }
  wait_for_inputs();

  const T* proj = static_cast<const T*>(t.proj);
  T raw[TURNS][MAX_ROWS];
  UNROLL
  for (int u = 0; u < TURNS; ++u) {
    const int i = thread + u * THREADS, c = channel_of(i);
    UNROLL
    for (int r = 0; r < MAX_ROWS; ++r) {
      if (r < rows && i < CHANNELS) raw[u][r] = proj[int64_t(r) * n.stride + c];
    }
  }
  constexpr int GATES = (MAX_ROWS * COLUMNS + THREADS - 1) / THREADS;
  T z[GATES];
  UNROLL
  for (int u = 0; u < GATES; ++u) {
    const int i = thread + u * THREADS;
    const int from = channels + head * dv + first + i % COLUMNS;
    if (i < rows * COLUMNS) z[u] = proj[int64_t(i / COLUMNS) * n.stride + from];
  }
  if (gating < rows) {
    const T* gates = proj + int64_t(gating) * n.stride + channels + n.value_heads * dv;
    const float a = to_float(gates[n.value_heads + head]) + bias, b = to_float(gates[head]);
    const float softplus = a > 20.0f ? a : log1pf(expf(a));
    decay[gating] = expf(rate * softplus);
    beta[gating] = sigmoid(b);
    if (rank == 0) t.next_decay[gating * n.value_heads + head] = decay[gating];
  }
  UNROLL
  for (int j = 0; j < DEPTH; ++j) t.next_S[base + int64_t(j) * dv] = S[j];
  UNROLL
  for (int u = 0; u < TURNS; ++u) {
    const int i = thread + u * THREADS, c = channel_of(i);
    if (i >= CHANNELS) continue;
    const bool is_value = i >= 2 * dk, is_key = !is_value && i >= dk;
    float line[history + MAX_ROWS];
    UNROLL
    for (int j = 0; j < history; ++j) line[j] = to_float(past[u][j]);
    UNROLL
    for (int r = 0; r < MAX_ROWS; ++r) {
      if (r < rows) line[history + r] = to_float(raw[u][r]);
    }
    UNROLL
    for (int r = 0; r < MAX_ROWS; ++r) {
      if (r >= rows) continue;
      float sum = 0.0f;
      UNROLL
      for (int j = 0; j < CONV; ++j) sum = fused(taps[u][j], line[r + j], sum);
      sum = rounded<T>(sum);
      sum = rounded<T>(sum * sigmoid(sum));
      if (is_value) value[r][i - 2 * dk] = sum;
      else if (is_key) key[r][i - dk] = sum;
      else query[r][i] = sum;
    }
    if (!is_value && !leads) continue;
    UNROLL
    for (int j = 0; j < history; ++j) next_window[int64_t(c) * wide + j] = past[u][j];
    UNROLL
    for (int r = 0; r < MAX_ROWS; ++r) {
      if (r < rows) next_window[int64_t(c) * wide + history + r] = raw[u][r];
    }
  }
  UNROLL
  for (int u = 0; u < GATES; ++u) {
    const int i = thread + u * THREADS;
    if (i >= rows * COLUMNS) continue;
    const float x = to_float(z[u]);
    gate[i / COLUMNS][i % COLUMNS] = x * sigmoid(x);
  }
  sync_block();
  unit_vectors<dk>(query, key, WARPS, warp, lane, leads, key_head, t, n);
  sync_block();
  for (int r = 0; r < rows; ++r) {
    const float fade = decay[r];
    recalled[r % 2][part][column] = fade_and_recall(S, &key[r][k0], fade);
    sync_block();
    float total = 0.0f;
    UNROLL
    for (int p = 0; p < SHARES; ++p) total += recalled[r % 2][p][column];
    const float delta = beta[r] * (value[r][column] - total);
    output[r][part][column] = add_and_ask(S, &key[r][k0], &query[r][k0], delta);
    if (part == 0) t.next_delta[(int64_t(r) * n.value_heads + head) * dv + first + column] = delta;
    if (t.every_S != nullptr) {
      UNROLL
      for (int j = 0; j < DEPTH; ++j) {
        t.every_S[int64_t(r) * n.value_heads * dk * dv + base + int64_t(j) * dv] = S[j];
      }
    }
  }
  sync_block();
  float mixed[LINES][EACH], square[LINES];
  UNROLL
  for (int u = 0; u < LINES; ++u) {
    const int r = warp + u * WARPS;
    square[u] = 0.0f;
    if (r >= rows) continue;
    UNROLL
    for (int j = 0; j < EACH; ++j) {
      mixed[u][j] = 0.0f;
      UNROLL
      for (int p = 0; p < SHARES; ++p) mixed[u][j] += output[r][p][lane + j * 32];
      square[u] = fused(mixed[u][j], mixed[u][j], square[u]);
    }
    square[u] = sum_of_warp(square[u]);
    if (SPLIT > 1) {
      if (u == 0) cluster_wait();
      if (lane < SPLIT) store_at_rank(&squares[r][rank], unsigned(lane), square[u]);
    }
  }
  if (SPLIT > 1) {
    if (warp >= rows) cluster_wait();  // the arrival of the start
    cluster_arrive();
    cluster_wait();
  }
  T* y = static_cast<T*>(t.y);
  UNROLL
  for (int u = 0; u < LINES; ++u) {
    const int r = warp + u * WARPS;
    if (r >= rows) continue;
    float total = square[u];
    if (SPLIT > 1) {
      total = 0.0f;
      UNROLL
      for (int s = 0; s < SPLIT; ++s) total += squares[r][s];
    }
    const float scale = 1.0f / sqrtf(total / float(dv) + n.eps);
    UNROLL
    for (int j = 0; j < EACH; ++j) {
      const int d = lane + j * 32;
      put(y[(int64_t(r) * n.value_heads + head) * dv + first + d],
          mixed[u][j] * scale * weight[j] * gate[r][d]);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Grouped attention over a KV cache written in place: norms and rotary of q and k, the new KV rows,
// scores, softmax, gate. Keys are cut into stretches at fixed positions, one block each, whose
// results are then merged in order: the sums of a row do not depend on how far the call reaches. Short
// stretches first, so that a short context has many of them, then longer ones, so that a long context
// has not too many results to merge.

constexpr int ATTEND_THREADS = 256;
constexpr int TILE = 32;  // slots taken at a time
constexpr int MAX_HEAD = 256;

BOTH int stretch_start(int s) {
  return s < 32 ? s * 32 : s < 80 ? 1024 + (s - 32) * 64 : s < 112 ? 4096 + (s - 80) * 128
                                                                   : 8192 + (s - 112) * 256;
}
BOTH int stretch_of(int slot) {
  return slot < 1024   ? slot / 32
         : slot < 4096 ? 32 + (slot - 1024) / 64
         : slot < 8192 ? 80 + (slot - 4096) / 128
                       : 112 + (slot - 8192) / 256;
}

struct AttendSizes {
  int rows, query_rows, heads, kv_heads, dim, rotary, slots, stretches;
  int query_stride, head_stride, kv_stride, key_offset, value_offset;
  float eps, offset;  // of the q and k norms
  bool gated;
};
struct AttendTensors {
  const void *query, *kv;
  void *key, *value;  // caches [kv_heads, slots, dim], or the first plane of each: see KvStorage
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

// QUERIES: most (row, head) pairs of one kv head, 8 or more. OWN: KV rows are of T.
template <class T, int QUERIES, bool OWN>
KERNEL(ATTEND_THREADS, 1)
attend(AttendTensors t, AttendSizes n, KvStorage more) {
  SHARED_WIDE float query[QUERIES][MAX_HEAD];
  SHARED_WIDE float scores[TILE][QUERIES + 4];  // padded against bank conflicts
  SHARED float best[QUERIES], total[QUERIES], fade[QUERIES];
  constexpr int CHUNKS = MAX_HEAD / 64;
  wait_for_inputs();
  let_next_start();
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  constexpr int WARPS = ATTEND_THREADS / 32;
  const int kv_head = int(blockIdx.y), group = n.heads / n.kv_heads, queries = n.query_rows * group;
  const int start = stretch_start(int(blockIdx.x)), after = stretch_start(int(blockIdx.x) + 1);
  const int stop = after < n.slots ? after : n.slots;
  const int position = t.position[0], asked = t.query_position[0];
  const Rows<T, OWN> key(t.key, more.key, int64_t(kv_head) * n.slots, n.dim);
  const Rows<T, OWN> value(t.value, more.value, int64_t(kv_head) * n.slots, n.dim);

  // The new rows that stand in this stretch, turned in what will hold the queries.
  for (int r = warp; r < n.rows; r += WARPS) {
    const int slot = position + r;
    if (slot < start || slot >= stop) continue;
    const T* from = static_cast<const T*>(t.kv) + int64_t(r) * n.kv_stride + kv_head * n.dim;
    turned_head(from + n.key_offset, t.key_norm, t, n, slot, query[warp], 1.0f);
    sync_warp();
    const int d = lane * 8;
    float x[8] = {};
    if (d < n.dim) load_eight(&query[warp][d], x);
    key.store(slot, d, x);
    value.store(slot, d, from + n.value_offset + d);
    sync_warp();
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
      if (slot < last && d < n.dim) key.load(slot, d, keys[c]);
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
        const float v = value.at(tile + s, thread);
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

// The same on tensor cores, for 16-bit types; QUERIES is a multiple of 8. Scores are K (slots x dims)
// times the queries, as in `linear`; the results are V turned over (dims x slots) times the weights of
// the slots: two slots of V are zipped in registers, so V needs no shared memory. Both are under way
// from device memory while the other is used.
template <class T, int QUERIES, bool OWN>
KERNEL(ATTEND_THREADS, QUERIES > 24 ? 1 : 2)
attend_tensor(AttendTensors t, AttendSizes n, KvStorage more) {
  constexpr int WARPS = ATTEND_THREADS / 32, COLUMNS = QUERIES / 8, WIDE = MAX_HEAD + 32;
  constexpr int SHARES = 4, HALF = TILE / 2, ITEMS = (QUERIES + MAX_ROWS + WARPS - 1) / WARPS;
  static_assert(WARPS == 8 && TILE == 32 && MAX_HEAD == 64 * SHARES, "see the division of the work");
  constexpr int QUERY_BYTES = QUERIES * WIDE * 2, TURNED_BYTES = WARPS * MAX_HEAD * 4;
  constexpr int SUM_BYTES = SHARES * QUERIES * (TILE + 1) * 4;
  constexpr int SCORE_BYTES = SUM_BYTES > TURNED_BYTES ? SUM_BYTES : TURNED_BYTES;
  static_assert(QUERY_BYTES + SCORE_BYTES >= QUERIES * MAX_HEAD * 4, "holds the results at the end");
  SHARED_WIDE unsigned char pool[QUERY_BYTES + SCORE_BYTES];
  SHARED_WIDE T weights[QUERIES][TILE + 8];
  SHARED float best[QUERIES], total[QUERIES], fade[QUERIES];
  T(*query)[WIDE] = reinterpret_cast<T(*)[WIDE]>(pool);
  typedef float Scores[QUERIES][TILE + 1];
  Scores* scores = reinterpret_cast<Scores*>(pool + QUERY_BYTES);
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int pair = lane / 4, quad = lane % 4, share = warp % SHARES, half = warp / SHARES;
  const int kv_head = int(blockIdx.y), group = n.heads / n.kv_heads, queries = n.query_rows * group;
  const int stretch = n.stretches - 1 - int(blockIdx.x);  // the long ones first
  const int start = stretch_start(stretch), after = stretch_start(stretch + 1);
  const int stop = after < n.slots ? after : n.slots;
  const int turn = n.rotary / 2;
  const Rows<T, OWN> key(t.key, more.key, int64_t(kv_head) * n.slots, n.dim);
  const Rows<T, OWN> value(t.value, more.value, int64_t(kv_head) * n.slots, n.dim);
  let_next_start();
  wait_for_inputs();
  const int position = t.position[0], asked = t.query_position[0];
  const int reach = asked + n.query_rows, last = reach < stop ? reach : stop;
  const bool fresh = position < stop && position + n.rows > start;  // new rows stand here
  if (start >= reach && !fresh) return;  // the whole block: nobody asks for this stretch

  const uint4 zero = {0, 0, 0, 0};
  uint4 keys[2][2], values[4];
  auto load_keys = [&](int tile) {
    UNROLL
    for (int u = 0; u < 2; ++u) {
      const int d = (share + u * SHARES) * 32 + quad * 8;
      UNROLL
      for (int h = 0; h < 2; ++h) {
        const int slot = tile + half * HALF + h * 8 + pair;
        keys[u][h] = slot < last && d < n.dim ? key.fetch(slot, d) : zero;
      }
    }
  };
  auto load_values = [&](int tile) {
    const int d = share * 64 + pair * 8;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int slot = tile + half * HALF + i / 2 * 8 + quad * 2 + i % 2;
      values[i] = slot < last && d < n.dim ? value.fetch(slot, d) : zero;
    }
  };
  if (!fresh) {
    load_keys(start);
    load_values(start);
  }

  // Heads of queries, then of new keys: a warp turns one at a time, eight neighbouring dims a lane.
  const int d0 = lane * 8, items = queries + (fresh ? n.rows : 0);
  float* turned = reinterpret_cast<float*>(scores) + warp * MAX_HEAD;
  uint4 raw[ITEMS];
  UNROLL
  for (int j = 0; j < ITEMS; ++j) {
    const int i = warp + j * WARPS, row = i < queries ? i / group : i - queries;
    const T* from = i < queries
                        ? static_cast<const T*>(t.query) + int64_t(row) * n.query_stride +
                              int64_t(kv_head * group + i % group) * n.head_stride
                        : static_cast<const T*>(t.kv) + int64_t(row) * n.kv_stride +
                              n.key_offset + kv_head * n.dim;
    raw[j] = i < items && d0 < n.dim ? *reinterpret_cast<const uint4*>(from + d0) : zero;
  }
  UNROLL
  for (int j = 0; j < ITEMS; ++j) {
    const int i = warp + j * WARPS;
    if (i >= items) continue;
    const bool asks = i < queries;
    const int row = asks ? i / group : i - queries, slot = asks ? asked + row : position + row;
    if (!asks && (slot < start || slot >= stop)) continue;
    const float* norm = asks ? t.query_norm : t.key_norm;
    union {
      uint4 words;
      T values[8];
    } held;
    held.words = raw[j];
    float x[8], square = 0.0f;
    UNROLL
    for (int e = 0; e < 8; ++e) {
      x[e] = to_float(held.values[e]);
      square = fused(x[e], x[e], square);
    }
    if (norm != nullptr) {
      const float length = 1.0f / sqrtf(sum_of_warp(square) / float(n.dim) + n.eps);
      UNROLL
      for (int e = 0; e < 8; ++e) {
        if (d0 < n.dim) x[e] = x[e] * length * (load_constant(norm + d0 + e) + n.offset);
      }
    }
    if (d0 < n.dim) {
      UNROLL
      for (int e = 0; e < 8; ++e) turned[d0 + e] = x[e];
    }
    sync_warp();
    UNROLL
    for (int e = 0; e < 8; ++e) {
      const int d = d0 + e, f = d < turn ? d : d - turn;
      if (d >= n.rotary) continue;
      const float cos = load_constant(t.cos + int64_t(slot) * turn + f);
      const float sin = load_constant(t.sin + int64_t(slot) * turn + f);
      x[e] = d < turn ? x[e] * cos - turned[d + turn] * sin : x[e] * cos + turned[d - turn] * sin;
    }
    sync_warp();
    if (asks) {
      if (d0 < n.dim) store_eight(&query[i][d0], x);
    } else {
      const T* from = static_cast<const T*>(t.kv) + int64_t(row) * n.kv_stride + n.value_offset;
      key.store(slot, d0, x);
      value.store(slot, d0, from + kv_head * n.dim + d0);
    }
  }
  if (start >= reach) return;
  for (int i = thread; i < QUERIES; i += ATTEND_THREADS) {
    best[i] = -INFINITY;
    total[i] = 0.0f;
    fade[i] = 0.0f;
  }
  for (int i = thread; i < QUERIES * (TILE + 8); i += ATTEND_THREADS) put((&weights[0][0])[i], 0.0f);
  sync_block();
  if (fresh) {
    load_keys(start);
    load_values(start);
  }

  const float scale = 1.0f / sqrtf(float(n.dim));
  float mixed[4][COLUMNS][4] = {};
  for (int tile = start; tile < last; tile += TILE) {
    float part[COLUMNS][4] = {};  // of the scores: 16 slots, an interleaved quarter of the dims
    UNROLL
    for (int u = 0; u < 2; ++u) {
      const int d = (share + u * SHARES) * 32 + quad * 8;
      const uint4 low = key.values(keys[u][0]), high = key.values(keys[u][1]);
      const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
      const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) {
        const uint4 b = d < n.dim ? *reinterpret_cast<const uint4*>(&query[c * 8 + pair][d]) : zero;
        const uint32_t b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
        multiply(part[c], a0, b0, T{});
        multiply(part[c], a1, b1, T{});
      }
    }
    UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLL
      for (int e = 0; e < 4; ++e) {
        scores[share][c * 8 + quad * 2 + e % 2][half * HALF + e / 2 * 8 + pair] = part[c][e];
      }
    }
    load_keys(tile + TILE);
    sync_block();
    for (int i = warp; i < queries; i += WARPS) {
      float score = 0.0f;
      UNROLL
      for (int p = 0; p < SHARES; ++p) score += scores[p][i][lane];
      const int slot = tile + lane;
      score = slot <= asked + i / group && slot < last ? score * scale : -INFINITY;
      const float top = fmaxf(best[i], max_of_warp(score));
      const float weight = score == -INFINITY ? 0.0f : rounded<T>(expf(score - top));
      const float sum = sum_of_warp(weight);
      put(weights[i][lane], weight);
      sync_warp();
      if (lane == 0) {
        fade[i] = best[i] == -INFINITY ? 0.0f : expf(best[i] - top);
        total[i] = total[i] * fade[i] + sum;
        best[i] = top;
      }
    }
    sync_block();
    uint32_t b[COLUMNS][2];
    UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLL
      for (int h = 0; h < 2; ++h) {
        const T* from = &weights[c * 8 + pair][half * HALF + h * 8 + quad * 2];
        b[c][h] = *reinterpret_cast<const uint32_t*>(from);
      }
      const float even = fade[c * 8 + quad * 2], odd = fade[c * 8 + quad * 2 + 1];
      UNROLL
      for (int m = 0; m < 4; ++m) {
        UNROLL
        for (int e = 0; e < 4; ++e) mixed[m][c][e] *= e % 2 ? odd : even;
      }
    }
    UNROLL
    for (int i = 0; i < 4; ++i) values[i] = value.values(values[i]);
    UNROLL
    for (int m = 0; m < 4; ++m) {
      const uint32_t v0 = word_of(values[0], m), v1 = word_of(values[1], m);
      const uint32_t v2 = word_of(values[2], m), v3 = word_of(values[3], m);
      const uint32_t a[4] = {(v0 & 0xffffu) | (v1 << 16), (v0 >> 16) | (v1 & 0xffff0000u),
                             (v2 & 0xffffu) | (v3 << 16), (v2 >> 16) | (v3 & 0xffff0000u)};
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) multiply(mixed[m][c], a, b[c], T{});
    }
    load_values(tile + TILE);
  }

  // The two halves of the slots together. A lane holds eight neighbouring dims of two queries.
  float(*others)[MAX_HEAD] = reinterpret_cast<float(*)[MAX_HEAD]>(pool);
  const int d1 = share * 64 + pair * 8;
  sync_block();
  for (int turn_of = 1; turn_of >= 0; --turn_of) {
    if (half == turn_of && d1 < n.dim) {
      UNROLL
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          const int i = c * 8 + quad * 2 + odd;
          if (i >= queries) continue;
          float x[8];
          UNROLL
          for (int e = 0; e < 8; ++e) x[e] = mixed[e / 2][c][e % 2 * 2 + odd];
          if (half == 1) {
            store_eight(&others[i][d1], x);
            continue;
          }
          float y[8];
          load_eight(&others[i][d1], y);
          UNROLL
          for (int e = 0; e < 8; ++e) x[e] += y[e];
          const int64_t head = int64_t(i / group) * n.heads + kv_head * group + i % group;
          store_eight(t.mixed + (head * n.stretches + stretch) * n.dim + d1, x);
        }
      }
    }
    if (turn_of == 1) sync_block();
  }
  if (thread < queries) {
    const int64_t head = int64_t(thread / group) * n.heads + kv_head * group + thread % group;
    t.best[head * n.stretches + stretch] = best[thread];
    t.total[head * n.stretches + stretch] = total[thread];
  }
}

// Four teams take every fourth stretch each, four neighbouring dims a thread.
constexpr int TEAMS = 4;
constexpr int EAGER = 8;  // stretches of a team whose results are fetched at once

template <class T>
KERNEL(MAX_HEAD, 1)
merge_stretches(AttendTensors t, AttendSizes n) {
  SHARED float tops[MAX_HEAD / 32], sums[TEAMS];
  SHARED_WIDE float mixes[TEAMS][MAX_HEAD];
  const int thread = int(threadIdx.x), head = int(blockIdx.x), row = int(blockIdx.y);
  const int team = thread / (MAX_HEAD / TEAMS), d = thread % (MAX_HEAD / TEAMS) * 4;
  const int64_t place = (int64_t(row) * n.heads + head) * n.stretches;
  let_next_start();
  wait_for_inputs();
  const int used = stretch_of(t.query_position[0] + row) + 1;
  const bool mine = d < n.dim;
  auto load_mixed = [&](int s) {
    return *reinterpret_cast<const float4*>(t.mixed + (place + s) * n.dim + d);
  };
  float4 eager[EAGER];
  UNROLL
  for (int j = 0; j < EAGER; ++j) {
    const int s = team + j * TEAMS;
    if (mine && s < used) eager[j] = load_mixed(s);
  }
  float top = -INFINITY;
  for (int s = thread; s < used; s += MAX_HEAD) top = fmaxf(top, t.best[place + s]);
  top = max_of_warp(top);
  if (thread % 32 == 0) tops[thread / 32] = top;
  sync_block();
  for (int w = 0; w < MAX_HEAD / 32; ++w) top = fmaxf(top, tops[w]);
  float sum = 0.0f;
  float4 mixed = {0.0f, 0.0f, 0.0f, 0.0f};
  auto add = [&](int s, const float4& x) {
    const float weight = expf(t.best[place + s] - top);
    sum = fused(t.total[place + s], weight, sum);
    mixed.x = fused(x.x, weight, mixed.x);
    mixed.y = fused(x.y, weight, mixed.y);
    mixed.z = fused(x.z, weight, mixed.z);
    mixed.w = fused(x.w, weight, mixed.w);
  };
  UNROLL
  for (int j = 0; j < EAGER; ++j) {
    const int s = team + j * TEAMS;
    if (mine && s < used) add(s, eager[j]);
  }
  UNROLL_BY_4
  for (int s = team + EAGER * TEAMS; s < used; s += TEAMS) {
    if (mine) add(s, load_mixed(s));
  }
  if (mine) *reinterpret_cast<float4*>(&mixes[team][d]) = mixed;
  if (d == 0) sums[team] = sum;
  sync_block();
  if (thread >= n.dim) return;
  float all = 0.0f, result = 0.0f;
  for (int g = 0; g < TEAMS; ++g) {
    all += sums[g];
    result += mixes[g][thread];
  }
  result /= all;
  if (n.gated) {
    const T* gate = static_cast<const T*>(t.query) + int64_t(row) * n.query_stride +
                    int64_t(head) * n.head_stride + n.dim;
    result *= sigmoid(to_float(gate[thread]));
  }
  put(static_cast<T*>(t.y)[(int64_t(row) * n.heads + head) * n.dim + thread], result);
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
