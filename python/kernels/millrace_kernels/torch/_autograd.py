"""Gradients of the operations, by the library's own backward kernels, and what autocast does with them."""

import torch

from ._direct_call import direct

ops = torch.ops.millrace


RECORDED = {}  # of an operation's name: what it saves, which of its results have a gradient, and that


def differentiable(name, setup, twice=False, results=None):
    """The function below it is the gradient of millrace::name; it gets what `setup` saved. twice: it is made of operations
    that have gradients themselves; of any other a second derivative is refused. results: so many have a gradient, all of
    them without; those that nobody used come as None."""

    def register(backward):
        gradient = backward if twice else once(name, backward)
        torch.library.register_autograd(f"millrace::{name}", gradient, setup_context=marking(setup, results))
        RECORDED[name] = setup, results, gradient
        return gradient

    return register


def marking(setup, results):
    def whole(ctx, inputs, output):
        setup(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[results:])
        ctx.set_materialize_grads(False)

    return setup if results is None else whole


class _Refused(torch.autograd.Function):
    """The first `count` tensors, as made of the rest: until somebody asks for the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name, count, *tensors):
        return tensors[:count]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"millrace::{ctx.name} has no second derivative")


def once(name, backward):
    """backward, whose results refuse to be differentiated: its kernels have no gradient, and torch takes that for zero."""

    def gradient(ctx, *d_out):
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *d_out)
        with torch.no_grad():
            made = list(backward(ctx, *d_out))
        there = [i for i, d in enumerate(made) if d is not None]
        of = [t for t in (*d_out, *ctx.saved_tensors) if t is not None and t.requires_grad]
        if there and of:
            for i, d in zip(there, _Refused.apply(name, len(there), *(made[i] for i in there), *of)):
                made[i] = d
        return tuple(made)

    return gradient


def defaults_of(op):
    return [a.default_value if a.has_default_value() else None for a in op._schema.arguments]


def recording(name, results=None):
    """millrace::name by an autograd.Function of its own: a third of the time that the one takes which register_autograd
    makes for every kind of operation. results: so many of them are given, one by itself, and those are all that have a
    gradient; what is saved alone costs nothing on the way out."""
    op, (save, with_gradient, backward) = getattr(ops, name).default, RECORDED[name]
    assert results in (None, with_gradient)
    call, below_autograd = getattr(op, "_op", op), torch._C._AutoDispatchBelowAutograd
    defaults = defaults_of(op)
    setup = marking(save, with_gradient) if results is None else save

    def dispatched(*args):
        with below_autograd():
            return call(*args)

    compute = direct(name, (), None, dispatched)

    def forward(ctx, *args):
        made = compute(*args)
        setup(ctx, args if len(args) == len(defaults) else (*args, *defaults[len(args):]), made)
        if results is None:
            return made
        if results == 1:
            return made[0]
        ctx.set_materialize_grads(False)
        return made[:results]

    # By its name in torch's messages, which is taken when the class is made.
    made = type(f"millrace_{name}", (torch.autograd.Function,),
                {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    # Function.apply itself looks for functorch's transforms, which `entry` has done.
    return super(torch.autograd.Function, made).apply


def transformed(name):
    """millrace::name for torch.func: its transforms want what is computed and what is saved of it apart."""
    op, (save, results, backward) = getattr(ops, name).default, RECORDED[name]
    setup, defaults = marking(save, results), defaults_of(op)

    def setup_context(ctx, inputs, output):
        setup(ctx, (*inputs, *defaults[len(inputs):]), output)

    def forward(*args):
        return op(*args)

    return type(f"millrace_{name}", (torch.autograd.Function,), {
        "forward": staticmethod(forward), "setup_context": staticmethod(setup_context), "backward": staticmethod(backward),
        "generate_vmap_rule": True}).apply


def under_transforms(name):
    """What calls millrace::name where torch.func's transforms look on."""
    apply, count = transformed(name), CAST.get(name, 0)

    def go(*args):
        device = args[0].device.type if count else ""
        if count == 0 or not torch.is_autocast_enabled(device):
            return apply(*args)
        with torch.autocast(device, enabled=False):
            return apply(*cast_of(args, count, torch.get_autocast_dtype(device)))

    return go


class _Again:
    """Operations in gradients that are differentiable themselves: torch.func's transforms want them in their own way."""

    def __getattr__(self, name):
        op, transforms_active = getattr(ops, name).default, torch._C._are_functorch_transforms_active
        made = {}

        def go(*args):
            if torch.compiler.is_compiling() or not transforms_active():
                return op(*args)
            if not made:
                made[name] = under_transforms(name)
            return made[name](*args)

        setattr(self, name, go)
        return go


again = _Again()


def like(gradient, x):
    """A gradient in the type of what it is of; None stays None."""
    return None if gradient is None or x is None else gradient.to(x.dtype)


# ---------------------------------------------------------------- attention


def save_attention(ctx, inputs, output):
    q, k, v, sinks, cu_q, cu_k, max_q, max_k, starts, columns, *numbers = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, sinks, cu_q, cu_k, starts, columns)
    ctx.lengths, ctx.numbers = (max_q, max_k), numbers


@differentiable("attention", save_attention, results=1)
def _(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 16
    q, k, v, out, lse, sinks, cu_q, cu_k, starts, columns = ctx.saved_tensors
    d_q, d_k, d_v, d_sinks = ops.attention_backward(d_out, q, k, v, out, lse, sinks, cu_q, cu_k, *ctx.lengths, starts,
                                                    columns, *ctx.numbers)
    return d_q, d_k, d_v, None if sinks is None else d_sinks, *(None,) * 12


def save_attention_dense(ctx, inputs, output):
    q, k, v, sinks, ctx.heads_first, causal, scale, softcap, left, right = inputs
    ctx.numbers = scale, softcap, left, 0 if causal else right
    ctx.save_for_backward(q, k, v, *output, sinks)


@differentiable("attention_dense_lse", save_attention_dense, results=1)
def _(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 10
    *tensors, lse, sinks = (d_out, *ctx.saved_tensors)
    if ctx.heads_first:
        tensors = [x.transpose(1, 2) for x in tensors]
    *made, d_sinks = ops.attention_backward(*tensors, lse, sinks, None, None, 0, 0, None, None, 0, 0, *ctx.numbers)
    if ctx.heads_first:
        made = [x.transpose(1, 2) for x in made]
    return *made, None if sinks is None else d_sinks, *(None,) * 6


# ---------------------------------------------------------------- norms


def norm_gradients(ctx, dy, dsum):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    d_x, d_weight, d_bias = ops.norm_backward(dy, x, weight, mean, rstd, dsum, ctx.offset, weight is not None,
                                              bias is not None)
    return d_x, like(d_weight, weight), like(d_bias, bias)


def save_norm(ctx, x, weight, bias, mean, rstd, offset):
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.offset = offset


def save_rms_norm(ctx, inputs, output):
    x, weight, _, offset = inputs
    save_norm(ctx, x, weight, None, None, output[1], offset)


@differentiable("rms_norm", save_rms_norm, results=1)
def _(ctx, dy, *_):
    d_x, d_weight, _ = norm_gradients(ctx, dy, None)
    return d_x, d_weight, None, None


def save_layer_norm(ctx, inputs, output):
    x, weight, bias, _ = inputs
    save_norm(ctx, x, weight, bias, output[1], output[2], 0.0)


@differentiable("layer_norm", save_layer_norm, results=1)
def _(ctx, dy, *_):
    return *norm_gradients(ctx, dy, None), None


def save_add_rms_norm(ctx, inputs, output):
    x, residual, weight, _, offset = inputs
    save_norm(ctx, output[1], weight, None, None, output[2], offset)
    ctx.types = x.dtype, residual.dtype


@differentiable("add_rms_norm", save_add_rms_norm, results=2)
def _(ctx, dy, dsum, *_):
    d_sum, d_weight, _ = norm_gradients(ctx, dy, dsum)
    return d_sum.to(ctx.types[0]), d_sum.to(ctx.types[1]), d_weight, None, None


def save_add_layer_norm(ctx, inputs, output):
    x, residual, weight, bias, _ = inputs
    save_norm(ctx, output[1], weight, bias, output[2], output[3], 0.0)
    ctx.types = x.dtype, residual.dtype


@differentiable("add_layer_norm", save_add_layer_norm, results=2)
def _(ctx, dy, dsum, *_):
    d_sum, d_weight, d_bias = norm_gradients(ctx, dy, dsum)
    return d_sum.to(ctx.types[0]), d_sum.to(ctx.types[1]), d_weight, d_bias, None


# ---------------------------------------------------------------- rotary, activations, softmax, dropout


def save_rotary(ctx, inputs, output):
    _, positions, inv_freq, ctx.magnitude, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(positions, inv_freq)


@differentiable("rotary", save_rotary, twice=True)
def _(ctx, dy):
    positions, inv_freq = ctx.saved_tensors
    return again.rotary(dy, positions, inv_freq, ctx.magnitude, ctx.interleaved, not ctx.inverse), *(None,) * 5


def save_activation(ctx, inputs, output):
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


@differentiable("activation", save_activation)
def _(ctx, dy):
    return ops.activation_backward(dy, *ctx.saved_tensors, ctx.kind), None


def save_gated(ctx, inputs, output):
    gate, up, *ctx.how = inputs
    ctx.save_for_backward(gate, up)


@differentiable("gated_activation", save_gated)
def _(ctx, dy):
    d_gate, d_up = ops.gated_activation_backward(dy, *ctx.saved_tensors, *ctx.how)
    return d_gate, d_up, None, None, None


def save_softmax(ctx, inputs, output):
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


@differentiable("softmax", save_softmax)
def _(ctx, dy):
    return ops.softmax_backward(dy, *ctx.saved_tensors, ctx.scale), None


def save_dropout(ctx, inputs, output):
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


@differentiable("dropout", save_dropout, twice=True)
def _(ctx, dy):
    return again.dropout(dy, ctx.p, *ctx.saved_tensors), None, None


# ---------------------------------------------------------------- losses, tables


def save_cross_entropy(ctx, inputs, output):
    logits, targets, ctx.ignore, ctx.reduction = inputs
    ctx.save_for_backward(logits, targets, output[1])


@differentiable("cross_entropy", save_cross_entropy, results=1)
def _(ctx, d_loss, *_):
    if d_loss is None:
        return None, None, None, None
    logits, targets, lse = ctx.saved_tensors
    return ops.cross_entropy_backward(d_loss, logits, targets, lse, ctx.ignore, ctx.reduction), None, None, None


def save_linear_cross_entropy(ctx, inputs, output):
    hidden, weight, targets, ctx.ignore, ctx.reduction = inputs
    ctx.save_for_backward(hidden, weight, targets, output[1])


@differentiable("linear_cross_entropy", save_linear_cross_entropy, results=1)
def _(ctx, d_loss, *_):
    wanted = ctx.needs_input_grad[:2]
    if d_loss is None or not any(wanted):
        return (None,) * 5
    hidden, weight, targets, lse = ctx.saved_tensors
    made = ops.linear_cross_entropy_backward(d_loss, hidden, weight, targets, lse, ctx.ignore, *wanted, ctx.reduction)
    return *(d if w else None for d, w in zip(made, wanted)), None, None, None


def save_embedding(ctx, inputs, output):
    tokens, table, ctx.scale = inputs
    ctx.vocab = table.shape[0]
    ctx.save_for_backward(tokens)


@differentiable("embedding", save_embedding)
def _(ctx, dy):
    return None, ops.embedding_backward(dy, *ctx.saved_tensors, ctx.vocab, ctx.scale), None


# ---------------------------------------------------------------- products


def as_rows(x):
    """[..., cols] as [rows, cols], empty ones too."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


def save_linear(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


@differentiable("linear", save_linear, twice=True)
def _(ctx, dy):
    x, weight = ctx.saved_tensors
    rows = as_rows(dy)
    d_x = d_weight = d_bias = None
    if ctx.needs_input_grad[0]:
        d_x = again.matmul(rows, weight).reshape(x.shape)
    if ctx.needs_input_grad[1]:
        d_weight = again.matmul(rows, as_rows(x), True, False)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        d_bias = rows.sum(0, dtype=torch.float32)
    return d_x, d_weight, d_bias


def save_matmul(ctx, inputs, output):
    a, b, *ctx.transposed = inputs
    ctx.save_for_backward(a, b)


@differentiable("matmul", save_matmul, twice=True)
def _(ctx, dc):
    a, b = ctx.saved_tensors
    transpose_a, transpose_b = ctx.transposed
    d_a = d_b = None
    if ctx.needs_input_grad[0]:
        d_a = again.matmul(b, dc, transpose_b, True) if transpose_a else again.matmul(dc, b, False, not transpose_b)
    if ctx.needs_input_grad[1]:
        d_b = again.matmul(dc, a, True, transpose_a) if transpose_b else again.matmul(a, dc, not transpose_a, False)
    return d_a, d_b, None, None


def save_linear_quantized(ctx, inputs, output):
    _, weight, ctx.type, scales, bias, *ctx.grid = inputs
    ctx.save_for_backward(weight, scales)
    ctx.has_bias = bias is not None


@differentiable("linear_quantized", save_linear_quantized, twice=True)
def _(ctx, dy):
    weight, scales = ctx.saved_tensors
    d_x = d_bias = None
    rows = as_rows(dy)
    if ctx.needs_input_grad[0]:
        plain = ops.dequantize(weight, ctx.type, scales, *ctx.grid)
        d_x = again.matmul(rows, plain).reshape(*dy.shape[:-1], plain.shape[1])
    if ctx.has_bias and ctx.needs_input_grad[4]:
        d_bias = rows.sum(0)
    return d_x, None, None, None, d_bias, None, None


def save_linear_packed(ctx, inputs, output):
    _, packed, ctx.type, ctx.rows, ctx.cols, bias = inputs
    ctx.save_for_backward(packed)
    ctx.has_bias = bias is not None


@differentiable("linear_packed", save_linear_packed, twice=True)
def _(ctx, dy):
    (packed,) = ctx.saved_tensors
    d_x = d_bias = None
    rows = as_rows(dy)
    if ctx.needs_input_grad[0]:
        if packed.device.type != "cpu" and ctx.type not in UNPACKED_ON_GPU:
            raise NotImplementedError(f"millrace::linear_packed: no gradient of x with weights of {ctx.type} on a GPU, "
                                      f"expected {', '.join(UNPACKED_ON_GPU)}")
        plain = ops.weight_unpack(packed, ctx.type, ctx.rows, ctx.cols)
        d_x = again.matmul(rows, plain).reshape(*dy.shape[:-1], ctx.cols)
    if ctx.has_bias and ctx.needs_input_grad[5]:
        d_bias = rows.sum(0)
    return d_x, None, None, None, None, d_bias


# A GPU's tiles give their weights by multiplying unit vectors. Of other types a product rounds more than a weight may.
UNPACKED_ON_GPU = ("f32", "f16", "bf16", "q8_0", "q4_0")


@torch.library.custom_op("millrace::weight_unpack", mutates_args=())
def weight_unpack(packed: torch.Tensor, type: str, rows: int, cols: int) -> torch.Tensor:
    """float32 [rows, cols] of what ops.weight_pack made."""
    if packed.device.type != "cpu":
        unit = torch.eye(cols, dtype=torch.float32, device=packed.device)
        return ops.linear_packed(unit, packed, type, rows, cols).t().contiguous()
    if type == "f8_e4m3":
        codes, behind = packed[:rows * cols].view(torch.float8_e4m3fn).view(rows, cols), -rows * cols % 256
        return ops.dequantize(codes, type, packed[rows * cols + behind:].view(torch.float32))
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}.get(type)
    if dtype is not None:
        return packed.view(dtype).view(rows, cols).to(torch.float32, copy=True)
    return ops.dequantize(packed.view(rows, packed.numel() // rows), type)


@weight_unpack.register_fake
def _(packed, type, rows, cols):
    return packed.new_empty((rows, cols), dtype=torch.float32)


def save_lowbit_linear(ctx, inputs, output):
    _, weight, *ctx.shape, bias, ctx.backward_pass = inputs
    ctx.save_for_backward(weight)
    ctx.has_bias = bias is not None


@differentiable("lowbit_linear", save_lowbit_linear, twice=True)
def _(ctx, dy):
    (weight,) = ctx.saved_tensors
    d_x = d_bias = None
    if ctx.needs_input_grad[0]:
        d_x = again.lowbit_linear(dy.contiguous(), weight, *ctx.shape, None, not ctx.backward_pass)
    if ctx.has_bias and ctx.needs_input_grad[6]:
        d_bias = as_rows(dy).float().sum(0)
    return d_x, None, None, None, None, None, d_bias, None


# ---------------------------------------------------------------- experts


def save_route(ctx, inputs, output):
    scores, _, ctx.softmax_all = inputs
    ctx.save_for_backward(scores, *output)
    ctx.mark_non_differentiable(output[1])


@differentiable("route", save_route, twice=True)
def _(ctx, d_weights, _):
    scores, weights, chosen = ctx.saved_tensors
    index = chosen.long()
    if ctx.softmax_all:
        shares = torch.softmax(scores, -1)
        d_shares = torch.zeros_like(scores).scatter(1, index, d_weights)
        return shares * (d_shares - (d_shares * shares).sum(-1, keepdim=True)), None, None
    d_chosen = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    return torch.zeros_like(scores).scatter(1, index, d_chosen), None, None


def save_experts(ctx, inputs, output):
    *tensors, ctx.type, ctx.activation, ctx.alpha, ctx.limit = inputs
    ctx.save_for_backward(*tensors)


@differentiable("experts", save_experts)
def _(ctx, dy):
    x, chosen, weights, gate, up, down, gate_bias, up_bias, down_bias = ctx.saved_tensors
    d_x, d_weights, *rest = ops.experts_backward(dy, x, chosen, weights, gate, up, down, gate_bias, up_bias, down_bias,
                                                 ctx.type, ctx.activation, ctx.alpha, ctx.limit,
                                                 any(ctx.needs_input_grad[3:9]))
    given = (gate, up, down, gate_bias, up_bias, down_bias)
    rest = rest or [None] * len(given)
    wanted = (*ctx.needs_input_grad[3:9], *(False,) * 6)  # torch leaves out arguments that have their defaults
    d_given = [d if w else None for d, w in zip(rest, wanted)]
    return d_x, None, d_weights, *(like(d, of) for d, of in zip(d_given, given)), *(None,) * 4


# The C API has no gradient of experts: this one, in torch's own terms over the library's products, is Python's, and the
# one operation that is not of the stable ABI. Experts in order, rows of an expert in order: the same bits every time.
@torch.library.custom_op("millrace::experts_backward", mutates_args=())
def experts_backward(dy: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor,
                     gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate_bias: torch.Tensor | None,
                     up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, type: str, activation: str,
                     alpha: float, limit: float, want_weights: bool) -> list[torch.Tensor]:
    """[dx, dweights], and with want_weights float32 [dgate, dup, ddown, dgate_bias, dup_bias, ddown_bias]."""

    def plain(w):
        return w.float() if type == "" else ops.dequantize(w, type)

    w_gate, w_up, w_down = plain(gate), plain(up), plain(down)
    d_x, d_weights = torch.zeros_like(x), torch.zeros_like(weights)
    made = [d_x, d_weights]
    if want_weights:
        made += [torch.zeros_like(w) for w in (w_gate, w_up, w_down)]
        made += [w_gate.new_zeros(w.shape[:2]) for w in (w_gate, w_up, w_down)]
    for e in range(w_gate.shape[0]):
        rows, slots = torch.nonzero(chosen == e, as_tuple=True)
        if rows.numel() == 0:
            continue
        x_e, share = x[rows], weights[rows, slots][:, None]
        g = ops.linear(x_e, w_gate[e], None if gate_bias is None else gate_bias[e])
        u = ops.linear(x_e, w_up[e], None if up_bias is None else up_bias[e])
        h = ops.gated_activation(g, u, activation, alpha, limit)
        y = ops.linear(h, w_down[e], None if down_bias is None else down_bias[e])
        d_weights.index_put_((rows, slots), (dy[rows] * y).sum(-1))
        d_y = dy[rows] * share
        d_h = ops.matmul(d_y, w_down[e])
        d_g, d_u = ops.gated_activation_backward(d_h, g, u, activation, alpha, limit)
        d_x.index_add_(0, rows, ops.matmul(d_g, w_gate[e]) + ops.matmul(d_u, w_up[e]))
        if want_weights:
            for into, d, seen in zip(made[2:5], (d_g, d_u, d_y), (x_e, x_e, h)):
                into[e] = ops.matmul(d, seen, True, False)
            for into, d in zip(made[5:8], (d_g, d_u, d_y)):
                into[e] = d.sum(0)
    return made


@experts_backward.register_fake
def _(dy, x, chosen, weights, gate, up, down, gate_bias, up_bias, down_bias, type, activation, alpha, limit,
      want_weights):
    made = [torch.empty_like(x), torch.empty_like(weights)]
    if want_weights:
        from ._fake import BLOCKS
        elements, size = (1, 1) if type == "" else BLOCKS[type]
        shapes = [(*w.shape[:-1], w.shape[-1] // size * elements) if w.dtype == torch.uint8 else w.shape
                  for w in (gate, up, down)]
        made += [x.new_empty(shape) for shape in shapes] + [x.new_empty(shape[:2]) for shape in shapes]
    return made


# ---------------------------------------------------------------- autocast

_library = torch.library.Library("millrace", "FRAGMENT")


CAST = {}  # of an operation's name: so many of its first tensors are taken in autocast's type


def cast_of(args, count, to):
    return [a.to(to) if i < count and a.is_floating_point() else a for i, a in enumerate(args)]


def cast_under_autocast(name, count):
    """Products and attention take their first `count` tensors in autocast's type; everything else sums in float32."""
    op, CAST[name] = getattr(ops, name).default, count

    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):

        def kernel(*args, device=device, **named):
            cast = cast_of(args, count, torch.get_autocast_dtype(device))
            with torch.autocast(device, enabled=False):
                return op(*cast, **named)

        _library.impl(name, kernel, key)


cast_under_autocast("linear", 2)
cast_under_autocast("matmul", 2)
cast_under_autocast("linear_cross_entropy", 2)
cast_under_autocast("attention", 3)
cast_under_autocast("attention_plain", 3)
cast_under_autocast("attention_dense", 3)
cast_under_autocast("attention_dense_lse", 3)
cast_under_autocast("attention_paged", 3)
cast_under_autocast("attention_paged_plain", 3)
