"""Operations called past torch's dispatcher (src/torch/direct_call.cpp), where nobody would see the difference."""

import sys

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_len_function_modes = torch._C._len_torch_function_stack


def _function_modes_matter():
    """A default device decides where tensors are made that name none: not those of an operation."""
    return _len_function_modes() and any(type(mode) is not DeviceContext
                                         for mode in torch.overrides._get_current_function_mode_stack())


def _takes_handle(to_handle, from_handle):
    """Does from_handle free the handle? Its name says so, and torch up to 2.15 at least leaves it to the caller. None: a
    torch that counts otherwise."""
    with torch._C.DisableTorchFunction():
        x = torch.empty(0, device="cpu")
        before = x._use_count()
        from_handle(to_handle(x))  # where it stays the caller's, these few bytes stay
        return {0: True, 1: False}.get(x._use_count() - before)


def _load():
    """The module of the extension, told what it asks torch; None where this torch or Python has not what it needs."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None  # the limited API is not for a Python without its lock
    try:
        from . import _direct
    except ImportError:  # built without Python's headers
        return None
    c = torch._C
    try:
        handles = c._aoti.unsafe_alloc_void_ptr_from_tensor, c._aoti.alloc_tensor_by_stealing_from_void_ptr
        watchers = (c._len_torch_dispatch_stack, _function_modes_matter, c._are_functorch_transforms_active,
                    c._is_any_autocast_enabled, c._autograd._profiler_enabled, c._is_tracing)
        takes_handle = _takes_handle(*handles)
    except AttributeError:  # none of torch's public names: a later version may have others
        return None
    if takes_handle is None:
        return None
    _direct.set_up(torch.Tensor, torch.nn.Parameter, *handles, torch.Tensor.is_neg, watchers, forward_ad, takes_handle)
    return _direct


_module = _load()
_KINDS = {"TensorType": "T", "IntType": "i", "FloatType": "f", "BoolType": "b", "StringType": "s"}


def _kind(type):
    if type.kind() == "OptionalType":
        return "O" if type.getElementType().kind() == "TensorType" else "?"
    return _KINDS.get(type.kind(), "?")


def direct(name, differentiable, results, otherwise, stepped=0, step=1):
    """What calls millrace::name past the dispatcher, with arguments by their place; its tensors at `differentiable` have a
    gradient. results: so many of them are given, one by itself; all of them without. Calls that may not go this way,
    for a gradient is wanted or somebody looks on, go to `otherwise`, which is given back where there is no such way; so
    do those where the last dimension of one of the first `stepped` arguments is no multiple of `step`."""
    if _module is None:
        return otherwise
    schema = getattr(torch.ops.millrace, name).default._schema
    arguments, count = schema.arguments, len(schema.returns)
    made = _module.operation(name, "".join(_kind(a.type) for a in arguments),
                             "".join("1" if i in differentiable else "0" for i in range(len(arguments))),
                             tuple(a.default_value if a.has_default_value() else ... for a in arguments), count,
                             count if results is None else results, count > 1 if results is None else results > 1, otherwise,
                             stepped, step)
    return otherwise if made is None else made
