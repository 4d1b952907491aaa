/* Attention over tensors from C, forward and backward: two ragged sequences with a causal window and sinks,
 * and the gradient of a loss checked by a small step along it. Ends with status 1 if they differ.
 *
 *     cc flash_attention.c $(pkg-config --cflags --libs millrace_kernels) -lm -o flash_attention */
#include <math.h>
#include <millrace/kernels.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, SEQUENCES = 2, ROWS = 50 };

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

/* A float32 tensor [rows][heads][DIM]; random where `state` is not NULL. */
static mr_flash_tensor tensor(int heads, unsigned* state) {
  const size_t count = (size_t)ROWS * (size_t)heads * DIM;
  float* x = memory(count * sizeof(float));
  for (size_t i = 0; i < count; ++i) {
    if (state != NULL) *state = *state * 1664525u + 1013904223u;
    x[i] = state == NULL ? 0.0f : (float)(*state >> 8) / 8388608.0f - 1.0f;
  }
  const mr_flash_tensor made = {x, 0, heads * DIM, DIM}; /* ragged: no batch stride */
  return made;
}

static double dot(mr_flash_tensor a, mr_flash_tensor b, int heads) {
  const float *x = a.data, *y = b.data;
  double sum = 0;
  for (int i = 0; i < ROWS * heads * DIM; ++i) sum += (double)x[i] * y[i];
  return sum;
}

/* x += step * along */
static void move(mr_flash_tensor x, mr_flash_tensor along, int heads, float step) {
  float* to = x.data;
  const float* by = along.data;
  for (int i = 0; i < ROWS * heads * DIM; ++i) to[i] += step * by[i];
}

int main(void) {
  mr_device* device = NULL;
  check(mr_device_open("cpu", NULL, &device), "mr_device_open");
  printf("%s\n", mr_device_description(device));

  const int32_t starts[SEQUENCES + 1] = {0, 33, ROWS};
  const float sinks[HEADS] = {0.5f, -1.0f, 0.0f, 2.0f};
  mr_flash_problem problem = {.type = MR_F32, .batch = SEQUENCES, .heads = HEADS, .kv_heads = KV_HEADS};
  problem.head_dim = problem.value_dim = DIM;
  problem.max_q = problem.max_k = 33; /* the longest sequence */
  problem.cu_q = problem.cu_k = starts;
  problem.window_left = 20;
  problem.window_right = 0; /* causal */
  problem.sinks = sinks;

  unsigned state = 1;
  const mr_flash_tensor q = tensor(HEADS, &state), k = tensor(KV_HEADS, &state), v = tensor(KV_HEADS, &state);
  const mr_flash_tensor out = tensor(HEADS, NULL), d_out = tensor(HEADS, &state);
  float *lse = memory(ROWS * HEADS * sizeof(float)), d_sinks[HEADS];
  mr_flash_gradients gradients = {.d_out = d_out, .d_q = tensor(HEADS, NULL), .d_k = tensor(KV_HEADS, NULL)};
  gradients.d_v = tensor(KV_HEADS, NULL);
  gradients.d_sinks = d_sinks;
  gradients.deterministic = 1;

  size_t forward_bytes = 0, backward_bytes = 0;
  check(mr_flash_forward_workspace_bytes(device, &problem, &forward_bytes),
        "mr_flash_forward_workspace_bytes");
  check(mr_flash_backward_workspace_bytes(device, &problem, 1, &backward_bytes),
        "mr_flash_backward_workspace_bytes");
  void *for_forward = memory(forward_bytes), *for_backward = memory(backward_bytes);

  check(mr_flash_forward(device, &problem, q, k, v, out, lse, for_forward, forward_bytes, NULL),
        "mr_flash_forward");
  check(
      mr_flash_backward(device, &problem, q, k, v, out, lse, &gradients, for_backward, backward_bytes, NULL),
      "mr_flash_backward");

  /* loss = d_out . out; a step along its gradient changes it by step * |gradient|^2. */
  const double slope = dot(gradients.d_q, gradients.d_q, HEADS) +
                       dot(gradients.d_k, gradients.d_k, KV_HEADS) +
                       dot(gradients.d_v, gradients.d_v, KV_HEADS);
  const float step = 1e-3f;
  double loss[2];
  for (int side = 0; side < 2; ++side) {
    const float by = side == 0 ? -step : 2.0f * step;
    move(q, gradients.d_q, HEADS, by);
    move(k, gradients.d_k, KV_HEADS, by);
    move(v, gradients.d_v, KV_HEADS, by);
    check(mr_flash_forward(device, &problem, q, k, v, out, lse, for_forward, forward_bytes, NULL),
          "mr_flash_forward");
    loss[side] = dot(d_out, out, HEADS);
  }
  const double measured = (loss[1] - loss[0]) / (2.0 * step);
  printf("gradient . gradient %.4f, by a step along it %.4f\n", slope, measured);
  mr_device_close(device);
  return fabs(measured - slope) <= 1e-3 * slope ? 0 : 1;
}
