// millrace_kernels.torch._direct: operations called past torch's dispatcher, which takes several times as
// long over a call of small tensors as the call itself. Python's limited API and torch's stable ABI alone.
//
// A call goes this way where nobody would see the difference: all tensors are torch's own, strided, on a CPU
// or a GPU, none is to have a gradient, and no mode, transform, tracer or profiler looks on. Any other is
// handed on.
#include "direct_call.h"

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <array>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using millrace::torch_ops::BoxedKernel;

constexpr size_t kMostArguments = 24;
constexpr const char* kCapsule = "millrace_kernels.torch._direct.operation";

// An owned reference.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// What torch tells and makes, set once by `set_up`; kept as long as the process.
struct Torch {
  PyObject *tensor = nullptr, *parameter = nullptr;  // the two classes
  PyObject* to_handle = nullptr;                     // a tensor -> a capsule with an owned handle
  PyObject* from_handle = nullptr;                   // a capsule with a handle -> the tensor
  bool takes_handle = false;                         // which is from_handle's to free then
  PyObject* is_negated = nullptr;                    // a view whose numbers stand with the other sign
  PyObject* watchers = nullptr;  // tuple of functions; one that gives something else than 0, False, None sees
  PyObject *forward_ad = nullptr,
           *level_name = nullptr;  // a module, and its variable: below 0 without a level
  PyObject* requires_grad_name = nullptr;
} torch_of;

struct Operation {
  BoxedKernel kernel = nullptr;
  std::string kinds;              // of each argument: T tensor, O tensor or None, i, f, b, s
  std::string differentiable;     // '1' where a tensor's gradient is wanted if that requires one
  std::vector<Ref> defaults;      // of each argument, null where it has none
  size_t results = 0, given = 0;  // so many tensors are made, so many of them are given
  bool as_tuple = false;
  size_t stepped =
      0;  // so many of the first arguments, tensors, have a last dimension of a multiple of `step`
  int64_t step = 1;
  Ref otherwise;  // who takes the calls that do not go this way
};

enum class Way { kDirect, kOther, kError };

bool is_false(PyObject* x) { return x == Py_False || x == Py_None; }

Way nobody_looks_on() {
  const Py_ssize_t count = PyTuple_Size(torch_of.watchers);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Ref seen(PyObject_CallNoArgs(PyTuple_GetItem(torch_of.watchers, i)));
    if (!seen) return Way::kError;
    if (is_false(seen.get())) continue;
    const int yes = PyObject_IsTrue(seen.get());
    if (yes != 0) return yes < 0 ? Way::kError : Way::kOther;
  }
  const Ref level(PyObject_GetAttr(torch_of.forward_ad, torch_of.level_name));
  if (!level) return Way::kError;
  const long at = PyLong_AsLong(level.get());
  if (at == -1 && PyErr_Occurred() != nullptr) return Way::kError;
  return at < 0 ? Way::kDirect : Way::kOther;
}

Way tensor_is_plain(PyObject* x, bool gradient_counts) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  if (type != torch_of.tensor && type != torch_of.parameter) return Way::kOther;
  if (gradient_counts) {
    const Ref wanted(PyObject_GetAttr(x, torch_of.requires_grad_name));
    if (!wanted) return Way::kError;
    if (wanted.get() != Py_False) return Way::kOther;
  }
  const Ref negated(PyObject_CallFunctionObjArgs(torch_of.is_negated, x, nullptr));
  if (!negated) return Way::kError;
  return negated.get() == Py_False ? Way::kDirect : Way::kOther;
}

// Is an argument of its kind, as the operation takes it? What torch would convert or refuse is torch's.
Way fits(char kind, PyObject* x, bool gradient_counts) {
  switch (kind) {
    case 'O':
      if (x == Py_None) return Way::kDirect;
      [[fallthrough]];
    case 'T':
      return tensor_is_plain(x, gradient_counts);
    case 'i':
      return PyLong_CheckExact(x) ? Way::kDirect : Way::kOther;
    case 'f':
      return PyFloat_CheckExact(x) || PyLong_CheckExact(x) ? Way::kDirect : Way::kOther;
    case 'b':
      return x == Py_True || x == Py_False ? Way::kDirect : Way::kOther;
    case 's':
      return PyUnicode_CheckExact(x) ? Way::kDirect : Way::kOther;
    default:
      return Way::kOther;
  }
}

struct HandleDeleter {
  void operator()(AtenTensorOpaque* handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, HandleDeleter>;

Way handle_of(PyObject* x, Handle& handle) {
  const Ref capsule(PyObject_CallFunctionObjArgs(torch_of.to_handle, x, nullptr));
  if (!capsule) return Way::kError;
  handle.reset(static_cast<AtenTensorHandle>(PyCapsule_GetPointer(capsule.get(), nullptr)));
  if (handle == nullptr) return Way::kError;
  int32_t device = 0, layout = 0;
  if (aoti_torch_get_device_type(handle.get(), &device) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_layout(handle.get(), &layout) != AOTI_TORCH_SUCCESS)
    return Way::kOther;
  static const int32_t cpu = aoti_torch_device_type_cpu(), strided = aoti_torch_layout_strided();
#ifdef MILLRACE_KERNELS_CUDA
  static const int32_t cuda = aoti_torch_device_type_cuda();
  const bool ours = device == cpu || device == cuda;
#else
  const bool ours = device == cpu;
#endif
  return ours && layout == strided ? Way::kDirect : Way::kOther;
}

bool is_stepped(AtenTensorHandle x, int64_t step) {
  int64_t dims = 0, last = 0;
  return aoti_torch_get_dim(x, &dims) == AOTI_TORCH_SUCCESS && dims > 0 &&
         aoti_torch_get_size(x, dims - 1, &last) == AOTI_TORCH_SUCCESS && last % step == 0;
}

namespace stable = torch::stable::detail;

// Arguments as torch's dispatcher would hand them to the kernel, which takes them over.
struct Stack {
  std::array<StableIValue, kMostArguments> values;
  std::array<Handle, kMostArguments> handles;
};

Way convert(const Operation& op, PyObject* const* args, Stack& stack) {
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    PyObject* const x = args[i];
    const char kind = op.kinds[i];
    if (kind == 'i') {
      const long long value = PyLong_AsLongLong(x);
      if (value == -1 && PyErr_Occurred() != nullptr) {
        PyErr_Clear();  // beyond 64 bits: torch says so
        return Way::kOther;
      }
      stack.values[i] = stable::from(static_cast<int64_t>(value));
    } else if (kind == 'f') {
      const double value = PyFloat_AsDouble(x);
      if (value == -1.0 && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return Way::kOther;
      }
      stack.values[i] = stable::from(value);
    } else if (kind == 'b') {
      stack.values[i] = stable::from(x == Py_True);
    } else if (kind != 's' && x != Py_None) {
      const Way way = handle_of(x, stack.handles[i]);
      if (way != Way::kDirect) return way;
      if (i < op.stepped && !is_stepped(stack.handles[i].get(), op.step)) return Way::kOther;
    }
  }
  return Way::kDirect;
}

// What owns memory comes last: from here on nothing fails, and the kernel frees it.
bool hand_over(const Operation& op, PyObject* const* args, Stack& stack) {
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    if (op.kinds[i] == 's') {
      Py_ssize_t length = 0;
      const char* text = PyUnicode_AsUTF8AndSize(args[i], &length);
      if (text == nullptr) return false;
      stack.values[i] = stable::from(std::string(text, static_cast<size_t>(length)));
    }
  }
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    if (op.kinds[i] == 'T') {
      stack.values[i] = stable::from(stack.handles[i].release());
    } else if (op.kinds[i] == 'O') {
      std::optional<AtenTensorHandle> maybe;
      if (stack.handles[i] != nullptr) maybe = stack.handles[i].release();
      stack.values[i] = stable::from(maybe);
    }
  }
  return true;
}

// Runs the kernel without the GIL. False: a Python exception is set.
bool run(const Operation& op, StableIValue* values) {
  std::string failure;
  bool failed = false, no_memory = false;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    op.kernel(values, op.kinds.size(), op.results);
  } catch (const std::bad_alloc&) {
    no_memory = true;
  } catch (const std::exception& error) {
    failed = true;
    failure = error.what();
  }
  PyEval_RestoreThread(state);
  if (no_memory) PyErr_NoMemory();
  if (failed) PyErr_SetString(PyExc_RuntimeError, failure.c_str());
  return !failed && !no_memory;
}

PyObject* tensor_of(Handle handle) {
  const Ref capsule(PyCapsule_New(handle.get(), nullptr, nullptr));
  if (!capsule) return nullptr;
  PyObject* const made = PyObject_CallFunctionObjArgs(torch_of.from_handle, capsule.get(), nullptr);
  if (made != nullptr && torch_of.takes_handle) (void)handle.release();
  return made;
}

PyObject* given_of(const Operation& op, const StableIValue* values) {
  std::array<Handle, kMostArguments> made;
  for (size_t i = 0; i < op.results; ++i) made[i].reset(stable::to<AtenTensorHandle>(values[i]));
  if (!op.as_tuple) return tensor_of(std::move(made[0]));
  Ref all(PyTuple_New(static_cast<Py_ssize_t>(op.given)));
  if (!all) return nullptr;
  for (size_t i = 0; i < op.given; ++i) {
    PyObject* const one = tensor_of(std::move(made[i]));
    if (one == nullptr) return nullptr;
    PyTuple_SetItem(all.get(), static_cast<Py_ssize_t>(i), one);
  }
  return all.release();
}

PyObject* hand_on(const Operation& op, PyObject* const* args, Py_ssize_t count) {
  const Ref all(PyTuple_New(count));
  if (!all) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SetItem(all.get(), i, args[i]);
  }
  return PyObject_Call(op.otherwise.get(), all.get(), nullptr);
}

Way may_go_directly(const Operation& op, PyObject* const* args) {
  const bool gradients = aoti_torch_grad_mode_is_enabled();
  for (size_t i = 0; i < op.kinds.size(); ++i) {
    const Way way = fits(op.kinds[i], args[i], gradients && op.differentiable[i] == '1');
    if (way != Way::kDirect) return way;
  }
  return nobody_looks_on();
}

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const auto& op = *static_cast<const Operation*>(PyCapsule_GetPointer(self, kCapsule));
  const auto wanted = static_cast<Py_ssize_t>(op.kinds.size());
  if (count > wanted) return hand_on(op, given, count);
  std::array<PyObject*, kMostArguments> args;
  for (Py_ssize_t i = 0; i < wanted; ++i) {
    args[i] = i < count ? given[i] : op.defaults[i].get();
    if (args[i] == nullptr) return hand_on(op, given, count);  // torch says what is missing
  }
  Way way = may_go_directly(op, args.data());
  Stack stack;
  if (way == Way::kDirect) way = convert(op, args.data(), stack);
  if (way == Way::kOther) return hand_on(op, given, count);
  if (way == Way::kError || !hand_over(op, args.data(), stack)) return nullptr;
  if (!run(op, stack.values.data())) return nullptr;
  return given_of(op, stack.values.data());
}

void forget(PyObject* capsule) { delete static_cast<Operation*>(PyCapsule_GetPointer(capsule, kCapsule)); }

PyMethodDef call_definition{"operation", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)),
                            METH_FASTCALL, nullptr};

PyObject* wrong(const char* what) {
  PyErr_SetString(PyExc_ValueError, what);
  return nullptr;
}

// operation(name, kinds, differentiable, defaults, results, given, as_tuple, otherwise, stepped, step) ->
// what calls millrace::name, or None: no kernel of this name is compiled.
PyObject* operation(PyObject*, PyObject* args) {
  const char *name = nullptr, *kinds = nullptr, *differentiable = nullptr;
  PyObject *defaults = nullptr, *otherwise = nullptr;
  Py_ssize_t results = 0, given = 0, stepped = 0, step = 1;
  int as_tuple = 0;
  if (PyArg_ParseTuple(args, "sssOnnpOnn", &name, &kinds, &differentiable, &defaults, &results, &given,
                       &as_tuple, &otherwise, &stepped, &step) == 0)
    return nullptr;
  auto op = std::make_unique<Operation>();
  op->kernel = millrace_torch_kernel(name);
  if (op->kernel == nullptr) Py_RETURN_NONE;
  op->kinds = kinds;
  op->differentiable = differentiable;
  const size_t count = op->kinds.size();
  if (count > kMostArguments || op->differentiable.size() != count ||
      PyTuple_Size(defaults) != Py_ssize_t(count))
    return wrong("kinds, differentiable and defaults have an entry for each argument, at most 24");
  if (results < 1 || results > Py_ssize_t(count) || given < 1 || given > results)
    return wrong("results and given are at least 1 and at most the number of arguments");
  if (stepped < 0 || op->kinds.find_first_not_of('T') < size_t(stepped) || step < 1)
    return wrong("stepped arguments are tensors that come first, and step is at least 1");
  op->stepped = static_cast<size_t>(stepped);
  op->step = step;
  for (size_t i = 0; i < count; ++i) {
    PyObject* const value = PyTuple_GetItem(defaults, static_cast<Py_ssize_t>(i));
    const bool none = value == Py_Ellipsis;
    if (!none) Py_INCREF(value);
    op->defaults.emplace_back(none ? nullptr : value);
  }
  op->results = static_cast<size_t>(results);
  op->given = static_cast<size_t>(given);
  op->as_tuple = as_tuple != 0;
  Py_INCREF(otherwise);
  op->otherwise = Ref(otherwise);
  const Ref capsule(PyCapsule_New(op.get(), kCapsule, &forget));
  if (!capsule) return nullptr;
  (void)op.release();
  return PyCFunction_NewEx(&call_definition, capsule.get(), nullptr);
}

// set_up(tensor, parameter, to_handle, from_handle, is_negated, watchers, forward_ad, takes_handle)
PyObject* set_up(PyObject*, PyObject* args) {
  Torch& t = torch_of;
  PyObject* told[7] = {};
  int takes_handle = 0;
  if (PyArg_ParseTuple(args, "OOOOOO!Op", &told[0], &told[1], &told[2], &told[3], &told[4], &PyTuple_Type,
                       &told[5], &told[6], &takes_handle) == 0)
    return nullptr;
  PyObject** const kept[7] = {&t.tensor,     &t.parameter, &t.to_handle, &t.from_handle,
                              &t.is_negated, &t.watchers,  &t.forward_ad};
  for (size_t i = 0; i < 7; ++i) {
    Py_INCREF(told[i]);
    *kept[i] = told[i];
  }
  t.takes_handle = takes_handle != 0;
  t.level_name = PyUnicode_InternFromString("_current_level");
  t.requires_grad_name = PyUnicode_InternFromString("requires_grad");
  if (t.level_name == nullptr || t.requires_grad_name == nullptr) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"operation", operation, METH_VARARGS, nullptr},
                         {"set_up", set_up, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition{
    PyModuleDef_HEAD_INIT, "_direct", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__direct() { return PyModule_Create(&definition); }
