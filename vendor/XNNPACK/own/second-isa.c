// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
//
// A tile of AMX holds 64 numbers of a row of the input and makes results for 64 channels, used or not. The first layer
// of a network for images has 3 channels: 61 of 64 numbers are padding, and AMX loses against AVX512-VNNI, whose
// kernels pad to 8 numbers and 16 channels. Which is better is a matter of the shape, so it is decided for each operator
// when it is made, as filters are packed differently.
//
// How it is decided. With both factors padded, a product costs about (numbers) * (channels) / speed. The ratio of the
// speeds is 8 by what the units can do, and about 2.5 in the layers of an 8-bit ResNet-50 whose padding is small; for
// a window of 3 x 3 pixels of 3 channels by 32 channels, the padded sizes differ by 16 and the times by 2.3, the other
// way round: a ratio of 7. The default takes 4, between the two.

#include "xnnfast/second-isa.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "xnnfast/isa-cap.h"
#include "xnnpack/common.h"
#include "xnnpack/config-types.h"
#include "xnnpack/hardware-config.h"
#include "xnnpack/init-once.h"
#include "xnnpack/math.h"

static struct xnn_hardware_config hardware;
static const char* limit = NULL;
static double ratio = XNNFAST_SECOND_RATIO;
static size_t count = 0;

XNN_INIT_ONCE_GUARD(second_hardware);

static void init_second_hardware_config(void) {
  const struct xnn_hardware_config* first = xnn_init_hardware_config();
  const char* text = getenv(XNNFAST_SECOND_RATIO_VARIABLE);
  const char* name = getenv(XNNFAST_SECOND_ISA_VARIABLE);
  if (first == NULL) {
    return;
  }
  if (text != NULL) {
    const double number = strtod(text, NULL);
    ratio = number > 0 ? number : ratio;
  }
  hardware = *first;
#if XNN_ARCH_X86 || XNN_ARCH_X86_64
  if (name == NULL) {
    name = "avx512fp16";
  }
#endif
  for (int i = 0; name != NULL && xnnfast_isa_name(i) != NULL; i++) {
    if (strcmp(name, xnnfast_isa_name(i)) == 0 && xnnfast_cap_isa_to(&hardware, name)) {
      limit = xnnfast_isa_name(i);
    }
  }
}

const struct xnn_hardware_config* xnnfast_second_hardware_config(void) {
  XNN_INIT_ONCE(second_hardware);
  return &hardware;
}

const char* xnnfast_second_isa(void) {
  XNN_INIT_ONCE(second_hardware);
  return limit;
}

double xnnfast_second_ratio(void) {
  XNN_INIT_ONCE(second_hardware);
  return ratio;
}

size_t xnnfast_second_count(void) { return __atomic_load_n(&count, __ATOMIC_RELAXED); }

static double padded(
    const struct xnn_gemm_config* config, const struct xnn_hardware_config* selected, size_t kc, size_t nc) {
  size_t step = (size_t) 1 << (config->log2_kr + config->log2_sr);
#if XNN_ARCH_X86 || XNN_ARCH_X86_64
  if (selected->use_x86_avx512amx) {
    // A row of a tile. The kernels cut the last one short, but that spares no time.
    step = 64;
  }
#endif
  return (double) (divide_round_up(kc, step) * step) * (double) (divide_round_up(nc, config->nr) * config->nr);
}

const struct xnn_gemm_config* xnnfast_choose_gemm_config(
    const struct xnn_gemm_config* first, const struct xnn_gemm_config* (*second)(void), size_t kc, size_t nc) {
  if (first == NULL || kc == 0 || nc == 0 || xnnfast_second_isa() == NULL) {
    return first;
  }
  const struct xnn_gemm_config* other = second();
  // A configuration that the weaker instruction sets have no kernels for is all zeros.
  if (other == NULL || other->mr == 0 || other->nr == 0 ||
      padded(first, xnn_init_hardware_config(), kc, nc) < ratio * padded(other, &hardware, kc, nc)) {
    return first;
  }
  __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
  return other;
}
