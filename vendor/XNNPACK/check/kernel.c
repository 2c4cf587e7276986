// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
//
// One matrix product kernel of XNNPACK against plain loops, over a grid of shapes. check_kernels.py compiles this beside
// the kernel's source and defines
//     KERNEL          its name
//     MR NR KR        its tile, and how many neighbours along the sum lie together in the packed filter
//     IGEMM           1 for a kernel that takes its rows from a table of pointers
//     X               input: 'q' (qs8), 'd' (qd8), 'h' (fp16)
//     NIBBLES         1 if the filter has 4 bits
//     OUT             'b' (int8), 'f' (fp32), 'h' (fp16)
// Arguments are the seed and the step: every step-th shape of the grid is run, from (seed mod step) on. Prints lines
//     wrong MR NC KC KS row column got wanted
//     fault REASON
//     done SHAPES WRONG
// and ends with 0 if nothing was wrong, 1 if something was, 3 after a fault.
//
// Buffers end at a page that can't be touched, less what XNNPACK's contract permits: 16 bytes behind inputs, none behind
// outputs, XNN_EXTRA_QUANTIZATION_PARAMS entries behind the parameters of rows. Input behind a row holds rubbish, filters
// behind the last channel hold rubbish, and outputs must stay as they were outside the result.

#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "xnnpack/gemm.h"
#include "xnnpack/igemm.h"
#include "xnnpack/fp16.h"

#define MAX_K 320
#define MAX_KS 3
#define MAX_N (2 * NR + 8)
#define PAGE 4096

#if OUT == 'b'
typedef int8_t output;
#elif OUT == 'f'
typedef float output;
#else
typedef uint16_t output;
#endif

static const size_t columns[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100, 127, 128, 129, 130};
static const size_t depths[] = {1,  2,  3,  4,  5,  7,  8,  9,  12, 15, 16,  17,  24,  31,  32,  33,
                                60, 61, 63, 64, 65, 68, 72, 96, 97, 127, 128, 129, 130, 192, 200, 257};
static const size_t windows[] = {1, 2, 3};

static size_t now_m, now_n, now_k, now_ks;

static void on_signal(int number) {
  // printf is no function for a handler, but this process has nothing left to lose.
  printf("fault signal %d with mr %zu nc %zu kc %zu ks %zu\n", number, now_m, now_n, now_k, now_ks);
  fflush(stdout);
  _exit(3);
}

static uint64_t state;
static uint32_t random_bits(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t) (state >> 33);
}
static int between(int low, int high) { return low + (int) (random_bits() % (uint32_t) (high - low + 1)); }

// Room that ends at a page which can't be touched.
struct room {
  char* begin;
  size_t size;
};
static struct room make_room(size_t size) {
  struct room r;
  r.size = (size + PAGE - 1) / PAGE * PAGE;
  r.begin = mmap(NULL, r.size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (r.begin == MAP_FAILED || mprotect(r.begin + r.size, PAGE, PROT_NONE) != 0) {
    perror("mmap");
    exit(2);
  }
  return r;
}
static void* last(struct room r, size_t bytes) { return r.begin + r.size - bytes; }

static uint16_t half(float x) { return fp16_ieee_from_fp32_value(x); }
static float wide(uint16_t x) { return fp16_ieee_to_fp32_value(x); }

// --- filters and rows, in the order of the sum

static int filter[MAX_N][MAX_KS][MAX_K];
static int rows[MR][MAX_KS][MAX_K];
static float scales[MAX_N], fbias[MAX_N];
static int bias[MAX_N];

#define XSIZE (X == 'h' ? 2 : 1)

static size_t packed_bytes(size_t nc, size_t kc, size_t ks) {
  const size_t panels = round_up(nc, NR) / NR;
  if (X == 'h') return panels * NR * 2 * (1 + ks * kc);
  const size_t weights = NIBBLES ? round_up(kc, 2 * KR) / 2 : round_up(kc, KR);
  return panels * NR * (4 + ks * weights + (X == 'd' ? 8 : 4));
}

static void pack(char* w, size_t nc, size_t kc, size_t ks, int zero_point) {
  for (size_t n0 = 0; n0 < nc; n0 += NR) {
    for (size_t j = 0; j < NR; j++) {
      const size_t n = n0 + j;
      int32_t sum = 0;
      for (size_t p = 0; p < ks && n < nc; p++) {
        for (size_t k = 0; k < kc; k++) sum += filter[n][p][k];
      }
      if (X == 'h') {
        const uint16_t b = half(n < nc ? (float) bias[n] : 7.0f);
        memcpy(w + 2 * j, &b, 2);
      } else {
        const int32_t start = n >= nc ? between(-9999, 9999) : X == 'd' ? -sum * (NIBBLES ? 16 : 1) : bias[n] - zero_point * sum;
        memcpy(w + 4 * j, &start, 4);
      }
    }
    w += NR * (X == 'h' ? 2 : 4);
    for (size_t p = 0; p < ks; p++) {
      if (X == 'h') {
        for (size_t k = 0; k < kc; k++) {
          for (size_t j = 0; j < NR; j++) {
            const uint16_t v = half(n0 + j < nc ? (float) filter[n0 + j][p][k] : 3.0f);
            memcpy(w, &v, 2);
            w += 2;
          }
        }
      } else if (NIBBLES) {
        for (size_t k0 = 0; k0 < kc; k0 += 2 * KR) {
          for (size_t j = 0; j < NR; j++) {
            for (size_t i = 0; i < KR; i++) {
              const size_t n = n0 + j, low = k0 + i, high = low + KR;
              const int a = n < nc && low < kc ? filter[n][p][low] : 0;
              const int b = n < nc && high < kc ? filter[n][p][high] : 0;
              *w++ = (char) ((a & 15) | (b & 15) << 4);
            }
          }
        }
      } else {
        for (size_t k0 = 0; k0 < kc; k0 += KR) {
          for (size_t j = 0; j < NR; j++) {
            for (size_t i = 0; i < KR; i++) {
              // Behind the sum there are zeros, as inputs hold rubbish there.
              *w++ = (char) (k0 + i >= kc ? 0 : n0 + j < nc ? filter[n0 + j][p][k0 + i] : between(-128, 127));
            }
          }
        }
      }
    }
    if (X == 'd' || X == 'q') {
      for (size_t j = 0; j < NR; j++, w += 4) {
        const float s = n0 + j < nc ? scales[n0 + j] : 1e30f;
        memcpy(w, &s, 4);
      }
    }
    if (X == 'd') {
      for (size_t j = 0; j < NR; j++, w += 4) {
        const float s = n0 + j < nc ? fbias[n0 + j] : 1e30f;
        memcpy(w, &s, 4);
      }
    }
  }
}

static void put(char* to, int x) {
  if (X == 'h') {
    const uint16_t v = half((float) x);
    memcpy(to, &v, 2);
  } else {
    *to = (char) x;
  }
}

static bool same(output a, output b) { return memcmp(&a, &b, sizeof a) == 0; }

static double shown(output x) {
#if OUT == 'h'
  return wide(x);
#else
  return (double) x;
#endif
}

static size_t shapes = 0, wrong = 0;

static void run(size_t mr, size_t nc, size_t kc, size_t ks, struct room in, struct room packed, struct room out,
                struct room parameters) {
  now_m = mr, now_n = nc, now_k = kc, now_ks = ks;
  const int low = X == 'h' ? -2 : -128, high = X == 'h' ? 2 : 127;
  const int zero_point = X == 'q' ? between(-128, 127) : 0;
  int zero_points[MR];
  float inverse[MR];
  for (size_t n = 0; n < nc; n++) {
    for (size_t p = 0; p < ks; p++) {
      for (size_t k = 0; k < kc; k++) {
        filter[n][p][k] = X == 'h' ? between(-1, 1) : NIBBLES ? between(-8, 7) : between(-128, 127);
      }
    }
    bias[n] = X == 'h' ? between(-8, 8) : between(-20000, 20000);
    fbias[n] = (float) between(-1000, 1000) / 8;
    scales[n] = (float) between(1, 4096) * (X == 'q' ? 0x1p-24f : 0x1p-16f);
  }
  struct xnn_qd8_quantization_params* of_rows = last(parameters, (mr + XNN_EXTRA_QUANTIZATION_PARAMS) * sizeof *of_rows);
  for (size_t m = 0; m < mr + XNN_EXTRA_QUANTIZATION_PARAMS; m++) {
    // A table of pointers serves rows of one image, with one pair of parameters.
    const bool alike = IGEMM && m > 0;
    of_rows[m].zero_point = alike ? of_rows[0].zero_point : between(-128, 127);
    of_rows[m].inv_scale = alike ? of_rows[0].inv_scale : (float) between(1, 999) / 512;
    if (m >= mr) {
      // Kernels count on that: they compute the rows that are not there like the last, and over it.
      of_rows[m] = of_rows[mr - 1];
    } else {
      zero_points[m] = of_rows[m].zero_point;
      inverse[m] = of_rows[m].inv_scale;
    }
  }

  // Rows one behind the other, at a distance that is no round number; all of them end at the page but for 16 bytes.
  const size_t distance = (kc + 5) * XSIZE;
  const size_t offset = IGEMM ? 3 * XSIZE : 0;
  const size_t count = IGEMM ? mr * ks : mr;
  char* const a = last(in, (count - 1) * distance + kc * XSIZE + 16);
  memset(in.begin, 0x55, in.size);
  const void* table[MAX_KS * MR];
  static char zeros[MAX_K * 2 + 128] __attribute__((aligned(64)));
  static char zero_data[MAX_K * 2 + 128] __attribute__((aligned(64)));
  memset(zeros, X == 'd' ? 0x2A : X == 'q' ? zero_point : 0, sizeof zeros);
  memset(zero_data, zero_points[0], sizeof zero_data);
  for (size_t p = 0; p < ks; p++) {
    for (size_t m = 0; m < mr; m++) {
      const bool padding = IGEMM && random_bits() % 8 == 0;
      char* const row = a + (IGEMM ? p * mr + m : m) * distance;
      for (size_t k = 0; k < kc; k++) {
        rows[m][p][k] = padding ? (X == 'd' ? zero_points[0] : zero_point) : between(low, high);
        if (!padding) put(row + k * XSIZE, rows[m][p][k]);
      }
      table[p * MR + m] = padding ? zeros : row - offset;
    }
    // XNNPACK repeats the last row.
    for (size_t m = mr; m < MR; m++) table[p * MR + m] = table[p * MR + mr - 1];
  }

  const size_t bytes = packed_bytes(nc, kc, ks);
  char* const w = (char*) ((uintptr_t) last(packed, bytes) & ~(uintptr_t) 63);
  pack(w, nc, kc, ks, zero_point);

  const size_t stride = nc + 3;
  output* const c = last(out, ((mr - 1) * stride + nc) * sizeof(output));
  memset(out.begin, 0xA5, out.size);

#if OUT == 'b'
  union xnn_qs8_qc8w_conv_minmax_params params;
  memset(&params, 0, sizeof params);
  const int out_zero = between(-20, 20), least = between(-128, -100), most = between(90, 127);
  params.fp32_scalar.output_zero_point = (int16_t) out_zero;
  params.fp32_scalar.output_min = (int16_t) least;
  params.fp32_scalar.output_max = (int16_t) most;
#elif X == 'h' || OUT == 'h'
  union xnn_f16_minmax_params params;
  const float least = X == 'h' ? -300.0f : -9000.0f, most = X == 'h' ? 250.0f : 8000.0f;
  const uint16_t limits[2] = {half(least), half(most)};
  memcpy(&params, limits, sizeof limits);
#elif NIBBLES
  struct xnn_f32_qc4w_minmax_params params;
  const float least = -9000.0f, most = 8000.0f;
  params.scalar.min = least;
  params.scalar.max = most;
  params.scalar.kernel_zero_point = 8;
#else
  union xnn_f32_minmax_params params;
  const float least = -9000.0f, most = 8000.0f;
  params.scalar.min = least;
  params.scalar.max = most;
#endif
#if IGEMM
#define ROWS ks * MR * sizeof(void*), (void*) table
#define REST stride * sizeof(output), NR * sizeof(output), offset, (void*) zeros,
#else
#define ROWS (const void*) a, distance
#define REST stride * sizeof(output), NR * sizeof(output),
#endif
#if IGEMM && X == 'd'
  KERNEL(mr, nc, kc * XSIZE, ROWS, (const void*) w, (void*) c, REST (void*) zero_data, &params, of_rows);
#elif X == 'd'
  KERNEL(mr, nc, kc * XSIZE, ROWS, (const void*) w, (void*) c, REST &params, of_rows);
#else
  KERNEL(mr, nc, kc * XSIZE, ROWS, (const void*) w, (void*) c, REST &params);
#endif

  for (size_t m = 0; m < mr; m++) {
    for (size_t n = 0; n < stride && (m + 1 < mr || n < nc); n++) {
      output want;
      if (n >= nc) {
        memset(&want, 0xA5, sizeof want);
      } else {
        int64_t sum = 0;
        for (size_t p = 0; p < ks; p++) {
          for (size_t k = 0; k < kc; k++) {
            sum += (rows[m][p][k] - (X == 'd' ? zero_points[m] : zero_point)) * filter[n][p][k];
          }
        }
#if OUT == 'b'
        const float scaled = (float) (int32_t) (sum + bias[n]) * scales[n];
        const long rounded = lrintf(scaled < 1000.0f ? scaled > -1000.0f ? scaled : -1000.0f : 1000.0f) + out_zero;
        want = (int8_t) (rounded < least ? least : rounded > most ? most : rounded);
#elif X == 'h'
        const float total = (float) (sum + bias[n]);
        want = half(total < least ? least : total > most ? most : total);
#else
        const float total = fmaf((float) (int32_t) sum * inverse[m], scales[n], fbias[n]);
        const float limited = total < least ? least : total > most ? most : total;
#if OUT == 'h'
        want = half(limited);
#else
        want = limited;
#endif
#endif
      }
      const output got = c[m * stride + n];
      if (!same(got, want)) {
        if (wrong == 0 || (m == 0 && n == 0 && wrong < 4)) {
          printf("wrong mr %zu nc %zu kc %zu ks %zu at row %zu column %zu: %g for %g\n", mr, nc, kc, ks, m, n, shown(got),
                 shown(want));
        }
        wrong++;
        shapes++;
        return;
      }
    }
  }
  for (char* p = out.begin; p < (char*) c; p++) {
    if (*p != (char) 0xA5) {
      printf("fault it writes before its output with mr %zu nc %zu kc %zu ks %zu\n", mr, nc, kc, ks);
      exit(3);
    }
  }
  shapes++;
}

int main(int count, char** arguments) {
  const size_t seed = count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
  const size_t step = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
  signal(SIGSEGV, on_signal);
  signal(SIGBUS, on_signal);
  signal(SIGILL, on_signal);
#if defined(NATIVE_AMX)
  // Leave to use the tiles' data, which Linux gives on demand.
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) {
    printf("fault the kernel does not permit AMX\n");
    return 3;
  }
#endif
  const struct room in = make_room(MR * MAX_KS * (MAX_K + 5) * 2 + 64), out = make_room(MR * (MAX_N + 3) * 4);
  const struct room packed = make_room(packed_bytes(MAX_N, MAX_K, MAX_KS) + 64), parameters = make_room(PAGE);
  state = seed * 2654435761u + 12345;
  size_t place = seed % step;
  for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++) {
    if (columns[i] > MAX_N) continue;
    for (size_t j = 0; j < sizeof depths / sizeof depths[0]; j++) {
      for (size_t p = 0; p < (IGEMM ? 3 : 1); p++) {
        for (size_t m = 1; m <= MR; m++) {
          if (place++ % step == 0) run(m, columns[i], depths[j], windows[p], in, packed, out, parameters);
        }
      }
    }
  }
  printf("done %zu %zu\n", shapes, wrong);
  return wrong != 0;
}
