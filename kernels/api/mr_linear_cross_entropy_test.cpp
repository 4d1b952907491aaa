// Cross-entropy of hidden states times a weight, forward and backward, in chunks of any size: against double,
// and each chunking's bits against another's.
#include "kernels/api/rows_test_support.h"

namespace millrace::api_test {
namespace {

TEST(LinearCrossEntropy, InChunksHasTheBitsOfAllLogitsAtOnce) {
  std::mt19937 random(7);
  const int64_t rows = 11, in = 64, vocab = 301;
  for (const mr_dtype type : {MR_F32, MR_Q8_0}) {
    const DevicePtr device = open_cpu();
    const TestMatrix m = random_matrix(device.get(), random, type, 1, vocab, in);
    size_t bytes = 0;
    ASSERT_EQ(mr_weight_bytes(device.get(), &m.matrix, &bytes), MR_OK);
    const Guarded memory(bytes);
    mr_weight* weight = nullptr;
    ASSERT_EQ(mr_weight_create(device.get(), &m.matrix, memory.data(), bytes, &weight), MR_OK)
        << mr_last_error();
    const std::vector<float> hidden = random_floats(random, rows * in);
    std::vector<float> logits(rows * vocab);
    std::vector<int32_t> targets;
    for (int64_t r = 0; r < rows; ++r)
      targets.push_back(r == 4 ? -100 : static_cast<int32_t>(random() % vocab));
    std::vector<float> want_loss(rows), want_lse(rows);
    size_t all = 0, one = 0, three = 0;
    ASSERT_EQ(mr_matmul_workspace_bytes(device.get(), weight, rows, &all), MR_OK);
    const Guarded space(all);
    const mr_matmul_args product{weight, nullptr, hidden.data(), 0, logits.data(), 0, rows, 0};
    ASSERT_EQ(mr_matmul(device.get(), &product, space.data(), all, nullptr), MR_OK) << mr_last_error();
    const mr_cross_entropy_args plain{
        rows, vocab, {logits.data(), MR_F32, 0}, targets.data(), -100, want_loss.data(), want_lse.data()};
    ASSERT_EQ(mr_cross_entropy(device.get(), &plain, nullptr), MR_OK) << mr_last_error();
    std::vector<float> loss(rows), lse(rows);
    const mr_linear_cross_entropy_args args{weight,         hidden.data(), 0,           rows,
                                            targets.data(), -100,          loss.data(), lse.data()};
    ASSERT_EQ(mr_linear_cross_entropy_workspace_bytes(device.get(), weight, 1, &one), MR_OK);
    ASSERT_EQ(mr_linear_cross_entropy_workspace_bytes(device.get(), weight, 3, &three), MR_OK);
    for (const size_t given : {one, three, three + one}) {
      const Guarded workspace(given);
      std::fill(loss.begin(), loss.end(), -1.0f);
      ASSERT_EQ(mr_linear_cross_entropy(device.get(), &args, workspace.data(), given, nullptr), MR_OK)
          << mr_last_error();
      EXPECT_EQ(loss, want_loss) << mr_dtype_name(type);
      EXPECT_EQ(lse, want_lse);
    }
    const Guarded workspace(one);
    EXPECT_REFUSED(mr_linear_cross_entropy(device.get(), &args, workspace.data(), one - 1, nullptr),
                   MR_ERROR_NO_MEMORY, std::to_string(one));
    mr_weight_destroy(weight);
  }
}

mr_status linear_cross_entropy_backward(mr_device* device,
                                        const mr_linear_cross_entropy_backward_args& args) {
  size_t bytes = 0;
  const mr_status status = mr_linear_cross_entropy_backward_workspace_bytes(device, &args, &bytes);
  if (status != MR_OK) return status;
  const Guarded workspace(bytes);
  std::memset(workspace.data(), kPoison, bytes);
  return mr_linear_cross_entropy_backward(device, &args, workspace.data(), bytes, nullptr);
}

// dlogits of a row, in double.
Row logit_gradient(const Row& logits, int32_t target, double dloss) {
  if (target < 0) return Row(logits.size(), 0.0);
  Row d = reference::softmax(logits, 1.0);
  d[static_cast<size_t>(target)] -= 1.0;
  for (double& v : d) v *= dloss;
  return d;
}

TEST(LinearCrossEntropy, GradientsWithoutLogitsInAnyChunks) {
  std::mt19937 random(17);
  struct Size {
    int64_t rows, in, vocab, gap;
  };
  int number = 0;
  for (const Size& size :
       {Size{1, 1, 1, 0}, Size{0, 5, 7, 0}, Size{7, 13, 131, 3}, Size{37, 19, 67, 0}, Size{270, 3, 530, 1}}) {
    const int64_t rows = size.rows, in = size.in, vocab = size.vocab;
    const mr_dtype of_hidden = kFloatTypes[number % 3], of_weight = kFloatTypes[(number + 1) % 3],
                   out = kFloatTypes[number++ % 3];
    Matrix hidden(rows, in, of_hidden, size.gap, random), weight(vocab, in, of_weight, size.gap, random);
    Matrix dhidden(rows, in, out, size.gap), dweight(vocab, in, out, size.gap);
    std::vector<Row> x, w;
    for (int64_t r = 0; r < rows; ++r) x.push_back(hidden.row(r));
    for (int64_t v = 0; v < vocab; ++v) w.push_back(weight.row(v));
    std::vector<int32_t> targets;
    std::vector<float> lse, dloss = random_floats(random, rows);
    std::vector<Row> dlogits;
    for (int64_t r = 0; r < rows; ++r) {
      targets.push_back(r == 3 ? -100 : static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
      Row logits;
      for (int64_t v = 0; v < vocab; ++v) {
        double sum = 0;
        for (int64_t i = 0; i < in; ++i)
          sum += x[static_cast<size_t>(r)][static_cast<size_t>(i)] *
                 w[static_cast<size_t>(v)][static_cast<size_t>(i)];
        logits.push_back(sum);
      }
      lse.push_back(static_cast<float>(reference::log_sum_exp(logits)));
      dlogits.push_back(logit_gradient(logits, targets.back(), dloss[static_cast<size_t>(r)]));
    }
    mr_linear_cross_entropy_backward_args args{
        rows, vocab,      in,           hidden.view(),  weight.view(),  targets.data(),
        -100, lse.data(), dloss.data(), dhidden.view(), dweight.view(), 0,
        0,    0};
    same_on_all({&dhidden, &dweight},
                [&](mr_device* device) { return linear_cross_entropy_backward(device, args); });
    const std::vector<uint8_t> whole_hidden = dhidden.bytes(), whole_weight = dweight.bytes();
    const DevicePtr device = open_cpu();
    for (const auto& [chunk_rows, chunk_vocab] :
         {std::pair{int64_t{1}, int64_t{1}}, {300, 500}, {1000, 3}, {2, 1000}}) {
      args.chunk_rows = chunk_rows, args.chunk_vocab = chunk_vocab;
      dhidden.poison(), dweight.poison();
      ASSERT_EQ(linear_cross_entropy_backward(device.get(), args), MR_OK) << mr_last_error();
      EXPECT_EQ(dhidden.bytes(), whole_hidden) << chunk_rows << " rows, " << chunk_vocab << " classes";
      EXPECT_EQ(dweight.bytes(), whole_weight) << chunk_rows << " rows, " << chunk_vocab << " classes";
    }
    for (int64_t r = 0; r < rows; ++r) {
      Row want(static_cast<size_t>(in), 0.0);
      for (int64_t v = 0; v < vocab; ++v) {
        for (size_t i = 0; i < want.size(); ++i)
          want[i] += dlogits[static_cast<size_t>(r)][static_cast<size_t>(v)] * w[static_cast<size_t>(v)][i];
      }
      expect_close(dhidden.row(r), want, out, "dhidden " + std::to_string(r));
    }
    for (int64_t v = 0; v < vocab; ++v) {
      Row want(static_cast<size_t>(in), 0.0);
      for (int64_t r = 0; r < rows; ++r) {
        for (size_t i = 0; i < want.size(); ++i)
          want[i] += dlogits[static_cast<size_t>(r)][static_cast<size_t>(v)] * x[static_cast<size_t>(r)][i];
      }
      expect_close(dweight.row(v), want, out, "dweight " + std::to_string(v));
    }
    // Each alone has the same bits; accumulated twice it is twice as much.
    const mr_rows to_weight = args.dweight;
    args.dweight = {};
    dhidden.poison();
    if (rows > 0) {
      ASSERT_EQ(linear_cross_entropy_backward(device.get(), args), MR_OK) << mr_last_error();
      EXPECT_EQ(dhidden.bytes(), whole_hidden);
    }
    args.dweight = to_weight, args.dhidden = {}, args.accumulate = 1;
    const Row before = dweight.row(vocab - 1);
    ASSERT_EQ(linear_cross_entropy_backward(device.get(), args), MR_OK) << mr_last_error();
    Row twice = before;
    for (double& v : twice) v *= 2;
    expect_close(dweight.row(vocab - 1), twice, out, "accumulated");
  }
}

TEST(LinearCrossEntropy, GradientsNameWhatIsWrong) {
  std::mt19937 random(18);
  Matrix hidden(2, 3, MR_F32, 0, random), weight(5, 3, MR_F32, 0, random), dhidden(2, 3, MR_F32, 0);
  const std::vector<int32_t> targets{1, 5};
  const std::vector<float> numbers(2, 1.0f);
  const mr_linear_cross_entropy_backward_args good{2,
                                                   5,
                                                   3,
                                                   hidden.view(),
                                                   weight.view(),
                                                   targets.data(),
                                                   -100,
                                                   numbers.data(),
                                                   numbers.data(),
                                                   dhidden.view(),
                                                   {},
                                                   0,
                                                   0,
                                                   0};
  const DevicePtr device = open_cpu();
  const auto refused = [&](mr_status status, const char* word, const auto& change) {
    mr_linear_cross_entropy_backward_args args = good;
    change(args);
    EXPECT_REFUSED(linear_cross_entropy_backward(device.get(), args), status, word);
  };
  using Args = mr_linear_cross_entropy_backward_args;
  refused(MR_ERROR_INVALID, "args.targets[1] is 5", [](Args&) {});
  refused(MR_ERROR_INVALID, "args.in", [](Args& a) { a.in = 0; });
  refused(MR_ERROR_INVALID, "expected one of them", [](Args& a) { a.dhidden = {}; });
  refused(MR_ERROR_INVALID, "args.accumulate", [](Args& a) { a.accumulate = 1; });
  refused(MR_ERROR_INVALID, "args.dhidden", [](Args& a) { a.dhidden = a.hidden; });
  refused(MR_ERROR_UNSUPPORTED, "args.weight.type", [](Args& a) { a.weight.type = MR_Q8_0; });
  refused(MR_ERROR_INVALID, "args.chunk_vocab", [](Args& a) { a.chunk_vocab = -1; });
  refused(MR_ERROR_INVALID, "args.lse", [](Args& a) { a.lse = nullptr; });
  EXPECT_EQ(dhidden.bytes(), std::vector<uint8_t>(24, kPoison));
}

}  // namespace
}  // namespace millrace::api_test
