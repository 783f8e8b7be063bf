// Gated DeltaNet over the many rows of a prompt, in chunks (the WY form), all of it in fp32.
//
// Within a chunk of CHUNK rows, D[i, j] the product of the decays of rows j < l <= i and reach[i] that
// of all rows up to i:
//
//   A[i, j]    = beta[i] (k[i] . k[j]) D[i, j] for j < i      solve = (I + A)^-1 diag(beta)
//   seen[i, j] = (q[i] . k[j]) D[i, j] for j <= i
//   delta      = solve (v - reach k S)
//   out        = reach q S + seen delta
//   S'         = reach[last] S + (D[last, .] k)^T delta
//
// (Yang et al., "Gated Delta Networks", 2024.) The first two lines need no S: `prompt_solve` makes them
// for all chunks at once. The others go from chunk to chunk, but every value column of S for itself:
// `prompt_walk` deals the columns of a head to several blocks. In front `prompt_rows` makes the rows from
// the projections, behind it `prompt_norm` the gated norm. Rows behind the valid ones are not read,
// whatever they hold; their y is 0.
//
// The walk is the long one, as its chunks wait for each other: 32 heads in slices of 32 columns are one block
// each for 128 multiprocessors, with 15 thousand multiplications a row, four fifths of them with S. Were it
// to make the first two lines as well, every slice would for itself, at 16 thousand more.
#pragma once
#include "kernels.h"

constexpr int CHUNK = 64;

struct PromptSizes {
  int rows, padded;  // P, and P in whole chunks
  int width;         // rows of the log
  int key_heads, value_heads, key_dim, value_dim;
  float eps;
  BOTH int keys() const { return key_heads * key_dim; }
  BOTH int values() const { return value_heads * value_dim; }
  BOTH int channels() const { return 2 * keys() + values(); }
};
struct PromptTensors {
  const void *u, *z, *b, *a;  // [P, C] (q, k, v channels), [P, Hv dv], [P, Hv], [P, Hv]
  const void* window;         // [C, 3 + W]
  const float *S, *log_key, *log_delta, *log_decay;
  const int32_t *kept, *valid;
  const float *conv, *rate, *bias, *norm;
  void *y, *next_window;
  float *next_S, *next_key, *next_delta, *next_decay;
  // From one kernel to the next:
  float* qkv;                           // [P, C] behind conv and silu
  float* units;                         // [2, Hk, padded, dk]: unit keys, unit queries over sqrt(dk)
  float *decay, *beta, *reach, *tail;   // [Hv, padded]; tail: D[last, .]
  float *solve, *seen;                  // [Hv, padded, CHUNK]
  float* mixed;                         // [P, Hv dv]
};

DEVICE int within(int x, int most) { return x < 0 ? 0 : x > most ? most : x; }
DEVICE void add_dot(float& sum, const float4& a, const float4& b) {
  sum = fused(a.x, b.x, sum);
  sum = fused(a.y, b.y, sum);
  sum = fused(a.z, b.z, sum);
  sum = fused(a.w, b.w, sum);
}
DEVICE void add_scaled(float (&sums)[4], float a, const float4& b) {
  sums[0] = fused(a, b.x, sums[0]);
  sums[1] = fused(a, b.y, sums[1]);
  sums[2] = fused(a, b.z, sums[2]);
  sums[3] = fused(a, b.w, sums[3]);
}

// ---------------------------------------------------------------------------------------------
// What concerns single rows: convolution and silu of eight channels a thread, gates, the next window
// (the last three inputs), and a log of zeros, of which the next call keeps none.

constexpr int ROWS_THREADS = 128;
constexpr int ROWS_EACH = 8;  // rows of a block

template <class T>
KERNEL(ROWS_THREADS, 1)
prompt_rows(PromptTensors t, PromptSizes n) {
  wait_for_inputs();
  let_next_start();
  constexpr int history = CONV - 1;
  const int thread = int(blockIdx.x) * ROWS_THREADS + int(threadIdx.x), c = thread * 8;
  const int channels = n.channels(), first = int(blockIdx.y) * ROWS_EACH, wide = history + n.width;
  const int kept = within(t.kept[0], n.width), valid = within(t.valid[0], n.rows);
  const int after = first + ROWS_EACH < valid ? first + ROWS_EACH : valid;
  const T* u = static_cast<const T*>(t.u);
  const T* window = static_cast<const T*>(t.window);

  const int across = int(gridDim.x) * ROWS_THREADS, threads = across * int(gridDim.y);
  const int pairs = ROWS_EACH * n.value_heads;
  for (int i = thread; i < pairs; i += across) {
    const int row = first + i / n.value_heads, head = i % n.value_heads;
    if (row >= after) break;
    const int64_t place = int64_t(row) * n.value_heads + head;
    const float a = to_float(static_cast<const T*>(t.a)[place]) + t.bias[head];
    const float softplus = a > 20.0f ? a : log1pf(expf(a));
    t.decay[int64_t(head) * n.padded + row] = expf(-expf(t.rate[head]) * softplus);
    t.beta[int64_t(head) * n.padded + row] = sigmoid(to_float(static_cast<const T*>(t.b)[place]));
  }
  const int any = int(blockIdx.y) * across + thread;
  for (int i = any; i < n.width * n.keys(); i += threads) t.next_key[i] = 0.0f;
  for (int i = any; i < n.width * n.values(); i += threads) t.next_delta[i] = 0.0f;
  for (int i = any; i < n.width * n.value_heads; i += threads) t.next_decay[i] = 0.0f;
  if (c >= channels) return;
  auto past = [&](int row, int channel) {  // an input before row 0
    return window[int64_t(channel) * wide + kept + history + row];
  };
  if (blockIdx.y == 0) {
    T* next = static_cast<T*>(t.next_window) + int64_t(c) * wide;
    for (int e = 0; e < 8; ++e) {
      for (int j = 0; j < wide; ++j) {
        const int row = valid - history + j;
        if (j >= history) put(next[e * wide + j], 0.0f);
        else next[e * wide + j] = row < 0 ? past(row, c + e) : u[int64_t(row) * channels + c + e];
      }
    }
  }
  float4 taps[8];
  float line[CONV][8];
  UNROLL
  for (int e = 0; e < 8; ++e) taps[e] = reinterpret_cast<const float4*>(t.conv)[c + e];
  UNROLL
  for (int j = 0; j < history; ++j) {
    const int row = first - history + j;
    if (row >= after) continue;
    if (row >= 0) {
      load_eight(u + int64_t(row) * channels + c, line[j]);
    } else {
      for (int e = 0; e < 8; ++e) line[j][e] = to_float(past(row, c + e));
    }
  }
  UNROLL
  for (int r = 0; r < ROWS_EACH; ++r) {
    if (first + r >= after) return;
    load_eight(u + int64_t(first + r) * channels + c, line[history]);
    float sums[8];
    UNROLL
    for (int e = 0; e < 8; ++e) {
      float sum = fused(taps[e].x, line[0][e], 0.0f);
      sum = fused(taps[e].y, line[1][e], sum);
      sum = fused(taps[e].z, line[2][e], sum);
      sum = rounded<T>(fused(taps[e].w, line[3][e], sum));
      sums[e] = rounded<T>(sum * sigmoid(sum));
      UNROLL
      for (int j = 0; j < history; ++j) line[j][e] = line[j + 1][e];
    }
    store_eight(t.qkv + int64_t(first + r) * channels + c, sums);
  }
}

// ---------------------------------------------------------------------------------------------
// What a chunk needs of its own rows alone. One block a chunk and key head: the products of queries and
// keys are those of all its value heads.

constexpr int SOLVE_THREADS = 256;
constexpr int TALL = CHUNK + 1;  // padded against bank conflicts

template <int DK>
constexpr size_t solve_bytes() {
  constexpr size_t rows = 2 * CHUNK * (DK + 4), squares = 2 * CHUNK * TALL + CHUNK / 2 * CHUNK / 2;
  return sizeof(float) * (rows > squares ? rows : squares);
}

// The inverse of I + A, A strictly lower triangular, into `T`, which holds the identity; by blocks that
// double: with those of `size` on the diagonal inverted, the block below the diagonal of one of twice the
// size is -T B T, B being the same part of A. (Powers of A would grow past fp32 for equal keys.)
DEVICE void invert(const float (*A)[TALL], float (*T)[TALL], float* product_of) {
  const int thread = int(threadIdx.x);
  for (int size = 1; size < CHUNK; size *= 2) {
    const int outputs = CHUNK / 2 * size;
    for (int turn = 0; turn < 2; ++turn) {  // B T, then -T (B T)
      for (int o = thread; o < outputs; o += SOLVE_THREADS) {
        const int i = o / size % size, j = o % size, upper = o / (size * size) * 2 * size;
        const int lower = upper + size;
        float* block = product_of + o - i * size - j;
        float sum = 0.0f;
        if (turn == 0) {
          UNROLL_BY_4
          for (int l = j; l < size; ++l) sum = fused(A[lower + i][upper + l], T[upper + l][upper + j], sum);
          block[i * size + j] = sum;
        } else {
          UNROLL_BY_4
          for (int l = 0; l <= i; ++l) sum = fused(T[lower + i][lower + l], block[l * size + j], sum);
          T[lower + i][upper + j] = -sum;
        }
      }
      sync_block();
    }
  }
}

template <int DK>
KERNEL(SOLVE_THREADS, 2)
prompt_solve(PromptTensors t, PromptSizes n) {
  constexpr int WIDE = DK + 4, EACH = DK < 32 ? 1 : DK / 32, WARPS = SOLVE_THREADS / 32;
  constexpr int SIDE = 16, TILE = CHUNK / SIDE;  // a thread has TILE x TILE results, SIDE apart
  SHARED_POOL(shared);
  SHARED float decay[CHUNK], beta[CHUNK];
  float(*key)[WIDE] = reinterpret_cast<float(*)[WIDE]>(shared);
  float(*query)[WIDE] = key + CHUNK;
  float(*A)[TALL] = reinterpret_cast<float(*)[TALL]>(shared);  // first it holds D
  float(*T)[TALL] = A + CHUNK;
  float* between = &T[CHUNK][0];
  wait_for_inputs();
  let_next_start();
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int begin = int(blockIdx.x) * CHUNK, key_head = int(blockIdx.y);
  const int valid = within(t.valid[0], n.rows);
  if (begin >= valid) return;

  // Unit keys and queries, a warp a vector, EACH neighbouring dims a lane.
  UNROLL_BY_4
  for (int u = 0; u < 2 * CHUNK / WARPS; ++u) {
    const int i = warp + u * WARPS, r = i % CHUNK, row = begin + r;
    const bool asks = i >= CHUNK;
    const float* from = t.qkv + int64_t(row) * n.channels() + (asks ? 0 : n.keys()) + key_head * DK;
    float x[EACH], square = 0.0f;
    UNROLL
    for (int e = 0; e < EACH; ++e) {
      const int d = lane * EACH + e;
      x[e] = row < valid && d < DK ? from[d] : 0.0f;
      square = fused(x[e], x[e], square);
    }
    const float scale = asks ? 1.0f / sqrtf(float(DK)) : 1.0f;
    const float length = sqrtf(sum_of_warp(square) + 1e-6f);
    const int64_t place = (int64_t(asks ? n.key_heads : 0) + key_head) * n.padded + row;
    UNROLL
    for (int e = 0; e < EACH; ++e) {
      const int d = lane * EACH + e;
      if (d >= DK) continue;
      key[i][d] = x[e] / length * scale;  // the queries stand behind the keys
      t.units[place * DK + d] = key[i][d];
    }
  }
  sync_block();
  const int i0 = thread / SIDE, j0 = thread % SIDE;
  float among[TILE][TILE] = {}, asked[TILE][TILE] = {};  // k k^T and q k^T
  UNROLL_BY_2
  for (int d = 0; d < DK; d += 4) {
    float4 right[TILE];
    UNROLL
    for (int b = 0; b < TILE; ++b) right[b] = *reinterpret_cast<const float4*>(&key[j0 + b * SIDE][d]);
    UNROLL
    for (int a = 0; a < TILE; ++a) {
      const float4 k = *reinterpret_cast<const float4*>(&key[i0 + a * SIDE][d]);
      const float4 q = *reinterpret_cast<const float4*>(&query[i0 + a * SIDE][d]);
      UNROLL
      for (int b = 0; b < TILE; ++b) {
        add_dot(among[a][b], k, right[b]);
        add_dot(asked[a][b], q, right[b]);
      }
    }
  }

  const int group = n.value_heads / n.key_heads;
  for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
    const int64_t rows = int64_t(head) * n.padded + begin;
    sync_block();  // what stood in shared memory is read
    if (thread < CHUNK) {
      const bool counts = begin + thread < valid;
      decay[thread] = counts ? t.decay[rows + thread] : 1.0f;
      beta[thread] = counts ? t.beta[rows + thread] : 0.0f;
    }
    sync_block();

    // D: a thread a column and a quarter of the rows. Products, as S itself is multiplied row by row: the
    // difference of two sums of logarithms would lose the digits that they share.
    constexpr int SHARE = CHUNK * CHUNK / SOLVE_THREADS;
    const int j = thread % CHUNK, from = thread / CHUNK * SHARE;
    float fade = 1.0f;
    for (int i = 0; i < from + SHARE; ++i) {
      if (i > j) fade = product(fade, decay[i]);
      if (i >= from) A[i][j] = i < j ? 0.0f : fade;
    }
    if (from + SHARE == CHUNK) t.tail[rows + j] = fade;
    if (from == 0) {
      float all = 1.0f;
      for (int i = 0; i <= j; ++i) all = product(all, decay[i]);
      t.reach[rows + j] = all;
    }
    sync_block();
    UNROLL
    for (int a = 0; a < TILE; ++a) {
      UNROLL
      for (int b = 0; b < TILE; ++b) {
        const int i = i0 + a * SIDE, j = j0 + b * SIDE;
        const float D = A[i][j];
        t.seen[(rows + i) * CHUNK + j] = asked[a][b] * D;
        A[i][j] = j < i ? beta[i] * among[a][b] * D : 0.0f;
        T[i][j] = i == j ? 1.0f : 0.0f;
      }
    }
    sync_block();
    invert(A, T, between);
    for (int o = thread; o < CHUNK * CHUNK; o += SOLVE_THREADS) {
      t.solve[rows * CHUNK + o] = T[o / CHUNK][o % CHUNK] * beta[o % CHUNK];
    }
  }
}

// ---------------------------------------------------------------------------------------------
// From chunk to chunk: COLUMNS value columns of one head (32; 8 for value dims that are no multiple of that,
// with few threads and too few registers), S in shared memory and, for its update, four columns of DEPTH
// neighbouring rows in the registers of each thread. The kept rows of the last call come first, by the
// operations of the decode kernels.

constexpr int LINES = 32;  // a thread takes four columns of every LINES-th row
constexpr int SQUARE = CHUNK + 4;

template <int COLUMNS>
constexpr int WALK_THREADS = LINES * COLUMNS / 4;
template <int DK, int COLUMNS>
constexpr size_t walk_bytes() {
  constexpr int WIDE = DK + 4, LOWER = WIDE > SQUARE ? WIDE : SQUARE;
  return sizeof(float) * (CHUNK * (WIDE + LOWER) + (DK + 2 * CHUNK) * COLUMNS);
}

// sums += rows of `left` (`step` floats apart) times four columns of `right`, over DEPTH of both.
template <int COLUMNS, int DEPTH, int ROWS>
DEVICE void add_product(float (&sums)[ROWS][4], const float* left, int step, const float* right) {
  UNROLL_BY_4
  for (int l = 0; l < DEPTH; l += 4) {
    float4 x[ROWS];
    UNROLL
    for (int a = 0; a < ROWS; ++a) x[a] = *reinterpret_cast<const float4*>(left + a * step + l);
    UNROLL
    for (int e = 0; e < 4; ++e) {
      const float4 y = *reinterpret_cast<const float4*>(right + (l + e) * COLUMNS);
      UNROLL
      for (int a = 0; a < ROWS; ++a) {
        add_scaled(sums[a], e == 0 ? x[a].x : e == 1 ? x[a].y : e == 2 ? x[a].z : x[a].w, y);
      }
    }
  }
}
// The same for a lower triangle and the rows `line` and `line` + LINES: half of the first is zero.
template <int COLUMNS>
DEVICE void add_triangle(float (&sums)[2][4], const float* square, int line, const float* right) {
  add_product<COLUMNS, LINES>(sums, square + line * SQUARE, LINES * SQUARE, right);
  float below[1][4] = {{sums[1][0], sums[1][1], sums[1][2], sums[1][3]}};
  const float* rest = square + (line + LINES) * SQUARE + LINES;
  add_product<COLUMNS, CHUNK - LINES>(below, rest, 0, right + LINES * COLUMNS);
  UNROLL
  for (int e = 0; e < 4; ++e) sums[1][e] = below[0][e];
}

template <int DK, int COLUMNS>
KERNEL(WALK_THREADS<COLUMNS>, 1)
prompt_walk(PromptTensors t, PromptSizes n) {
  static_assert(CHUNK == 2 * LINES, "a thread has two rows of a chunk");
  constexpr int THREADS = WALK_THREADS<COLUMNS>, GROUPS = COLUMNS / 4, WIDE = DK + 4;
  constexpr int LOWER = WIDE > SQUARE ? WIDE : SQUARE, DEPTH = DK < LINES ? 1 : DK / LINES;
  constexpr int VECTORS = 2 * CHUNK * DK / 4 / THREADS, PIECES = CHUNK * CHUNK / 4 / THREADS;
  SHARED_POOL(shared);
  float* key = reinterpret_cast<float*>(shared);  // [CHUNK][WIDE]
  float* query = key + CHUNK * WIDE;              // [CHUNK][WIDE], then solve, then seen [CHUNK][SQUARE]
  float* square = query;
  float* S = query + CHUNK * LOWER;               // [DK][COLUMNS]
  float* value = S + DK * COLUMNS;                // [CHUNK][COLUMNS]: v - reach k S, then tail delta
  float* delta = value + CHUNK * COLUMNS;         // [CHUNK][COLUMNS]
  const int thread = int(threadIdx.x), line = thread / GROUPS, column = thread % GROUPS * 4;
  const int head = int(blockIdx.y), first = int(blockIdx.x) * COLUMNS, k0 = line * DEPTH;
  const int dv = n.value_dim, key_head = head / (n.value_heads / n.key_heads);
  const bool holds = k0 < DK;
  const int64_t base = (int64_t(head) * DK + k0) * dv + first + column;
  wait_for_inputs();
  let_next_start();

  float state[DEPTH][4] = {};
  auto show = [&] {  // this thread's part of S to the others
    UNROLL
    for (int a = 0; a < DEPTH; ++a) {
      const float4 x = {state[a][0], state[a][1], state[a][2], state[a][3]};
      if (holds) *reinterpret_cast<float4*>(S + (k0 + a) * COLUMNS + column) = x;
    }
  };
  UNROLL
  for (int a = 0; a < DEPTH; ++a) {
    UNROLL
    for (int e = 0; e < 4; ++e) state[a][e] = holds ? t.S[base + int64_t(a) * dv + e] : 0.0f;
  }
  const int kept = within(t.kept[0], n.width), valid = within(t.valid[0], n.rows);
  for (int r = 0; r < kept; ++r) {
    const float* past = t.log_key + (int64_t(r) * n.key_heads + key_head) * DK + k0;
    const int64_t place = int64_t(r) * n.value_heads + head;
    const float fade = t.log_decay[place];
    UNROLL
    for (int e = 0; e < 4; ++e) {
      const float change = t.log_delta[place * dv + first + column + e];
      UNROLL
      for (int a = 0; a < DEPTH; ++a) {
        if (holds) state[a][e] = fused(past[a], change, product(state[a][e], fade));
      }
    }
  }
  show();

  // Global memory is read into registers while something else is computed.
  const int64_t head_size = int64_t(n.padded) * DK, rows = int64_t(head) * n.padded;
  const float* units = t.units + key_head * head_size;
  float4 vectors[VECTORS], pieces[PIECES], held[2];
  float reach[2], tail[2], whole = 1.0f;
  auto fetch_chunk = [&](int begin) {
    UNROLL
    for (int u = 0; u < VECTORS; ++u) {  // keys, then queries
      const int o = (thread + u * THREADS) * 4;
      const float* from = units + o / (CHUNK * DK) * n.key_heads * head_size + int64_t(begin) * DK;
      vectors[u] = *reinterpret_cast<const float4*>(from + o % (CHUNK * DK));
    }
    UNROLL
    for (int a = 0; a < 2; ++a) {  // what concerns this thread's rows
      const int row = begin + line + a * LINES, c = 2 * n.keys() + head * dv + first + column;
      const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
      const float* from = t.qkv + int64_t(row) * n.channels() + c;
      held[a] = row < valid ? *reinterpret_cast<const float4*>(from) : zero;
      reach[a] = t.reach[rows + row];
      tail[a] = t.tail[rows + row];
    }
    whole = t.reach[rows + begin + CHUNK - 1];
  };
  auto put_vectors = [&] {
    UNROLL
    for (int u = 0; u < VECTORS; ++u) {
      const int o = (thread + u * THREADS) * 4;  // queries stand behind the keys
      *reinterpret_cast<float4*>(key + o / DK * WIDE + o % DK) = vectors[u];
    }
  };
  auto fetch_square = [&](const float* from, int begin) {
    from += (rows + begin) * CHUNK;
    UNROLL
    for (int u = 0; u < PIECES; ++u) pieces[u] = reinterpret_cast<const float4*>(from)[thread + u * THREADS];
  };
  auto put_square = [&] {
    UNROLL
    for (int u = 0; u < PIECES; ++u) {
      const int o = (thread + u * THREADS) * 4;
      *reinterpret_cast<float4*>(square + o / CHUNK * SQUARE + o % CHUNK) = pieces[u];
    }
  };

  if (valid > 0) fetch_chunk(0);
  for (int begin = 0; begin < valid; begin += CHUNK) {
    put_vectors();
    fetch_square(t.solve, begin);
    sync_block();

    float both[4][4] = {}, change[2][4] = {}, out[2][4];  // both: of k S and of q S two rows each
    add_product<COLUMNS, DK>(both, key + line * WIDE, LINES * WIDE, S + column);
    UNROLL
    for (int a = 0; a < 2; ++a) {
      const float4 x = {held[a].x - reach[a] * both[a][0], held[a].y - reach[a] * both[a][1],
                        held[a].z - reach[a] * both[a][2], held[a].w - reach[a] * both[a][3]};
      *reinterpret_cast<float4*>(value + (line + a * LINES) * COLUMNS + column) = x;
      UNROLL
      for (int e = 0; e < 4; ++e) out[a][e] = reach[a] * both[a + 2][e];
    }
    sync_block();
    put_square();
    fetch_square(t.seen, begin);
    sync_block();

    add_triangle<COLUMNS>(change, square, line, value + column);
    sync_block();
    put_square();
    UNROLL
    for (int a = 0; a < 2; ++a) {
      const int place = (line + a * LINES) * COLUMNS + column;
      const float4 x = {change[a][0], change[a][1], change[a][2], change[a][3]};
      const float4 late = {tail[a] * x.x, tail[a] * x.y, tail[a] * x.z, tail[a] * x.w};
      *reinterpret_cast<float4*>(delta + place) = x;
      *reinterpret_cast<float4*>(value + place) = late;
    }
    const float fade = whole;
    if (begin + CHUNK < valid) fetch_chunk(begin + CHUNK);
    sync_block();

    add_triangle<COLUMNS>(out, square, line, delta + column);
    UNROLL
    for (int a = 0; a < 2; ++a) {
      const int row = begin + line + a * LINES;
      const float4 x = {out[a][0], out[a][1], out[a][2], out[a][3]};
      float* to = t.mixed + int64_t(row) * n.values() + head * dv + first + column;
      if (row < valid) *reinterpret_cast<float4*>(to) = x;
    }
    UNROLL
    for (int a = 0; a < DEPTH; ++a) {
      UNROLL
      for (int e = 0; e < 4; ++e) state[a][e] = product(state[a][e], fade);
    }
    if (holds) {
      UNROLL_BY_4
      for (int r = 0; r < CHUNK; ++r) {
        union {
          float4 four;
          float each[4];
        } k;
        if (DEPTH == 4) k.four = *reinterpret_cast<const float4*>(key + r * WIDE + k0);
        else for (int a = 0; a < DEPTH; ++a) k.each[a] = key[r * WIDE + k0 + a];
        const float4 y = *reinterpret_cast<const float4*>(value + r * COLUMNS + column);
        UNROLL
        for (int a = 0; a < DEPTH; ++a) add_scaled(state[a], k.each[a], y);
      }
    }
    show();
    sync_block();
  }
  UNROLL
  for (int a = 0; a < DEPTH; ++a) {
    const float4 x = {state[a][0], state[a][1], state[a][2], state[a][3]};
    if (holds) *reinterpret_cast<float4*>(t.next_S + base + int64_t(a) * dv) = x;
  }
}

// ---------------------------------------------------------------------------------------------
// RMSNorm over the outputs of a head, times silu(z); a warp a row and head.

constexpr int PROMPT_NORM_THREADS = 256;

template <class T>
KERNEL(PROMPT_NORM_THREADS, 1)
prompt_norm(PromptTensors t, PromptSizes n) {
  wait_for_inputs();
  let_next_start();
  const int lane = int(threadIdx.x) % 32, dv = n.value_dim;
  const int item = int(blockIdx.x) * (PROMPT_NORM_THREADS / 32) + int(threadIdx.x) / 32;
  const int row = item / n.value_heads;
  if (row >= n.rows) return;
  const bool counts = row < t.valid[0];
  const int64_t place = int64_t(item) * dv;
  float x[MAX_DIM / 32], square = 0.0f;
  UNROLL
  for (int j = 0; j < MAX_DIM / 32; ++j) {
    const int d = lane + j * 32;
    x[j] = counts && d < dv ? t.mixed[place + d] : 0.0f;
    square = fused(x[j], x[j], square);
  }
  const float scale = 1.0f / sqrtf(sum_of_warp(square) / float(dv) + n.eps);
  UNROLL
  for (int j = 0; j < MAX_DIM / 32; ++j) {
    const int d = lane + j * 32;
    if (d >= dv) continue;
    const float z = counts ? to_float(static_cast<const T*>(t.z)[place + d]) : 0.0f;
    put(static_cast<T*>(t.y)[place + d], x[j] * scale * t.norm[d] * (z * sigmoid(z)));
  }
}

// ---------------------------------------------------------------------------------------------
// silu(gate) * up, eight values a thread.

constexpr int SWIGLU_THREADS = 256;

template <class T>
KERNEL(SWIGLU_THREADS, 1)
silu_mul(const T* gate, const T* up, int64_t count, T* y) {
  wait_for_inputs();
  let_next_start();
  const int64_t i = (int64_t(blockIdx.x) * SWIGLU_THREADS + int(threadIdx.x)) * 8;
  if (i >= count) return;
  float x[8], other[8];
  load_eight(gate + i, x);
  load_eight(up + i, other);
  UNROLL
  for (int e = 0; e < 8; ++e) x[e] = x[e] * sigmoid(x[e]) * other[e];
  store_eight(y + i, x);
}
