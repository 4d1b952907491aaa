/* Paged attention from C: a prompt of 37 tokens and then one token of decode, over a BF16 cache whose blocks lie in any
 * order, and the same in double precision beside it. Ends with status 1 if they differ.
 *
 *     cc attention.c $(pkg-config --cflags --libs millrace_kernels) -lm -o attention */
#include <math.h>
#include <millrace/kernels.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, PROMPT = 37, TOKENS = PROMPT + 1, BLOCKS = 4 };

static void check(mr_status status, const char* what) {
  if (status == MR_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, mr_status_name(status), mr_last_error());
  exit(1);
}

/* Memory aligned as the library wants it. */
static void* memory(size_t bytes) {
  void* at = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (at == NULL) exit(1);
  return at;
}

/* Multiples of 1/64 in [-1, 1): exact in bf16, so that the cache keeps them as they are. */
static void fill(float* x, size_t count, unsigned* state) {
  for (size_t i = 0; i < count; ++i) {
    *state = *state * 1664525u + 1013904223u;
    x[i] = (float)(*state >> 25) / 64.0f - 1.0f;
  }
}

/* One row at `position`, plainly. */
static void attend_in_double(const float* query, const float* keys, const float* values, int position,
                             double* out) {
  for (int head = 0; head < HEADS; ++head) {
    const int kv_head = head / (HEADS / KV_HEADS);
    double weights[TOKENS], row_max = -INFINITY, row_sum = 0;
    for (int p = 0; p <= position; ++p) {
      weights[p] = 0;
      for (int d = 0; d < HEAD_DIM; ++d) {
        weights[p] += (double)query[head * HEAD_DIM + d] * keys[(p * KV_HEADS + kv_head) * HEAD_DIM + d];
      }
      weights[p] /= sqrt(HEAD_DIM);
      row_max = fmax(row_max, weights[p]);
    }
    for (int p = 0; p <= position; ++p) row_sum += weights[p] = exp(weights[p] - row_max);
    for (int d = 0; d < HEAD_DIM; ++d) {
      double sum = 0;
      for (int p = 0; p <= position; ++p) {
        sum += weights[p] * values[(p * KV_HEADS + kv_head) * HEAD_DIM + d];
      }
      out[head * HEAD_DIM + d] = sum / row_sum;
    }
  }
}

int main(void) {
  mr_device* device = NULL;
  check(mr_device_open("cpu", NULL, &device), "mr_device_open");
  const mr_attention_config config = {.heads = HEADS,
                                      .kv_heads = KV_HEADS,
                                      .head_dim = HEAD_DIM,
                                      .kv_type = MR_BF16,
                                      .max_rows = PROMPT,
                                      .max_sequences = 1,
                                      .max_context = 16 * BLOCKS};
  size_t workspace_bytes = 0, block_bytes = 0;
  check(mr_attention_workspace_bytes(device, &config, &workspace_bytes), "mr_attention_workspace_bytes");
  check(mr_kv_block_bytes(device, &config, &block_bytes), "mr_kv_block_bytes");
  void* workspace = memory(workspace_bytes);
  const mr_kv_cache cache = {.blocks = memory(BLOCKS * block_bytes), .num_blocks = BLOCKS};
  mr_attention* attention = NULL;
  check(mr_attention_create(device, &config, workspace, workspace_bytes, &attention), "mr_attention_create");

  unsigned state = 1;
  float* query = memory(sizeof(float) * TOKENS * HEADS * HEAD_DIM);
  float* keys = memory(sizeof(float) * TOKENS * KV_HEADS * HEAD_DIM);
  float* values = memory(sizeof(float) * TOKENS * KV_HEADS * HEAD_DIM);
  float* out = memory(sizeof(float) * TOKENS * HEADS * HEAD_DIM);
  fill(query, TOKENS * HEADS * HEAD_DIM, &state);
  fill(keys, TOKENS * KV_HEADS * HEAD_DIM, &state);
  fill(values, TOKENS * KV_HEADS * HEAD_DIM, &state);

  /* The prompt, then one token: the same three calls. A model runs append and run once per layer. */
  const int32_t table[BLOCKS] = {2, 0, 3, 1};
  const int32_t steps[2][2] = {{0, PROMPT}, {PROMPT, 1}}; /* tokens before, tokens of the step */
  const mr_attention_args args = {.window = 0, .scale = 0.0f, .sinks = NULL};
  for (int step = 0; step < 2; ++step) {
    const int32_t first = steps[step][0], row_starts[2] = {0, steps[step][1]};
    const mr_batch batch = {.num_sequences = 1,
                            .row_starts = row_starts,
                            .context_lengths = &first,
                            .block_tables = table,
                            .table_stride = BLOCKS};
    float* kv_row = keys + first * KV_HEADS * HEAD_DIM;
    check(mr_attention_plan(attention, &batch, NULL), "mr_attention_plan");
    check(mr_attention_append(attention, &cache, NULL, NULL, kv_row, values + first * KV_HEADS * HEAD_DIM, NULL),
          "mr_attention_append");
    check(mr_attention_run(attention, &cache, &args, query + first * HEADS * HEAD_DIM,
                           out + first * HEADS * HEAD_DIM, NULL),
          "mr_attention_run");
  }

  double worst = 0;
  int wrong = 0;
  for (int position = 0; position < TOKENS; ++position) {
    double expected[HEADS * HEAD_DIM];
    attend_in_double(query + position * HEADS * HEAD_DIM, keys, values, position, expected);
    for (int i = 0; i < HEADS * HEAD_DIM; ++i) {
      const double difference = fabs(out[position * HEADS * HEAD_DIM + i] - expected[i]);
      worst = fmax(worst, difference);
      if (!(difference < 1e-4)) wrong = 1; /* values are below 1; a NaN is wrong too */
    }
  }
  printf("%s, kernels %s: attention of %d rows, largest difference from double precision %.2g\n",
         mr_device_description(device), mr_version(), TOKENS, worst);

  mr_attention_destroy(attention);
  mr_device_close(device);
  free(out);
  free(values);
  free(keys);
  free(query);
  free(cache.blocks);
  free(workspace);
  return wrong;
}
