// Dropout by Philox 4x32-10 (include/millrace/kernels/dropout.h has the layout of its counter).
#include "kernels/cuda/fused/each_row.cuh"
#include "kernels/cuda/fused/fused.h"
#include "kernels/quant/philox.h"

namespace millrace::cuda {
namespace {

template <Form kKnown>
struct DropoutOp {
  static constexpr Form kForm = kKnown;
  Rows x, y;
  philox::Keys keys;  // of all rounds: the same for every thread
  uint32_t offset_low, offset_high, drop_below;
  float scale;
  struct Loaded {
    Raw8 x;
  };
  __device__ Loaded load(int64_t row, int64_t col, int n) const { return {load8<kForm>(x, row, col, n)}; }
  __device__ void finish(const Loaded& l, int64_t row, int64_t col, int n) const {
    Values8 v = to_float<kForm>(x, l.x);
    static_assert(kColumns == 8, "two counters");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const philox::Words words = philox::generate(
          {{static_cast<uint32_t>(col / 4 + half), static_cast<uint32_t>(row), offset_low, offset_high}},
          keys);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = v.v[4 * half + i];
        value = words.w[i] >= drop_below ? value * scale : 0.0f;
      }
    }
    store8<kForm>(y, row, col, n, v);
  }
};

template <Form kForm>
void launch_form(const mr_dropout_args& args, const Launch& at) {
  const DropoutOp<kForm> op{rows_of(args.x),
                            rows_of(args.y),
                            philox::keys_of(args.seed),
                            static_cast<uint32_t>(args.offset),
                            static_cast<uint32_t>(args.offset >> 32),
                            philox::drop_below(args.p),
                            philox::keep_scale(args.p)};
  launch_each_row("dropout", op, args.rows, args.cols, at);
}

}  // namespace

void launch_dropout(const mr_dropout_args& args, const Launch& at) {
  const bool plain =
      args.cols % kColumns == 0 && is_plain_bf16(rows_of(args.x)) && is_plain_bf16(rows_of(args.y));
  plain ? launch_form<Form::kBf16>(args, at) : launch_form<Form::kAny>(args, at);
}

}  // namespace millrace::cuda
