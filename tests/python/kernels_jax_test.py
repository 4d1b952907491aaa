#!/usr/bin/env python3
"""millrace_kernels.jax against the plain formulas in float64: forward, gradients, jit, vmap, shard_map over four CPU
devices, or over the GPUs there are.

  tests/python/kernels_jax_test.py [--device cuda] [NAME ...]       run by kernels_test.py, on a CPU
"""

import os
import sys

ON_GPU = sys.argv[1:3] == ["--device", "cuda"]
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cuda" if ON_GPU else "cpu"

try:
    import jax
except ImportError:
    print("SKIPPED: jax is not installed")
    sys.exit(77)

jax.config.update("jax_enable_x64", True)

import functools  # noqa: E402
import itertools  # noqa: E402

import traceback  # noqa: E402

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, PartitionSpec as P  # noqa: E402

import millrace_kernels.jax as mj  # noqa: E402

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
ROUNDING = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}
generator = np.random.default_rng(1)


def random(*shape, dtype=F32):
    return jnp.asarray(generator.standard_normal(shape), dtype)


def close(name, got, want, dtype, roundings=16.0, scale=0.05):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    if got.size == 0:
        return
    error, bound = np.abs(got - want).max(), max(roundings * ROUNDING[dtype], 16 * ROUNDING[F32]) * max(
        np.abs(want).max(), scale)
    if not error <= bound:
        raise AssertionError(f"{name}: off by {error:.3g}, expected at most {bound:.3g}")


def compare(name, ours, formula, inputs, dtype=F32, roundings=16.0):
    """Values and gradients of a weighted sum of all outputs."""
    exact = [x.astype(jnp.float64) for x in inputs]
    want = formula(*exact)
    got = jax.jit(ours)(*inputs)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        close(name, g, w, dtype, roundings)
    weights = [jnp.asarray(generator.standard_normal(w.shape)).astype(g.dtype)
               for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want))]

    def total(function, *args):
        return sum((y.astype(jnp.float64) * w.astype(jnp.float64)).sum()
                   for y, w in zip(jax.tree.leaves(function(*args)), weights))

    which = tuple(range(len(inputs)))
    d_got = jax.jit(jax.grad(functools.partial(total, ours), which))(*inputs)
    d_want = jax.grad(functools.partial(total, formula), which)(*exact)
    largest = max((float(jnp.abs(d).max()) for d in d_want if d.size), default=0.0)
    for i, (g, w) in enumerate(zip(d_got, d_want)):
        assert g.dtype == inputs[i].dtype, f"{name}: gradient {i} is {g.dtype}"
        close(f"{name} gradient {i}", g, w, dtype, roundings, max(largest, 0.05))


def plain_attention(q, k, v, sinks=None, causal=False, window=(-1, -1), scale=None, softcap=0.0):
    group = q.shape[-2] // k.shape[-2]
    k, v = jnp.repeat(k, group, -2), jnp.repeat(v, group, -2)
    scores = jnp.einsum("...ihd,...jhd->...hij", q, k) * (scale or q.shape[-1]**-0.5)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    at = np.arange(q.shape[-3])[:, None] + k.shape[-3] - q.shape[-3]
    key = np.arange(k.shape[-3])[None]
    seen = np.ones((q.shape[-3], k.shape[-3]), bool)
    if causal:
        seen &= key <= at
    if window[0] >= 0:
        seen &= key >= at - window[0]
    if window[1] >= 0:
        seen &= key <= at + window[1]
    scores = jnp.where(seen, scores, -1e300)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate((scores, sink), -1)
    weights = jax.nn.softmax(scores, -1)[..., :k.shape[-3]]
    return jnp.einsum("...hij,...jhd->...ihd", weights, v)


def test_attention():
    shapes = (2, 5, 7, 4, 2, 16, 24), (1, 33, 33, 3, 3, 20, 12)
    masks = {}, {"causal": True, "window": (3, -1), "softcap": 5.0, "scale": 0.3}, {"causal": True}
    # Every jit takes a second to compile: not every type with everything, which is the C API's own test.
    for dtype, (b, s, t, h, g, d, e), how in (*itertools.product((F32,), shapes, masks[:2]),
                                              *itertools.product((F16, BF16), shapes[:1], masks[2:])):
        q, k, v = random(b, s, h, d, dtype=dtype), random(b, t, g, d, dtype=dtype), random(b, t, g, e, dtype=dtype)
        compare(f"attention {dtype.__name__} {how}", lambda q, k, v: mj.attention(q, k, v, **how),
                lambda q, k, v: plain_attention(q, k, v, **how), (q, k, v), dtype)
    q, k, sinks = random(2, 5, 4, 16), random(2, 7, 2, 16), random(4)
    compare("sinks", lambda q, k, s: mj.attention(q, k, k, sinks=s), lambda q, k, s: plain_attention(q, k, k, s),
            (q, k, sinks))
    assert mj.attention(q[:0], k[:0], k[:0]).shape == (0, 5, 4, 16)


def rms(x, w=1.0, offset=0.0):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (w + offset)


def layer(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def test_norms():
    for dtype, shape in ((F32, (2, 3, 64)), (F32, (7,)), (F32, (1, 257)), (F16, (3, 5)), (BF16, (2, 3, 64))):
        x, w, b = random(*shape, dtype=dtype), random(shape[-1]), random(shape[-1])
        compare(f"rms_norm {shape}", mj.rms_norm, rms, (x,), dtype)
        compare(f"rms_norm weight {shape}", lambda x, w: mj.rms_norm(x, w, weight_offset=1.0),
                lambda x, w: rms(x, w, 1.0), (x, w), dtype)
        compare(f"layer_norm {shape}", mj.layer_norm, layer, (x, w, b), dtype, 32)
        if dtype == F32 and len(shape) == 3:
            r = random(*shape)
            compare("add_rms_norm", mj.add_rms_norm, lambda x, r, w: (rms(x + r, w), x + r), (x, r, w), dtype)
            compare("add_layer_norm", mj.add_layer_norm, lambda x, r, w, b: (layer(x + r, w, b), x + r), (x, r, w, b),
                    dtype, 32)


def test_rows():
    for dtype in (F32, BF16):
        x, u = random(3, 4, 10, dtype=dtype), random(3, 4, 10, dtype=dtype)
        gelu = functools.partial(jax.nn.gelu, approximate=False)
        compare("gelu", mj.gelu, gelu, (x,), dtype)
        compare("gelu tanh", lambda x: mj.gelu(x, "tanh"), jax.nn.gelu, (x,), dtype)
        compare("silu", mj.silu, jax.nn.silu, (x,), dtype)
        compare("swiglu", mj.swiglu, lambda g, u: jax.nn.silu(g) * u, (x, u), dtype)
        compare("geglu", mj.geglu, lambda g, u: gelu(g) * u, (x, u), dtype)

        def clamped(g, u):
            g, u = jnp.minimum(g, 0.8), jnp.clip(u, -0.8, 0.8)
            return g * jax.nn.sigmoid(1.702 * g) * (u + 1)

        compare("clamped", lambda g, u: mj.clamped_swiglu(g, u, limit=0.8), clamped, (x, u), dtype)
        compare("softmax", lambda x: mj.softmax(x, 0.7), lambda x: jax.nn.softmax(0.7 * x), (x,), dtype)
        targets = jnp.asarray(generator.integers(0, 10, (3, 4))).at[0, 1].set(-100)
        compare("cross_entropy", lambda x: mj.cross_entropy(x, targets), lambda x: jnp.where(
            targets == -100, 0.0, jax.nn.logsumexp(x, -1) - jnp.take_along_axis(
                x, jnp.maximum(targets, 0)[..., None], -1)[..., 0]), (x,), dtype)
        heads, positions = random(2, 5, 3, 16, dtype=dtype), jnp.arange(5)

        def turned(x):
            angle = positions[:, None] * np.float32(10000.0**(-2.0 * np.arange(8) / 16)).astype(np.float64)
            c, s = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
            a, b = x[..., :8], x[..., 8:]
            return jnp.concatenate((a * c - b * s, b * c + a * s), -1)

        compare("rotary", lambda x: mj.rotary(x, positions), turned, (heads,), dtype, 32)


def test_vmap():
    q, k, v, sinks = random(3, 2, 5, 4, 16), random(3, 2, 7, 2, 16), random(3, 2, 7, 2, 16), random(4)
    one = jax.vmap(lambda q, k, v: mj.attention(q, k, v, causal=True))(q, k, v)
    each = jnp.stack([mj.attention(q[i], k[i], v[i], causal=True) for i in range(3)])
    assert (one == each).all(), "vmap of attention has other bits"
    compare("vmap, keys shared", lambda q, k, s: jax.vmap(lambda q: mj.attention(q, k, k, sinks=s))(q),
            lambda q, k, s: jax.vmap(lambda q: plain_attention(q, k, k, s))(q), (q, k[0], sinks))
    many = random(3, 4)
    compare("vmap, sinks each", lambda q, s: jax.vmap(lambda q, s: mj.attention(q, k[0], k[0], sinks=s))(q, s),
            lambda q, s: jax.vmap(lambda q, s: plain_attention(q, k[0], k[0], s))(q, s), (q, many))
    x, w, ws = random(4, 3, 8), random(8), random(4, 8)
    compare("vmap of rms_norm", lambda x, w: jax.vmap(lambda x: mj.rms_norm(x, w))(x), rms, (x, w))
    compare("vmap of rms_norm, weights each", jax.vmap(mj.rms_norm), lambda x, w: rms(x, w[:, None]), (x, ws))
    compare("vmap of add_rms_norm", lambda x, r, w: jax.vmap(lambda x, r: mj.add_rms_norm(x, r, w))(x, r),
            lambda x, r, w: (rms(x + r, w), x + r), (x, random(4, 3, 8), w))
    grads = jax.vmap(jax.grad(lambda w, x: mj.rms_norm(x, w).sum()), (None, 0))(w, x)
    want = jax.vmap(jax.grad(lambda w, x: rms(x, w).sum()), (None, 0))(w.astype(jnp.float64), x.astype(jnp.float64))
    close("a gradient per example", grads, want, F32)
    compare("vmap of swiglu over the last axis", jax.vmap(mj.swiglu, (1, 1), 1), lambda g, u: jax.nn.silu(g) * u,
            (x, random(4, 3, 8)))


def shard_map_of_jax():
    if hasattr(jax, "shard_map"):
        return jax.shard_map
    from jax.experimental.shard_map import shard_map
    return shard_map


def every_function():
    """Each with arrays that have a batch of eight in front, and the number of those; the rest is shared."""
    x, u, w, b = random(8, 3, 16), random(8, 3, 16), random(16), random(16)
    q, k, sinks = random(8, 5, 4, 16), random(8, 7, 2, 16), random(4)
    positions, targets = jnp.arange(40).reshape(8, 5), jnp.asarray(generator.integers(0, 16, (8, 3)))
    return {
        "attention": (lambda q, k, s: mj.attention(q, k, k, causal=True, sinks=s), 2, q, k, sinks),
        "rms_norm": (mj.rms_norm, 1, x, w), "layer_norm": (mj.layer_norm, 1, x, w, b),
        "add_rms_norm": (mj.add_rms_norm, 2, x, u, w), "add_layer_norm": (mj.add_layer_norm, 2, x, u, w, b),
        "rotary": (mj.rotary, 2, q, positions), "gelu": (mj.gelu, 1, x), "silu": (mj.silu, 1, x),
        "swiglu": (mj.swiglu, 2, x, u), "geglu": (mj.geglu, 2, x, u), "clamped_swiglu": (mj.clamped_swiglu, 2, x, u),
        "softmax": (mj.softmax, 1, x), "cross_entropy": (mj.cross_entropy, 2, x, targets)
    }


def test_every_function_batches_and_shards():
    """vmap and shard_map change no bit of a result, and a gradient by no more than the order of a sum over the batch."""
    functions = every_function()
    assert set(functions) == set(mj.__all__), "a function without a case"
    devices = jax.devices()[:4]
    mesh = Mesh(np.array(devices), ("batch",))
    for name, (f, split, *arrays) in functions.items():
        whole = f(*arrays)
        axes = tuple(0 if i < split else None for i in range(len(arrays)))
        specs = tuple(P("batch") if i < split else P() for i in range(len(arrays)))
        sharded = shard_map_of_jax()(f, mesh=mesh, in_specs=specs, out_specs=P("batch"))
        mapped = jax.vmap(f, axes)
        floats = tuple(i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating))

        def loss(function, *args):
            return sum((y * y).sum() for y in jax.tree.leaves(function(*args)))

        want = jax.grad(functools.partial(loss, f), floats)(*arrays)
        for how, function in (("vmap", mapped), ("shard_map", jax.jit(sharded))):
            for y, z in zip(jax.tree.leaves(function(*arrays)), jax.tree.leaves(whole)):
                assert (y == z).all(), f"{how} of {name} has other bits"
            for i, g, e in zip(floats, jax.grad(functools.partial(loss, function), floats)(*arrays), want):
                close(f"{how} of {name}, gradient {i}", g, e, F32, 32)
        assert len(jax.tree.leaves(jax.jit(sharded)(*arrays))[0].sharding.device_set) == len(devices)


def test_shard_map():
    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    q, k = random(8, 6, 4, 16), random(8, 9, 2, 16)
    shard_map = shard_map_of_jax()
    sharded = jax.jit(shard_map(lambda q, k: mj.attention(q, k, k, causal=True), mesh=mesh,
                                in_specs=(P("batch"), P("batch")), out_specs=P("batch")))
    assert len(sharded(q, k).sharding.device_set) == len(jax.devices()[:4])
    assert (sharded(q, k) == mj.attention(q, k, k, causal=True)).all(), "shards have other bits"
    x, w = random(8, 16), random(16)
    loss = shard_map(lambda x, w: jax.lax.psum(mj.rms_norm(x, w).sum(), "batch"), mesh=mesh,
                     in_specs=(P("batch"), P()), out_specs=P())
    got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    want = jax.grad(lambda x, w: rms(x, w).sum(), (0, 1))(x.astype(jnp.float64), w.astype(jnp.float64))
    for g, e in zip(got, want):
        close("gradients over shards", g, e, F32)


def test_whole_numbers_of_every_type():
    """What int32 does not hold is another class to nobody."""
    logits, table = random(3, 5), jnp.array([4, 0, 2])
    want = mj.cross_entropy(logits, table)
    for dtype in (jnp.int8, jnp.uint8, jnp.int64, jnp.uint32, jnp.uint64):
        assert (mj.cross_entropy(logits, table.astype(dtype)) == want).all(), dtype
        assert (mj.rotary(random(3, 1, 8) * 0 + 1, table.astype(dtype)) == mj.rotary(jnp.ones((3, 1, 8)).astype(F32), table)).all()
    for wide in (jnp.array([2**32, 0, 0]), jnp.array([2**32 - 3, 0, 0], jnp.uint32), jnp.array([-2**32, 0, 0])):
        if not ON_GPU:
            try:
                mj.cross_entropy(logits, wide).block_until_ready()
            except Exception as error:
                assert "target" in str(error), error
            else:
                raise AssertionError(f"{wide[0]} was taken for another class")


def test_wrong():
    q, k = random(1, 3, 4, 16), random(1, 3, 2, 16)
    for text, call in (("q, k and v have shapes", lambda: mj.attention(q, k[..., :8], k)),
                       ("heads", lambda: mj.attention(q[:, :, :3], k, k)),
                       ("sinks", lambda: mj.attention(q, k, k, sinks=random(3))),
                       ("float32, float16 or bfloat16", lambda: mj.rms_norm(jnp.ones((2, 3), jnp.int32))),
                       ("weight has shape", lambda: mj.rms_norm(random(2, 3), random(4))),
                       ("targets", lambda: mj.cross_entropy(random(2, 3), jnp.ones((3,), jnp.int32))),
                       ("targets is float32", lambda: mj.cross_entropy(random(2, 3), jnp.ones((2,), F32))),
                       ("x is a list", lambda: mj.softmax([1.0, 2.0])),
                       ("dim", lambda: mj.attention(*(random(1, 2, 1, 264),) * 3).block_until_ready()),
                       ("target", lambda: mj.cross_entropy(random(2, 3), jnp.array([1, 3])).block_until_ready())):
        if ON_GPU and text == "target":
            continue  # a GPU is not waited for
        try:
            call()
        except Exception as error:
            assert text in str(error), f'"{error}" does not say "{text}"'
        else:
            raise AssertionError(f"nothing was raised, expected: {text}")


def main():
    failed = 0
    wanted = sys.argv[3 if ON_GPU else 1:]
    for name, function in list(globals().items()):
        if not name.startswith("test_") or (wanted and not any(w in name for w in wanted)):
            continue
        try:
            function()
            print(f"{name}: passed", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
    print(f"jax {jax.__version__} on {jax.default_backend()}: {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
