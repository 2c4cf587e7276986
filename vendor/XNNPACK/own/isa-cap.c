// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.

#include "xnnfast/isa-cap.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "xnnpack/common.h"
#include "xnnpack/hardware-config.h"

struct level {
  const char* name;
  size_t flag;  // the place of its bool in struct xnn_hardware_config
};

#define LEVEL(name, field) {name, offsetof(struct xnn_hardware_config, field)}

// What no flag stands for, since every processor of the architecture has it.
#define BASELINE ((size_t) -1)

// Weakest first. Kernels of 256 bits that use AVX-512's registers stand before AVX-512 itself, because XNNPACK prefers
// the latter: so each name caps to the kernels that bear it.
static const struct level levels[] = {
#if XNN_ARCH_X86 || XNN_ARCH_X86_64
    {"sse2", BASELINE},
    LEVEL("ssse3", use_x86_ssse3),
    LEVEL("sse4.1", use_x86_sse4_1),
    LEVEL("avx", use_x86_avx),
    LEVEL("f16c", use_x86_f16c),
    LEVEL("fma3", use_x86_fma3),
    LEVEL("avx2", use_x86_avx2),
    LEVEL("avxvnni", use_x86_avxvnni),
    LEVEL("avxvnniint8", use_x86_avxvnniint8),
    LEVEL("avx256skx", use_x86_avx256skx),
    LEVEL("avx256vnni", use_x86_avx256vnni),
    LEVEL("avx256vnnigfni", use_x86_avx256vnnigfni),
    LEVEL("avx512f", use_x86_avx512f),
    LEVEL("avx512skx", use_x86_avx512skx),
    LEVEL("avx512vbmi", use_x86_avx512vbmi),
    LEVEL("avx512vnni", use_x86_avx512vnni),
    LEVEL("avx512vnnigfni", use_x86_avx512vnnigfni),
    LEVEL("avx512fp16", use_x86_avx512fp16),
    LEVEL("avx512amx", use_x86_avx512amx),
#elif XNN_ARCH_ARM64
    {"neon", BASELINE},
    LEVEL("neonfp16arith", use_arm_neon_fp16_arith),
    LEVEL("neondot", use_arm_neon_dot),
    LEVEL("neonbf16", use_arm_neon_bf16),
    LEVEL("neoni8mm", use_arm_neon_i8mm),
    LEVEL("sve", use_arm_sve),
    LEVEL("sve2", use_arm_sve2),
    LEVEL("sme", use_arm_sme),
    LEVEL("sme2", use_arm_sme2),
#else
    {"baseline", BASELINE},
#endif
};

enum { COUNT = sizeof(levels) / sizeof(levels[0]) };

const char* xnnfast_isa_name(int index) {
  return index >= 0 && index < COUNT ? levels[index].name : NULL;
}

bool xnnfast_cap_isa_to(struct xnn_hardware_config* config, const char* limit) {
  bool taken = false;
  int i = 0;
  while (i < COUNT && strcmp(levels[i].name, limit) != 0) {
    i++;
  }
  for (i++; i < COUNT; i++) {
    bool* const flag = (bool*) ((char*) config + levels[i].flag);
    taken = taken || *flag;
    *flag = false;
  }
#if XNN_ARCH_ARM64
  // The scalar half of the same extension has a flag of its own.
  config->use_arm_fp16_arith = config->use_arm_fp16_arith && config->use_arm_neon_fp16_arith;
#endif
  return taken;
}

void xnnfast_cap_isa(struct xnn_hardware_config* config) {
  const char* limit = getenv(XNNFAST_ISA_VARIABLE);
  if (limit != NULL) {
    xnnfast_cap_isa_to(config, limit);
  }
}
