// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
//
// An upper limit on the instruction sets that XNNPACK selects kernels for.

#pragma once

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct xnn_hardware_config;

// The environment variable XNNFAST_ISA names the strongest instruction set that may be selected. XNNPACK detects once
// per process, at its first use, so the variable must be set before that.
#define XNNFAST_ISA_VARIABLE "XNNFAST_ISA"

// Takes from a fresh detection what is stronger than the limit. A name that is not known limits nothing: this code has
// nobody to tell, so whoever starts XNNPACK should look for the name in the list below first.
void xnnfast_cap_isa(struct xnn_hardware_config* config);

// The same with the limit given; whether anything was taken.
bool xnnfast_cap_isa_to(struct xnn_hardware_config* config, const char* limit);

// The names a limit may have on this architecture, weakest first; NULL past the last.
const char* xnnfast_isa_name(int index);

#ifdef __cplusplus
}
#endif
