// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
//
// The order in which matrix products walk over rows and output channels; loop-order.c says why and how.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <pthreadpool.h>

#ifdef __cplusplus
extern "C" {
#endif

// The setting: 0 is upstream's order, 1 the order chosen for each product, and a larger number turns every product and
// says how many bytes of packed filter make a block (for measurements). It starts as the number in the environment
// variable XNNFAST_LOOP_ORDER, else as 1. It is looked up at every run of an operator, so one runtime can be run under
// two settings, and results are the same under all.
#define XNNFAST_LOOP_ORDER_VARIABLE "XNNFAST_LOOP_ORDER"
size_t xnnfast_loop_order(void);
void xnnfast_set_loop_order(size_t setting);

// Bytes of level 2 cache that a core can count on, as the choice assumes them.
size_t xnnfast_l2_bytes(void);

struct compute_parameters;

// To be called before one step of an operator is given to pthreadpool. True when the step was run here; false when it
// is no matrix product, or one for which upstream's order is as good, and nothing was done.
bool xnnfast_run_turned(
    const struct compute_parameters* step, void* context, pthreadpool_t threadpool, uint32_t flags);

#ifdef __cplusplus
}
#endif
