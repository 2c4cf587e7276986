// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
#include "immintrin.h"
