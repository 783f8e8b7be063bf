#!/usr/bin/env bash
# TensorRT 8.6 is linked to cuBLAS 12; on a machine that has only cuBLAS 13 this makes libraries of
# the old names whose functions jump to those of the new ones.
#
#   tests/gpu/cublas_shim.sh FOLDER_OF_LIBCUBLAS_13 OUT      then put OUT first in LD_LIBRARY_PATH
#
# Needs gcc and nm. The functions that TensorRT calls have the same signatures in both versions.
set -euo pipefail
real=$(realpath "$1") out=$(realpath -m "$2")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

shim() {  # NAME: NAME.so.12 from NAME.so.13
  local name=$1
  nm -D --defined-only "$real/$name.so.13" | awk '$2 == "T" {sub(/@.*/, "", $3); print $3}' |
    sort -u >"$work/names"
  {
    awk '{printf ".globl %s\n.type %s, @function\n%s: jmp *table+%d(%%rip)\n", $1, $1, $1, 8 * (NR - 1)}' "$work/names"
    echo '.section .note.GNU-stack,"",@progbits'
  } >"$work/jumps.s"
  {
    printf '#include <dlfcn.h>\nstatic int missing(void) { return 15; }  // CUBLAS_STATUS_NOT_SUPPORTED\n'
    echo 'static const char* const names[] = {'
    sed 's/.*/"&",/' "$work/names"
    echo '};'
    echo '__attribute__((visibility("hidden"))) void* table[sizeof names / sizeof *names];'
    echo '__attribute__((constructor)) static void fill(void) {'
    echo "  void* real = dlopen(\"$real/$name.so.13\", RTLD_NOW | RTLD_LOCAL);"
    echo '  for (unsigned i = 0; i < sizeof names / sizeof *names; ++i) {'
    echo '    void* found = real ? dlsym(real, names[i]) : 0;'
    echo '    table[i] = found ? found : (void*)missing;'
    echo '  }'
    echo '}'
  } >"$work/fill.c"
  echo "$name.so.12 { global: *; };" >"$work/versions"
  gcc -shared -fPIC -O1 -Wl,-soname,"$name.so.12" -Wl,--version-script="$work/versions" \
    -o "$out/$name.so.12" "$work/jumps.s" "$work/fill.c" -ldl
  echo "$out/$name.so.12: $(wc -l <"$work/names") functions"
}

shim libcublas
shim libcublasLt
