// Rows of a KV cache as they are stored: in the type of the activations, in another float type, or in
// ggml's q8_0 and q5_1 as planes (engines/kv.py says what these are).
#pragma once
#include "device.h"

enum KvKind { KV_OWN, KV_FP32, KV_FP16, KV_BF16, KV_Q8_0, KV_Q5_1 };  // OWN: as the activations
constexpr int MAX_PLANES = 4;
constexpr int KV_BLOCK = 32;  // dims that share a scale: four lanes of eight

// A parameter of its own: as part of `AttendTensors` it costs the kernels for OWN rows registers.
struct KvPlanes {
  int kind;
  void* more[MAX_PLANES - 1];  // after the first; [kv heads, slots, columns] as in engines/kv.py
};
struct KvStorage {
  KvPlanes key, value;
};

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
template <class T>
DEVICE void store_eight(T* to, const float (&from)[8]) {
  union {
    uint4 words[sizeof(T) / 2];
    T values[8];
  } held;
  UNROLL
  for (int i = 0; i < 8; ++i) put(held.values[i], from[i]);
  UNROLL
  for (size_t i = 0; i < sizeof(T) / 2; ++i) reinterpret_cast<uint4*>(to)[i] = held.words[i];
}

// The rows of one kv head; `first` is the row of slot 0, a row has `dim` values. Eight neighbouring
// dims d.. d + 7 are handled at a time.
template <class T, bool OWN>
struct Rows {  // OWN: rows of T
  T* rows;
  int dim;
  METHOD Rows(void* plane, const KvPlanes&, int64_t first, int dim)
      : rows(static_cast<T*>(plane) + first * dim), dim(dim) {}
  METHOD float at(int slot, int d) const { return to_float(rows[int64_t(slot) * dim + d]); }
  METHOD void load(int slot, int d, float (&x)[8]) const {
    load_eight(rows + int64_t(slot) * dim + d, x);
  }
  // What `values` needs; for types of 16 bits.
  METHOD uint4 fetch(int slot, int d) const {
    return *reinterpret_cast<const uint4*>(rows + int64_t(slot) * dim + d);
  }
  METHOD uint4 values(const uint4& fetched) const { return fetched; }
  // By all lanes of a warp, lane l with dims 8 l..; those past the end store nothing.
  METHOD void store(int slot, int d, const float (&x)[8]) const {
    if (d < dim) store_eight(rows + int64_t(slot) * dim + d, x);
  }
  METHOD void store(int slot, int d, const T* from) const {  // eight values of T
    if (d >= dim) return;
    uint4* to = reinterpret_cast<uint4*>(rows + int64_t(slot) * dim + d);
    UNROLL
    for (size_t i = 0; i < sizeof(T) / 2; ++i) to[i] = reinterpret_cast<const uint4*>(from)[i];
  }
};

template <class T>
struct Rows<T, false> {  // whatever `kind` says; values are rounded to T on the way in and out
  void* plane;
  KvPlanes planes;
  int kind, dim;
  int64_t first;
  METHOD Rows(void* plane, const KvPlanes& planes, int64_t first, int dim)
      : plane(plane), planes(planes), kind(planes.kind), dim(dim), first(first) {}

  template <class E>
  METHOD E* place(int i, int slot, int columns, int column) const {
    return static_cast<E*>(i == 0 ? plane : planes.more[i - 1]) + (first + slot) * columns + column;
  }
  METHOD void floats(int slot, int d, float (&x)[8]) const {
    if (kind == KV_FP32) load_eight(place<float>(0, slot, dim, d), x);
    else if (kind == KV_FP16) load_eight(place<fp16>(0, slot, dim, d), x);
    else load_eight(place<bf16>(0, slot, dim, d), x);
  }
  // x, y: codes or nibbles; z: scale, minimum; w: high bits, and 256 if the nibbles are the upper ones.
  METHOD uint4 block_part(int slot, int d) const {
    const int blocks = dim / KV_BLOCK, block = d / KV_BLOCK;
    uint64_t codes;
    uint4 part = {0, 0, 0, 0};
    if (kind == KV_Q8_0) {
      codes = *place<uint64_t>(0, slot, dim / 8, d / 8);
      part.z = *place<uint16_t>(1, slot, blocks, block);
    } else {
      codes = *place<uint64_t>(0, slot, dim / 16, block * 2 + d / 8 % 2);
      part.z = *place<uint16_t>(2, slot, blocks, block) |
               uint32_t(*place<uint16_t>(3, slot, blocks, block)) << 16;
      part.w = *place<uint8_t>(1, slot, dim / 8, d / 8) | uint32_t(d & 16) << 4;
    }
    part.x = uint32_t(codes);
    part.y = uint32_t(codes >> 32);
    return part;
  }
  METHOD void decoded(const uint4& part, float (&x)[8]) const {
    const float scale = to_float(fp16{uint16_t(part.z)});
    const float least = to_float(fp16{uint16_t(part.z >> 16)});
    const int shift = part.w & 256 ? 4 : 0;
    UNROLL
    for (int e = 0; e < 8; ++e) {
      const uint32_t byte = (e < 4 ? part.x : part.y) >> (e % 4 * 8) & 255;
      if (kind == KV_Q8_0) {
        x[e] = product(float(int8_t(byte)), scale);
      } else {
        const uint32_t code = (byte >> shift & 15) | (part.w >> e & 1) << 4;
        x[e] = product(float(code), scale) + least;
      }
    }
  }
  METHOD bool is_float() const { return kind < KV_Q8_0; }

  METHOD void load(int slot, int d, float (&x)[8]) const {
    if (is_float()) floats(slot, d, x);
    else decoded(block_part(slot, d), x);
    UNROLL
    for (int e = 0; e < 8; ++e) x[e] = rounded<T>(x[e]);
  }
  METHOD float at(int slot, int d) const {
    float x[8];
    load(slot, d / 8 * 8, x);
    float value = 0.0f;
    UNROLL
    for (int e = 0; e < 8; ++e) value = d % 8 == e ? x[e] : value;
    return value;
  }
  METHOD uint4 packed(const float (&x)[8]) const {
    union {
      uint4 words;
      T values[8];
    } held;
    UNROLL
    for (int e = 0; e < 8; ++e) put(held.values[e], x[e]);
    return held.words;
  }
  METHOD uint4 fetch(int slot, int d) const {
    if (!is_float()) return block_part(slot, d);
    float x[8];
    floats(slot, d, x);
    return packed(x);
  }
  METHOD uint4 values(const uint4& fetched) const {
    if (is_float()) return fetched;
    float x[8];
    decoded(fetched, x);
    return packed(x);
  }

  METHOD void store(int slot, int d, const float (&values)[8]) const {
    float x[8];
    UNROLL
    for (int e = 0; e < 8; ++e) x[e] = rounded<T>(values[e]);
    if (kind == KV_Q8_0) return store_q8_0(slot, d, x);
    if (kind == KV_Q5_1) return store_q5_1(slot, d, x);
    if (d >= dim) return;
    if (kind == KV_FP32) store_eight(place<float>(0, slot, dim, d), x);
    else if (kind == KV_FP16) store_eight(place<fp16>(0, slot, dim, d), x);
    else store_eight(place<bf16>(0, slot, dim, d), x);
  }
  METHOD void store(int slot, int d, const T* from) const {
    float x[8] = {};
    if (d < dim) load_eight(from, x);
    store(slot, d, x);
  }
  // The next two are ggml's reference rounding, bit for bit.
  METHOD void store_q8_0(int slot, int d, const float (&x)[8]) const {
    float most = 0.0f;
    UNROLL
    for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(x[e]));
    most = fmaxf(most, shuffle_xor(most, 1));
    most = fmaxf(most, shuffle_xor(most, 2));
    const float scale = most / 127.0f, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    uint64_t codes = 0;
    UNROLL
    for (int e = 0; e < 8; ++e) {
      codes |= uint64_t(int(roundf(product(x[e], inverse))) & 255) << (e * 8);
    }
    if (d >= dim) return;
    *place<uint64_t>(0, slot, dim / 8, d / 8) = codes;
    if (d % KV_BLOCK == 0) put(*place<fp16>(1, slot, dim / KV_BLOCK, d / KV_BLOCK), scale);
  }
  METHOD void store_q5_1(int slot, int d, const float (&x)[8]) const {
    float least = x[0], most = x[0];
    UNROLL
    for (int e = 1; e < 8; ++e) {
      least = fminf(least, x[e]);
      most = fmaxf(most, x[e]);
    }
    UNROLL
    for (int mask = 1; mask <= 2; mask *= 2) {
      least = fminf(least, shuffle_xor(least, mask));
      most = fmaxf(most, shuffle_xor(most, mask));
    }
    const float scale = (most - least) / 31.0f, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    uint32_t low[2] = {0, 0}, high = 0;
    UNROLL
    for (int e = 0; e < 8; ++e) {
      const int code = int(product(x[e] - least, inverse) + 0.5f);
      const uint32_t bits = code > 31 ? 31u : uint32_t(code);
      low[e / 4] |= (bits & 15) << (e % 4 * 8);
      high |= (bits >> 4) << e;
    }
    // dims j and j + 16 of a block share a byte: two lanes further
    const uint32_t upper[2] = {uint32_t(shuffle_xor(int(low[0]), 2)),
                               uint32_t(shuffle_xor(int(low[1]), 2))};
    if (d >= dim) return;
    const int block = d / KV_BLOCK, quarter = d / 8 % 4;
    if (quarter < 2) {
      *place<uint64_t>(0, slot, dim / 16, block * 2 + quarter) =
          uint64_t(low[0] | upper[0] << 4) | uint64_t(low[1] | upper[1] << 4) << 32;
    }
    *place<uint8_t>(1, slot, dim / 8, d / 8) = uint8_t(high);
    if (quarter == 0) {
      put(*place<fp16>(2, slot, dim / KV_BLOCK, block), scale);
      put(*place<fp16>(3, slot, dim / KV_BLOCK, block), least);
    }
  }
};
