// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
//
// A second choice of kernels for 8-bit products whose shape the first one would mostly fill with padding.

#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct xnn_gemm_config;

// The environment variable XNNFAST_SECOND_ISA names the strongest instruction set of the second choice, with the names
// of isa-cap.c, or is "none". Unset, it is what the processor has besides AMX, and there is no second choice where it
// has no AMX. XNNFAST_SECOND_RATIO is the factor of padding from which on the second choice is taken. Both are read once
// per process.
#define XNNFAST_SECOND_ISA_VARIABLE "XNNFAST_SECOND_ISA"
#define XNNFAST_SECOND_RATIO_VARIABLE "XNNFAST_SECOND_RATIO"
#define XNNFAST_SECOND_RATIO 4.0

// The configuration for a product of `kc` numbers (per element of a window) by `nc` channels (per group): `first`, or
// what `second` returns. NULL if `first` is.
const struct xnn_gemm_config* xnnfast_choose_gemm_config(
    const struct xnn_gemm_config* first, const struct xnn_gemm_config* (*second)(void), size_t kc, size_t nc);

// How often the second was chosen in this process.
size_t xnnfast_second_count(void);

// Name of the limit of the second choice, or NULL where there is no second choice; the factor of padding.
const char* xnnfast_second_isa(void);
double xnnfast_second_ratio(void);

// The second configurations: those of gemm-config.c, compiled once more for what xnnfast_second_hardware_config tells.
const struct xnn_hardware_config* xnnfast_second_hardware_config(void);
const struct xnn_gemm_config* xnnfast_second_qs8_qc8w_gemm_config(void);
const struct xnn_gemm_config* xnnfast_second_qd8_f32_qc8w_gemm_config(void);
const struct xnn_gemm_config* xnnfast_second_qd8_f16_qc8w_gemm_config(void);
const struct xnn_gemm_config* xnnfast_second_qd8_f32_qc4w_gemm_config(void);

#ifdef __cplusplus
}
#endif
