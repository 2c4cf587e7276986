// Bytes that a matrix product has to get from beyond the level 2 cache, by order of loops and block size.
//
//     cc -O2 -o /tmp/cache_model bench/cache_model.c
//     /tmp/cache_model CACHE_KIB WAYS ROWS ROW_BYTES CHANNELS ROW_TILE PANEL BLOCK_KIB...
//
// ROW_BYTES is the inner size in bytes, ROW_TILE and PANEL are those of the micro-kernel (7 and 32 for fp32 with AVX-512).
// Block 0 is XNNPACK's order. Replays the cache lines that the kernels touch on a cache that replaces the line used least
// recently, with pages scattered over physical memory; the second of two runs is counted. What vendor/XNNPACK/own/loop-order.c
// says about what fits comes from here, for example, for 1 MiB of 8 ways and 2 MiB of 16:
//     197 3072 3072 7 32    64 4096 4096 7 32    197 12288 768 7 32    392 8192 512 7 32    6272 2048 512 7 32

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 64, PAGE_BITS = 12, PAGES = 1 << 20, OUTPUT_ELEMENT = 4, BIAS = 4 };

static uint32_t place_of_page[PAGES];
static uint32_t* tags;
static uint64_t* last_use;
static uint64_t now;
static size_t sets, ways;
static long misses;

static void touch(uint64_t address) {
  const uint64_t page = address >> PAGE_BITS, inside = address & ((1 << PAGE_BITS) - 1);
  const uint64_t line = (((uint64_t) place_of_page[page % PAGES] << PAGE_BITS) | inside) / LINE;
  const size_t first = line % sets * ways;
  const uint32_t tag = (uint32_t) line + 1;
  size_t oldest = first;
  for (size_t i = first; i < first + ways; i++) {
    if (tags[i] == tag) {
      last_use[i] = ++now;
      return;
    }
    if (last_use[i] < last_use[oldest]) {
      oldest = i;
    }
  }
  misses++;
  tags[oldest] = tag;
  last_use[oldest] = ++now;
}

int main(int count, char** words) {
  if (count < 9) {
    fprintf(stderr, "need CACHE_KIB WAYS ROWS ROW_BYTES CHANNELS ROW_TILE PANEL BLOCK_KIB...\n");
    return 2;
  }
  ways = strtoul(words[2], NULL, 10);
  sets = strtoul(words[1], NULL, 10) * 1024 / LINE / ways;
  const long rows = atol(words[3]), row_bytes = atol(words[4]), channels = atol(words[5]);
  const long row_tile = atol(words[6]), panel = atol(words[7]), channel_bytes = row_bytes + BIAS;
  tags = malloc(sets * ways * sizeof(*tags));
  last_use = malloc(sets * ways * sizeof(*last_use));

  srand(7);
  for (uint32_t i = 0; i < PAGES; i++) {
    const uint32_t j = (((uint32_t) rand() << 15) ^ (uint32_t) rand()) % (i + 1);
    place_of_page[i] = place_of_page[j];
    place_of_page[j] = i;
  }
  const uint64_t page = 1 << PAGE_BITS;
  const uint64_t input = 0;
  const uint64_t filter = (rows * row_bytes / page + 2) * page;
  const uint64_t output = ((filter + channels * channel_bytes) / page + 2) * page;
  printf("input %ld KiB, filter %ld KiB:", rows * row_bytes >> 10, channels * channel_bytes >> 10);

  for (int word = 8; word < count; word++) {
    const long block_bytes = atol(words[word]) << 10;
    long block = block_bytes ? block_bytes / (channel_bytes * panel) * panel : channels;
    block = block < panel ? panel : block > channels ? channels : block;
    memset(tags, 0, sets * ways * sizeof(*tags));
    memset(last_use, 0, sets * ways * sizeof(*last_use));
    for (int run = 0; run < 2; run++) {
      misses = 0;
      for (long from = 0; from < channels; from += block) {
        const long to = from + block < channels ? from + block : channels;
        for (long row = 0; row < rows; row += row_tile) {
          const long last_row = row + row_tile < rows ? row + row_tile : rows;
          for (long channel = from; channel < to; channel += panel) {
            const long lines = panel * channel_bytes / LINE, input_lines = row_bytes / LINE;
            long read = 0;
            for (long i = 0; i < lines; i++) {
              touch(filter + channel * channel_bytes + i * LINE);
              for (; read * lines <= i * input_lines && read < input_lines; read++) {
                for (long r = row; r < last_row; r++) {
                  touch(input + r * row_bytes + read * LINE);
                }
              }
            }
            for (long r = row; r < last_row; r++) {
              for (long byte = 0; byte < panel * OUTPUT_ELEMENT; byte += LINE) {
                touch(output + (r * channels + channel) * OUTPUT_ELEMENT + byte);
              }
            }
          }
        }
      }
    }
    printf("  %ld KiB (%ld channels) %.1f MB", block_bytes >> 10, block, misses * LINE / 1e6);
  }
  printf("\n");
  return 0;
}
