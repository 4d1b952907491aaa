// An operation of TensorFlow over the C API: MillraceRmsNorm(x, weight; eps) -> y on a CPU.
//
//   flags=$(python -c 'import tensorflow as tf; print(*tf.sysconfig.get_compile_flags(),
//   *tf.sysconfig.get_link_flags())') at=$(python -c 'import millrace_kernels as m;
//   print(m.library_path().parent.parent)')
//   g++ -std=c++17 -O2 -shared -fPIC tensorflow_operation.cpp -o millrace_tf.so -I$at/include $flags \
//       -L$at/lib -lmillrace_kernels -Wl,-rpath,$at/lib
//   python -c 'import tensorflow as tf; print(tf.load_op_library("./millrace_tf.so").millrace_rms_norm(...))'
#include <mutex>

#include <millrace/kernels.h>
#include <tensorflow/core/framework/op.h>
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/shape_inference.h>

namespace {

REGISTER_OP("MillraceRmsNorm")
    .Input("x: float")
    .Input("weight: float")
    .Attr("eps: float = 1e-6")
    .Output("y: float")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(0));
      return tensorflow::OkStatus();
    });

class RmsNorm : public tensorflow::OpKernel {
 public:
  explicit RmsNorm(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("eps", &eps_));
    OP_REQUIRES(context, mr_device_open("cpu", nullptr, &device_) == MR_OK,
                tensorflow::errors::Internal(mr_last_error()));
  }
  ~RmsNorm() override { mr_device_close(device_); }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& x = context->input(0);
    const tensorflow::Tensor& weight = context->input(1);
    OP_REQUIRES(context, x.dims() > 0 && weight.NumElements() == x.dim_size(x.dims() - 1),
                tensorflow::errors::InvalidArgument("weight has ", weight.NumElements(), " elements for x ",
                                                    x.shape().DebugString()));
    tensorflow::Tensor* y = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &y));
    if (x.NumElements() == 0) return;
    mr_norm_args args{};
    args.kind = MR_NORM_RMS;
    args.cols = weight.NumElements();
    args.rows = x.NumElements() / args.cols;
    args.x = {const_cast<float*>(x.flat<float>().data()), MR_F32, 0};
    args.y = {y->flat<float>().data(), MR_F32, 0};
    args.weight = {const_cast<float*>(weight.flat<float>().data()), MR_F32};
    args.eps = eps_;
    const std::lock_guard<std::mutex> lock(mutex_);  // a device serves one thread at a time
    OP_REQUIRES(context, mr_norm(device_, &args, nullptr) == MR_OK,
                tensorflow::errors::InvalidArgument(mr_last_error()));
  }

 private:
  float eps_ = 0.0f;
  mr_device* device_ = nullptr;
  std::mutex mutex_;
};

REGISTER_KERNEL_BUILDER(Name("MillraceRmsNorm").Device(tensorflow::DEVICE_CPU), RmsNorm);

}  // namespace
