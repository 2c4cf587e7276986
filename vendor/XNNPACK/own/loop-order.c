// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.
//
// XNNPACK runs a matrix product as tiles: a micro-kernel call computes `row_tile` rows of the result for some output
// channels. Upstream's outer loop is over tiles of rows and each call gets all channels (a thread pool splits them
// further), so every few rows the whole packed filter passes through the caches. Where it is larger than the level 2
// cache, the product then waits for memory.
//
// Here the loops are turned: blocks of channels outside, rows inside, the images of a batch between the two. The filter
// of a block stays in the cache while all rows pass by. Rows are cut as before and blocks begin at whole panels of the
// packed filter, so each number of the result is computed by the same instructions, and results are the same bit by bit.
//
// How the block is chosen. Let W be the packed filter, A the input of the product, L2 the cache. What has to come from
// beyond the cache is about
//     upstream   A + W * (number of row tiles), or A + W if the filter fits;
//     turned     W + A * (number of blocks),    or W + A if the input fits beside a block.
// Replaying the cache lines that kernels touch on a model of set-associative caches with scattered pages (1 MB of 8 ways,
// 2 MB of 16) shows where "fits" ends: up to 5/8 of L2 for a filter alone, and about half of L2 for all that is used
// again and again while other data pass through. So
//     - a filter of up to 5/8 of L2 is left in upstream's order (all filters, where upstream uses them by turns), as is a
//       product of a single row tile;
//     - an input of up to 3/8 of L2 shall stay, and blocks get what it leaves of L2 / 2, but at least L2 / 8;
//     - otherwise the input passes by once per block, and a block gets L2 / 2.
// A block has at least one panel, whatever its size. Between L2 / 8 and L2 / 2 times differ by a few percent.
//
// What comes from beyond L2 does not cost the same everywhere. A filter is read in one stream, which the level 3 cache of
// AMD's processors delivers as fast as kernels take it (measured on Zen 4: nothing lost at 2.4 MB, 1/7 at 9 MB, 2/5 at
// 17 MB), while each further pass of the input costs 2 percent. So there, a filter of up to 4 * L2 is left in upstream's
// order unless the input stays. On Intel's server processors the stream costs up to half the speed at 2.4 MB already.

#include "xnnfast/loop-order.h"

#include <stdlib.h>

#include <cpuinfo.h>

#include "xnnpack/common.h"
#include "xnnpack/compute.h"
#include "xnnpack/math.h"
#include "xnnpack/operator.h"

// --- setting ---

static const size_t UNSET = SIZE_MAX;
static size_t current_setting = SIZE_MAX;

size_t xnnfast_loop_order(void) {
  size_t setting = __atomic_load_n(&current_setting, __ATOMIC_RELAXED);
  if XNN_UNLIKELY(setting == UNSET) {
    const char* text = getenv(XNNFAST_LOOP_ORDER_VARIABLE);
    char* end = NULL;
    setting = text == NULL ? 1 : (size_t) strtoull(text, &end, 10);
    if (text != NULL && (end == text || *end != '\0')) {
      setting = 1;
    }
    xnnfast_set_loop_order(setting);
  }
  return setting;
}

void xnnfast_set_loop_order(size_t setting) {
  __atomic_store_n(&current_setting, setting == UNSET ? UNSET - 1 : setting, __ATOMIC_RELAXED);
}

// --- cache ---

size_t xnnfast_l2_bytes(void) {
  static size_t known = 0;
  size_t bytes = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if XNN_UNLIKELY(bytes == 0) {
    if (cpuinfo_initialize()) {
      // The least share of any core: work may land on each, and cores that share a cache are at work together.
      for (uint32_t i = 0; i < cpuinfo_get_processors_count(); i++) {
        const struct cpuinfo_processor* processor = cpuinfo_get_processor(i);
        const struct cpuinfo_cache* l2 = processor == NULL ? NULL : processor->cache.l2;
        if (l2 == NULL || l2->size == 0) {
          continue;
        }
        // Hardware threads of one core do not count as sharers.
        const uint32_t threads = processor->core == NULL ? 1 : max(processor->core->processor_count, 1);
        const size_t share = l2->size / max(l2->processor_count / threads, 1);
        bytes = bytes == 0 ? share : min(bytes, share);
      }
    }
    if (bytes == 0) {
      bytes = 512 * 1024;
    }
    // Nothing useful fits into less, and what claims more is no level 2 cache of one core.
    bytes = max(bytes, 128 * 1024);
    bytes = min(bytes, 4 * 1024 * 1024);
    __atomic_store_n(&known, bytes, __ATOMIC_RELAXED);
  }
  return bytes;
}

// Whether a filter somewhat larger than the level 2 cache is streamed at no cost.
static bool is_level_3_fast(void) {
  static int known = 0;
  int answer = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if XNN_UNLIKELY(answer == 0) {
    const struct cpuinfo_core* core = cpuinfo_initialize() ? cpuinfo_get_core(0) : NULL;
    const bool amd = core != NULL && (core->vendor == cpuinfo_vendor_amd || core->vendor == cpuinfo_vendor_hygon);
    answer = amd ? 1 : -1;
    __atomic_store_n(&known, answer, __ATOMIC_RELAXED);
  }
  return answer > 0;
}

// --- product ---

// Which indices a compute function of XNNPACK takes before the starts of rows and channels.
enum indices {
  no_index,
  image_or_group,
  image_and_group,
  image_and_place,            // image, subkernel, y
  image_and_group_and_place,  // image, group, subkernel, y
};

struct product {
  void* context;
  union {
    pthreadpool_task_2d_tile_2d_t no_index;
    pthreadpool_task_3d_tile_2d_t image_or_group;
    pthreadpool_task_4d_tile_2d_t image_and_group;
    pthreadpool_task_5d_tile_2d_t image_and_place;
    pthreadpool_task_6d_tile_2d_t image_and_group_and_place;
  } task;
  enum indices indices;
  // How often the same rows and channels are there: groups have filters of their own, images share one. Subkernels (of
  // a strided transposed convolution) have their own, too, and `height` is a second dimension of their rows.
  size_t groups, images, subkernels, height;
  size_t rows, row_tile;
  size_t channels, channel_tile;
  // Of one group: bytes of packed filter per channel, channels in a panel of it, bytes of input for all images.
  size_t channel_bytes, panel, input_bytes;
};

static void describe_gemm(struct product* p, const struct gemm_context* context) {
  if (p->groups > 1) {
    // A batch multiplied by one matrix is like the images of a convolution.
    bool shared = true;
    for (uint32_t i = 0; i < context->num_batch_dims; i++) {
      shared = shared && context->batch_dims_b[i] == 1;
    }
    if (shared) {
      p->images = p->groups;
      p->groups = 1;
    }
  }
  p->channel_bytes = context->w_stride;
  p->panel = context->cn_stride >> context->log2_csize;
  p->input_bytes = p->images * p->rows * context->k_scaled;
}

static void describe_igemm(struct product* p, const struct igemm_context* context) {
  p->channel_bytes = context->w_stride;
  p->panel = context->cn_stride >> context->log2_csize;
  // Windows overlap, so there is no more than the image; and a strided kernel of one pixel reads less than that.
  p->input_bytes = p->images * min(p->rows * context->ks * context->kc, context->ba_stride);
}

static void describe_subkernels(struct product* p, const struct subconvolution_params* subkernels) {
  for (size_t i = 0; i < p->subkernels; i++) {
    p->channel_bytes = max(p->channel_bytes, subkernels[i].w_stride);
  }
}

// The product that a step of an operator is, or false.
static bool describe(struct product* p, const struct compute_parameters* step, void* context) {
  const size_t* range = step->range;
  p->context = context;
  p->groups = p->images = p->subkernels = p->height = 1;
  p->row_tile = step->tile[0];
  p->channel_tile = step->tile[1];
  switch (step->type) {
    case xnn_parallelization_type_2d_tile_2d: {
      const pthreadpool_task_2d_tile_2d_t task = step->task_2d_tile_2d;
      p->indices = no_index;
      p->task.no_index = task;
      p->rows = range[0];
      p->channels = range[1];
      if (task == (pthreadpool_task_2d_tile_2d_t) xnn_compute_gemm ||
          task == (pthreadpool_task_2d_tile_2d_t) xnn_compute_dqgemm) {
        describe_gemm(p, context);
        return true;
      }
      if (task == (pthreadpool_task_2d_tile_2d_t) xnn_compute_igemm ||
          task == (pthreadpool_task_2d_tile_2d_t) xnn_compute_dqigemm) {
        describe_igemm(p, context);
        return true;
      }
      return false;
    }
    case xnn_parallelization_type_3d_tile_2d: {
      const pthreadpool_task_3d_tile_2d_t task = step->task_3d_tile_2d;
      p->indices = image_or_group;
      p->task.image_or_group = task;
      p->rows = range[1];
      p->channels = range[2];
      if (task == (pthreadpool_task_3d_tile_2d_t) xnn_compute_grouped_gemm) {
        p->groups = range[0];
        describe_gemm(p, context);
        return true;
      }
      if (task == (pthreadpool_task_3d_tile_2d_t) xnn_compute_grouped_igemm ||
          task == (pthreadpool_task_3d_tile_2d_t) xnn_compute_grouped_dqigemm) {
        p->groups = range[0];
        describe_igemm(p, context);
        return true;
      }
      if (task == (pthreadpool_task_3d_tile_2d_t) xnn_compute_batch_igemm ||
          task == (pthreadpool_task_3d_tile_2d_t) xnn_compute_batch_dqigemm) {
        p->images = range[0];
        describe_igemm(p, context);
        return true;
      }
      return false;
    }
    case xnn_parallelization_type_4d_tile_2d: {
      const pthreadpool_task_4d_tile_2d_t task = step->task_4d_tile_2d;
      p->indices = image_and_group;
      p->task.image_and_group = task;
      p->images = range[0];
      p->groups = range[1];
      p->rows = range[2];
      p->channels = range[3];
      if (task == (pthreadpool_task_4d_tile_2d_t) xnn_compute_grouped_batch_igemm ||
          task == (pthreadpool_task_4d_tile_2d_t) xnn_compute_grouped_batch_dqigemm) {
        describe_igemm(p, context);
        return true;
      }
      return false;
    }
    case xnn_parallelization_type_5d_tile_2d:
    case xnn_parallelization_type_6d_tile_2d: {
      bool gemm, igemm;
      if (step->type == xnn_parallelization_type_5d_tile_2d) {
        const pthreadpool_task_5d_tile_2d_t task = step->task_5d_tile_2d;
        gemm = task == (pthreadpool_task_5d_tile_2d_t) xnn_compute_subgemm2d;
        igemm = task == (pthreadpool_task_5d_tile_2d_t) xnn_compute_subconv2d ||
                task == (pthreadpool_task_5d_tile_2d_t) xnn_compute_dqsubconv2d;
        p->indices = image_and_place;
        p->task.image_and_place = task;
        p->images = *range++;
      } else {
        const pthreadpool_task_6d_tile_2d_t task = step->task_6d_tile_2d;
        gemm = task == (pthreadpool_task_6d_tile_2d_t) xnn_compute_grouped_subgemm2d;
        igemm = task == (pthreadpool_task_6d_tile_2d_t) xnn_compute_grouped_subconv2d ||
                task == (pthreadpool_task_6d_tile_2d_t) xnn_compute_grouped_dqsubconv2d;
        p->indices = image_and_group_and_place;
        p->task.image_and_group_and_place = task;
        p->images = *range++;
        p->groups = *range++;
      }
      if (!gemm && !igemm) {
        return false;
      }
      p->subkernels = range[0];
      p->height = range[1];
      p->rows = range[2];
      p->channels = range[3];
      if (gemm) {
        const struct subgemm_context* c = context;
        describe_subkernels(p, c->subconvolution_params);
        p->panel = c->cn_stride >> c->log2_csize;
        p->input_bytes = p->images * c->ba_stride;
      } else {
        const struct subconv_context* c = context;
        describe_subkernels(p, c->subconvolution_params);
        p->panel = c->cn_stride >> c->log2_csize;
        p->input_bytes = p->images * c->ba_stride;
      }
      return true;
    }
    default:
      // Also the steps for processors with unlike cores, whose kernels differ by the core that runs a tile.
      return false;
  }
}

// Channels of a block, a multiple of the panel; 0 where upstream's order is no worse.
static size_t choose_block(const struct product* p, size_t setting) {
  const size_t panel_bytes = p->panel * p->channel_bytes;
  size_t block_bytes = setting;
  if (setting == 1) {
    const size_t cache = xnnfast_l2_bytes();
    const size_t filter_bytes = p->channels * p->channel_bytes;
    const size_t tiles = p->images * p->height * divide_round_up(p->rows, p->row_tile);
    // Upstream goes through the filters of all groups and subkernels before it comes to the next image.
    const size_t between = p->images > 1 && p->indices > image_or_group ? p->groups * p->subkernels : 1;
    const bool input_stays = p->input_bytes <= cache / 8 * 3;
    const size_t limit = !input_stays && is_level_3_fast() ? cache * 4 : cache / 8 * 5;
    if (filter_bytes * between <= limit || tiles == 1) {
      return 0;
    }
    block_bytes = input_stays ? cache / 2 - p->input_bytes : cache / 2;
  }
  // Blocks are made about equal, so that the last one is no crumb.
  const size_t panels = divide_round_up(p->channels, p->panel);
  const size_t blocks = divide_round_up(panels, max(block_bytes / panel_bytes, 1));
  return divide_round_up(panels, blocks) * p->panel;
}

// --- loops ---

static void run_tile(void* argument, size_t group, size_t block, size_t image, size_t tile) {
  const struct product* p = argument;
  const size_t row = tile * p->row_tile;
  const size_t channel = block * p->channel_tile;
  const size_t rows = min(p->row_tile, p->rows - row);
  const size_t channels = min(p->channel_tile, p->channels - channel);
  switch (p->indices) {
    case no_index:
      p->task.no_index(p->context, row, channel, rows, channels);
      break;
    case image_or_group:
      // Only one of the two is ever counted.
      p->task.image_or_group(p->context, image + group, row, channel, rows, channels);
      break;
    case image_and_group:
      p->task.image_and_group(p->context, image, group, row, channel, rows, channels);
      break;
    default:
      XNN_UNREACHABLE;
  }
}

static void run_place(
    void* argument, size_t group, size_t subkernel, size_t block, size_t image, size_t y, size_t tile) {
  const struct product* p = argument;
  const size_t row = tile * p->row_tile;
  const size_t channel = block * p->channel_tile;
  const size_t rows = min(p->row_tile, p->rows - row);
  const size_t channels = min(p->channel_tile, p->channels - channel);
  if (p->indices == image_and_place) {
    p->task.image_and_place(p->context, image, subkernel, y, row, channel, rows, channels);
  } else {
    p->task.image_and_group_and_place(p->context, image, group, subkernel, y, row, channel, rows, channels);
  }
}

bool xnnfast_run_turned(
    const struct compute_parameters* step, void* context, pthreadpool_t threadpool, uint32_t flags) {
  const size_t setting = xnnfast_loop_order();
  struct product p = {0};
  if (setting == 0 || !describe(&p, step, context)) {
    return false;
  }
  const size_t block = choose_block(&p, setting);
  if (block == 0) {
    return false;
  }
  // What upstream would give to a call at most is kept as a limit: it is what gives every thread of a pool enough calls.
  p.channel_tile = min(p.channel_tile, block);
  const size_t blocks = divide_round_up(p.channels, p.channel_tile);
  const size_t tiles = divide_round_up(p.rows, p.row_tile);
  if (p.indices == image_and_place || p.indices == image_and_group_and_place) {
    pthreadpool_parallelize_6d(
        threadpool, run_place, &p, p.groups, p.subkernels, blocks, p.images, p.height, tiles, flags);
  } else {
    pthreadpool_parallelize_4d(threadpool, run_tile, &p, p.groups, blocks, p.images, tiles, flags);
  }
  return true;
}
