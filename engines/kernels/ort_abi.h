// The part of ONNX Runtime's C interface that a custom-operator library needs, so that it builds where
// only the Python wheel is installed. The interface is a table of functions that only ever grows at
// its end; the numbers are places in that table.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t VERSION = 18;  // the first with an allocator and scratch memory for a kernel

enum ElementType { UNDEFINED = 0, FLOAT = 1, INT8 = 3, INT32 = 6, INT64 = 7, FLOAT16 = 10, BFLOAT16 = 16 };
enum Presence { REQUIRED = 0, OPTIONAL = 1 };
enum ErrorCode { FAIL = 1, INVALID_ARGUMENT = 2 };
enum MemoryType { OWN = 0 };  // that of the provider which runs the kernel

struct Status;
struct Context;
struct Info;
struct Allocator;
struct MemoryInfo;
struct Value;
struct TypeAndShape;
struct SessionOptions;
struct Domain;
struct CustomOp;

struct Api {
  void* table[512];
};
struct ApiBase {
  const Api* (*get)(uint32_t version);
  const char* (*version)();
};

template <int PLACE, class Function>
Function entry(const Api* api) {
  return reinterpret_cast<Function>(api->table[PLACE]);
}
#define ORT_CALL(NAME, PLACE, RESULT, ...)                                                     \
  template <class... Arguments>                                                                \
  inline RESULT NAME(const Api* api, Arguments... arguments) {                                 \
    return entry<PLACE, RESULT (*)(__VA_ARGS__)>(api)(arguments...);                           \
  }
ORT_CALL(create_status, 0, Status*, int, const char*)
ORT_CALL(create_domain, 26, Status*, const char*, Domain**)
ORT_CALL(add_op, 27, Status*, Domain*, const CustomOp*)
ORT_CALL(add_domain, 28, Status*, SessionOptions*, Domain*)
ORT_CALL(tensor_data, 51, Status*, Value*, void**)
ORT_CALL(element_type, 60, Status*, const TypeAndShape*, int*)
ORT_CALL(dimension_count, 61, Status*, const TypeAndShape*, size_t*)
ORT_CALL(dimensions, 62, Status*, const TypeAndShape*, int64_t*, size_t)
ORT_CALL(type_and_shape, 65, Status*, const Value*, TypeAndShape**)
ORT_CALL(allocate, 75, Status*, Allocator*, size_t, void**)
ORT_CALL(free, 76, Status*, Allocator*, void*)
ORT_CALL(allocator_info, 77, Status*, const Allocator*, const MemoryInfo**)
ORT_CALL(attribute_float, 85, Status*, const Info*, const char*, float*)
ORT_CALL(attribute_int, 86, Status*, const Info*, const char*, int64_t*)
ORT_CALL(input_count, 88, Status*, const Context*, size_t*)
ORT_CALL(output_count, 89, Status*, const Context*, size_t*)
ORT_CALL(input, 90, Status*, const Context*, size_t, const Value**)
ORT_CALL(output, 91, Status*, Context*, size_t, const int64_t*, size_t, Value**)
ORT_CALL(release_status, 93, void, Status*)
ORT_CALL(release_type_and_shape, 99, void, TypeAndShape*)
ORT_CALL(release_domain, 101, void, Domain*)
ORT_CALL(release_allocator, 132, void, Allocator*)
ORT_CALL(stream, 193, Status*, const Context*, void**)
ORT_CALL(scratch, 277, Status*, const Context*, const MemoryInfo*, size_t, void**)
ORT_CALL(kernel_allocator, 278, Status*, const Info*, int, Allocator**)
#undef ORT_CALL

struct CustomOp {
  uint32_t version = VERSION;
  void* (*create)(const CustomOp*, const Api*, const Info*) = nullptr;
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  int (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*inputs)(const CustomOp*) = nullptr;
  int (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*outputs)(const CustomOp*) = nullptr;
  void (*compute_old)(void*, Context*) = nullptr;
  void (*destroy)(void*) = nullptr;
  int (*input_presence)(const CustomOp*, size_t) = nullptr;
  int (*output_presence)(const CustomOp*, size_t) = nullptr;
  int (*input_memory)(const CustomOp*, size_t) = nullptr;
  int (*variadic_input_least)(const CustomOp*) = nullptr;
  int (*variadic_input_homogeneous)(const CustomOp*) = nullptr;
  int (*variadic_output_least)(const CustomOp*) = nullptr;
  int (*variadic_output_homogeneous)(const CustomOp*) = nullptr;
  Status* (*create_checked)(const CustomOp*, const Api*, const Info*, void**) = nullptr;
  Status* (*compute)(void*, Context*) = nullptr;
  Status* (*infer)(const CustomOp*, void*) = nullptr;
  int (*start_version)(const CustomOp*) = nullptr;
  int (*end_version)(const CustomOp*) = nullptr;
  void* later[8] = {};  // in-place maps: not used
};

}  // namespace ort
