"""torch.func.vmap over the operations: one call for the whole batch where rows may have any dimensions in front, and else
a call for each example."""

import torch

ops = torch.ops.millrace

# Of an operation's name: its arguments whose rows a batch may precede, where no other tensor has one.
ROWS = {
    "norm_plain": (0,), "add_norm_plain": (0, 1), "rms_norm": (0,), "layer_norm": (0,), "add_rms_norm": (0, 1),
    "add_layer_norm": (0, 1), "rotary": (0, 1), "activation": (0,), "activation_backward": (0, 1),
    "gated_activation": (0, 1), "gated_activation_backward": (0, 1, 2), "softmax": (0,), "softmax_backward": (0, 1),
    "embedding": (0,), "linear": (0,), "linear_quantized": (0,), "linear_packed": (0,), "lowbit_linear": (0,),
}
BATCHES = {"attention_dense": (0, 1, 2), "attention_dense_lse": (0, 1, 2)}  # these have one dimension in front already


def _with_dims(made):
    """What a rule gives back: the results, and that each has the batch in front."""
    return made, 0 if isinstance(made, torch.Tensor) else type(made)(0 for _ in made)


def _mapped(made, function):
    return function(made) if isinstance(made, torch.Tensor) else type(made)(map(function, made))


def _each(op, size, args, batched):
    if size == 0:  # what one example would give says what there is none of
        one = op(*(a.new_zeros(a.shape[1:]) if b else a for a, b in zip(args, batched)))
        return _mapped(one, lambda y: y.new_empty((0, *y.shape)))
    made = [op(*(a[i] if b else a for a, b in zip(args, batched))) for i in range(size)]
    if isinstance(made[0], torch.Tensor):
        return torch.stack(made)
    return type(made[0])(torch.stack(one) for one in zip(*made))


def _rule_of(name):
    op, rows, merged = getattr(ops, name).default, ROWS.get(name, ()), BATCHES.get(name, ())

    def rule(info, in_dims, *args):
        size, batched = info.batch_size, [d is not None for d in in_dims]
        args = [a if d is None else a.movedim(d, 0) for a, d in zip(args, in_dims)]
        whole = rows or merged
        if not whole or any(b for i, b in enumerate(batched) if i not in whole):
            return _with_dims(_each(op, size, args, batched))
        args = [a.expand(size, *a.shape) if i in whole and not b else a for i, (a, b) in enumerate(zip(args, batched))]
        if rows:
            return _with_dims(op(*args))
        made = op(*(a.flatten(0, 1) if i in merged else a for i, a in enumerate(args)))
        return _with_dims(_mapped(made, lambda y: y.unflatten(0, (size, -1 if size else args[0].shape[1]))))

    return rule


def register():
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("millrace::")}
    for name in names:
        torch.library.register_vmap(name, _rule_of(name.removeprefix("millrace::")))


register()
