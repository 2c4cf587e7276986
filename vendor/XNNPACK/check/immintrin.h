// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
//
// The vector and tile instructions that XNNPACK's AMX and AVX512-FP16 kernels use, one number at a time in plain C: the
// kernels' own source can then be checked on any processor. Instructions that demand alignment, or tiles of matching
// sizes, end the program here as they do on the processor. Sums in half precision are rounded twice, so fp16 inputs
// should be whole numbers small enough for that not to matter.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xnnpack/fp16.h"

typedef struct { int32_t e[16]; } __m512i;
typedef struct { float e[16]; } __m512;
typedef struct { uint16_t e[32]; } __m512h;
typedef struct { uint16_t e[16]; } __m256i;
typedef struct { int8_t e[16]; } __m128i;
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

#define SHIM static inline __attribute__((unused))
#define EACH(count) for (int i = 0; i < (count); i++)

SHIM void shim_stop(const char* why) {
  printf("fault %s\n", why);
  fflush(stdout);
  _Exit(3);
}

SHIM void shim_aligned(const void* p, size_t bytes) {
  if ((uintptr_t) p % bytes != 0) shim_stop("an aligned instruction got an address that is not");
}

// --- masks

SHIM __mmask16 _cvtu32_mask16(uint32_t bits) { return (__mmask16) bits; }
SHIM __mmask32 _cvtu32_mask32(uint32_t bits) { return bits; }

// --- whole numbers of 32 bits

SHIM __m512i _mm512_set1_epi32(int32_t x) { __m512i r; EACH(16) r.e[i] = x; return r; }
SHIM __m512i _mm512_set1_epi64(int64_t x) { __m512i r; EACH(8) memcpy(&r.e[2 * i], &x, 8); return r; }
SHIM __m512i _mm512_set1_epi8(int8_t x) { __m512i r; memset(&r, x, sizeof r); return r; }
SHIM __m512i _mm512_loadu_epi32(const void* p) { __m512i r; memcpy(&r, p, 64); return r; }
SHIM __m512i _mm512_load_epi32(const void* p) { shim_aligned(p, 64); return _mm512_loadu_epi32(p); }
SHIM void _mm512_store_epi32(void* p, __m512i a) { shim_aligned(p, 64); memcpy(p, &a, 64); }
SHIM __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* p) {
  __m512i r = {{0}};
  EACH(16) if (mask >> i & 1) memcpy(&r.e[i], (const char*) p + 4 * i, 4);
  return r;
}
SHIM __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  EACH(16) a.e[i] = (int32_t) ((uint32_t) a.e[i] + (uint32_t) b.e[i]);
  return a;
}
SHIM __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  EACH(16) a.e[i] = (int32_t) ((uint32_t) a.e[i] * (uint32_t) b.e[i]);
  return a;
}
SHIM __m512i _mm512_and_si512(__m512i a, __m512i b) { EACH(16) a.e[i] &= b.e[i]; return a; }
SHIM __m512i _mm512_srai_epi32(__m512i a, unsigned bits) { EACH(16) a.e[i] >>= bits; return a; }
SHIM __m512i _mm512_gf2p8affine_epi64_epi8(__m512i x, __m512i matrix, int constant) {
  const uint8_t* rows = (const uint8_t*) &matrix;
  uint8_t* bytes = (uint8_t*) &x;
  EACH(64) {
    uint8_t made = 0;
    for (int bit = 0; bit < 8; bit++) {
      const uint8_t row = rows[(i & ~7) + 7 - bit];
      made |= (uint8_t) ((__builtin_parity(row & bytes[i]) ^ (constant >> bit & 1)) << bit);
    }
    bytes[i] = made;
  }
  return x;
}

// --- fp32

SHIM __m512 _mm512_set1_ps(float x) { __m512 r; EACH(16) r.e[i] = x; return r; }
SHIM __m512 _mm512_loadu_ps(const void* p) { __m512 r; memcpy(&r, p, 64); return r; }
SHIM __m512 _mm512_load_ps(const void* p) { shim_aligned(p, 64); return _mm512_loadu_ps(p); }
SHIM void _mm512_storeu_ps(void* p, __m512 a) { memcpy(p, &a, 64); }
SHIM void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 a) {
  EACH(16) if (mask >> i & 1) memcpy((char*) p + 4 * i, &a.e[i], 4);
}
SHIM __m512 _mm512_mul_ps(__m512 a, __m512 b) { EACH(16) a.e[i] *= b.e[i]; return a; }
SHIM __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { EACH(16) a.e[i] = fmaf(a.e[i], b.e[i], c.e[i]); return a; }
// The second operand where they do not compare.
SHIM __m512 _mm512_max_ps(__m512 a, __m512 b) { EACH(16) a.e[i] = a.e[i] > b.e[i] ? a.e[i] : b.e[i]; return a; }
SHIM __m512 _mm512_min_ps(__m512 a, __m512 b) { EACH(16) a.e[i] = a.e[i] < b.e[i] ? a.e[i] : b.e[i]; return a; }
SHIM __m512 _mm512_cvtepi32_ps(__m512i a) { __m512 r; EACH(16) r.e[i] = (float) a.e[i]; return r; }
SHIM __m512i _mm512_cvtps_epi32(__m512 a) {
  __m512i r;
  EACH(16) r.e[i] = a.e[i] >= -0x1p31f && a.e[i] < 0x1p31f ? (int32_t) lrintf(a.e[i]) : INT32_MIN;
  return r;
}

// --- bytes and halves

SHIM __m128i _mm512_cvtsepi32_epi8(__m512i a) {
  __m128i r;
  EACH(16) r.e[i] = (int8_t) (a.e[i] < -128 ? -128 : a.e[i] > 127 ? 127 : a.e[i]);
  return r;
}
SHIM __m128i _mm_set1_epi8(int8_t x) { __m128i r; EACH(16) r.e[i] = x; return r; }
SHIM __m128i _mm_max_epi8(__m128i a, __m128i b) { EACH(16) a.e[i] = a.e[i] > b.e[i] ? a.e[i] : b.e[i]; return a; }
SHIM void _mm_storeu_si128(void* p, __m128i a) { memcpy(p, &a, 16); }
SHIM void _mm_mask_storeu_epi8(void* p, __mmask16 mask, __m128i a) {
  EACH(16) if (mask >> i & 1) ((int8_t*) p)[i] = a.e[i];
}
SHIM __m256i _mm256_set1_epi16(int16_t x) { __m256i r; EACH(16) r.e[i] = (uint16_t) x; return r; }
SHIM void _mm256_storeu_si256(void* p, __m256i a) { memcpy(p, &a, 32); }
SHIM void _mm256_mask_storeu_epi16(void* p, __mmask16 mask, __m256i a) {
  EACH(16) if (mask >> i & 1) memcpy((char*) p + 2 * i, &a.e[i], 2);
}
SHIM __m512 _mm512_cvtph_ps(__m256i a) { __m512 r; EACH(16) r.e[i] = fp16_ieee_to_fp32_value(a.e[i]); return r; }
SHIM __m256i _mm512_cvtps_ph(__m512 a, int rounding) {
  __m256i r;
  (void) rounding;
  EACH(16) r.e[i] = fp16_ieee_from_fp32_value(a.e[i]);
  return r;
}
#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8

// --- AVX512-FP16

SHIM float shim_wide(uint16_t x) { return fp16_ieee_to_fp32_value(x); }
SHIM __m512i _mm512_set1_epi16(int16_t x) { __m512i r; EACH(32) memcpy((char*) &r + 2 * i, &x, 2); return r; }
SHIM __m512h _mm512_castsi512_ph(__m512i a) { __m512h r; memcpy(&r, &a, 64); return r; }
SHIM __m512i _mm512_castph_si512(__m512h a) { __m512i r; memcpy(&r, &a, 64); return r; }
SHIM __m512h _mm512_load_ph(const void* p) { __m512h r; shim_aligned(p, 64); memcpy(&r, p, 64); return r; }
SHIM void _mm512_storeu_ph(void* p, __m512h a) { memcpy(p, &a, 64); }
SHIM void _mm512_mask_storeu_epi16(void* p, __mmask32 mask, __m512i a) {
  EACH(32) if (mask >> i & 1) memcpy((char*) p + 2 * i, (char*) &a + 2 * i, 2);
}
SHIM __m512h _mm512_fmadd_ph(__m512h a, __m512h b, __m512h c) {
  EACH(32) a.e[i] = fp16_ieee_from_fp32_value(fmaf(shim_wide(a.e[i]), shim_wide(b.e[i]), shim_wide(c.e[i])));
  return a;
}
SHIM __m512h _mm512_max_ph(__m512h a, __m512h b) {
  EACH(32) a.e[i] = shim_wide(a.e[i]) > shim_wide(b.e[i]) ? a.e[i] : b.e[i];
  return a;
}
SHIM __m512h _mm512_min_ph(__m512h a, __m512h b) {
  EACH(32) a.e[i] = shim_wide(a.e[i]) < shim_wide(b.e[i]) ? a.e[i] : b.e[i];
  return a;
}

// --- AMX

static __attribute__((unused)) struct {
  uint8_t config[64];
  uint8_t tile[8][16][64];
} amx;

SHIM int shim_rows(int t) { return amx.config[48 + t]; }
SHIM int shim_bytes(int t) { return amx.config[16 + 2 * t] | amx.config[17 + 2 * t] << 8; }
SHIM void shim_known(int t) {
  if (amx.config[0] != 1 || shim_rows(t) == 0 || shim_bytes(t) == 0) shim_stop("a tile is used that is not configured");
}

// What the kernels write through the assembler; check_kernels.py turns their statements into calls of this.
SHIM void shim_assembler(const char* text, const void* configuration) {
  if (strncmp(text, "ldtilecfg", 9) == 0) {
    memset(&amx, 0, sizeof amx);
    memcpy(amx.config, configuration, 64);
    EACH(8) if (shim_rows(i) > 16 || shim_bytes(i) > 64) shim_stop("a tile is configured too large");
  } else if (strncmp(text, "tilezero", 8) == 0) {
    for (; (text = strstr(text, "tmm")) != NULL; text += 4) memset(amx.tile[text[3] - '0'], 0, sizeof amx.tile[0]);
  } else if (strncmp(text, "tilerelease", 11) == 0) {
    memset(&amx, 0, sizeof amx);
  } else {
    shim_stop("unknown assembler");
  }
}

SHIM void _tile_loadd(int t, const void* p, size_t stride) {
  shim_known(t);
  memset(amx.tile[t], 0, sizeof amx.tile[t]);
  EACH(shim_rows(t)) memcpy(amx.tile[t][i], (const char*) p + (size_t) i * stride, (size_t) shim_bytes(t));
}
SHIM void _tile_stored(int t, void* p, size_t stride) {
  shim_known(t);
  EACH(shim_rows(t)) memcpy((char*) p + (size_t) i * stride, amx.tile[t][i], (size_t) shim_bytes(t));
}
SHIM void _tile_dpbssd(int c, int a, int b) {
  shim_known(c), shim_known(a), shim_known(b);
  if (shim_rows(c) != shim_rows(a) || shim_bytes(a) != 4 * shim_rows(b) || shim_bytes(c) != shim_bytes(b)) {
    shim_stop("tiles of sizes that do not match are multiplied");
  }
  for (int m = 0; m < shim_rows(c); m++) {
    int32_t* sums = (int32_t*) amx.tile[c][m];
    for (int k = 0; k < shim_rows(b); k++) {
      const int8_t* x = (const int8_t*) &amx.tile[a][m][4 * k];
      const int8_t* y = (const int8_t*) amx.tile[b][k];
      EACH(shim_bytes(c) / 4) {
        sums[i] += x[0] * y[4 * i] + x[1] * y[4 * i + 1] + x[2] * y[4 * i + 2] + x[3] * y[4 * i + 3];
      }
    }
  }
}
