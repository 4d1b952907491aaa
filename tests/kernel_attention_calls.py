"""Valid calls of attention and linear attention, and of what is about devices, as in kernel_calls.py."""

from ctypes import addressof, c_void_p

from kernel_calls import BF16, F16, F32, F8_E4M3, Q8_0, call_of, rotary_of

# ---- attention over tensors: 2 sequences of 5 queries and 7 keys, 4 heads and 2, 16 dimensions

BATCH, HEADS, KV_HEADS, DIM, QUERIES, KEYS, PAGE = 2, 4, 2, 16, 5, 7, 16
SIZES = {F32: 4, BF16: 2, F8_E4M3: 1}


def tensor_of(c, rows, heads, type, out, ragged):
    size = BATCH * rows * heads * DIM * SIZES[type]
    return c.new("mr_flash_tensor", c.output(size) if out else c.input(size), 0 if ragged else rows * heads * DIM,
                 heads * DIM, DIM)


def queries(c, type=BF16, out=False, kind="dense"):
    return tensor_of(c, QUERIES, HEADS, type, out, kind == "ragged")


def keys(c, type=BF16, out=False, kind="dense"):
    return tensor_of(c, PAGE if kind == "paged" else KEYS, KV_HEADS, type, out, kind == "ragged")


def problem_of(c, kind="dense", type=BF16, sinks=True):
    p = c.new("mr_flash_problem", type=type, batch=BATCH, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, value_dim=DIM,
              max_q=QUERIES, max_k=KEYS, scale=0.25, softcap=9.0, window_left=3, sinks=c.input(16) if sinks else None)
    if kind == "ragged":
        p.cu_q, p.cu_k = c.integers(0, 5, 8), c.integers(0, 7, 12)
    elif kind == "paged":
        p.pages, p.pages_stride, p.page_tokens, p.k_lengths = c.integers(0, 1), 1, PAGE, c.integers(7, 5)
    elif kind == "blocks":
        blocks = c.new("mr_flash_blocks", 64, 64, 1, c.integers(*range(9)), c.integers(*[0] * 8))
        p.blocks = c.host(blocks)
    elif type == F8_E4M3:
        p.q_scales, p.k_scales, p.v_scales = c.input(160), c.input(16), c.input(16)
    return c.host(p)


# In place of lists there may be none; of pages and k_lengths, cu_q and cu_k both or neither.
LISTS = "sinks blocks"


@call_of("mr_flash_forward", "flash_forward_dense", optional=LISTS + " lse", fill_with=("dense",))
@call_of("mr_flash_forward", "flash_forward_ragged", optional=LISTS + " lse", fill_with=("ragged",))
@call_of("mr_flash_forward", "flash_forward_paged", optional=LISTS + " lse", fill_with=("paged",))
@call_of("mr_flash_forward", "flash_forward_blocks", optional=LISTS + " lse", fill_with=("blocks",))
@call_of("mr_flash_forward", "flash_forward_fp8", optional=LISTS + " lse", fill_with=("dense", F8_E4M3))
@call_of("mr_flash_forward_workspace_bytes", optional=LISTS, fill_with=("ragged",))
def flash_forward(c, kind, type=BF16):
    return dict(problem=problem_of(c, kind, type), q=queries(c, type, kind=kind), k=keys(c, type, kind=kind),
                v=keys(c, type, kind=kind), out=queries(c, out=True, kind=kind), lse=c.output(160),
                bytes=c.output(8, handle=True))


@call_of("mr_flash_backward", "flash_backward_dense", optional="d_sinks", fill_with=("dense",))
@call_of("mr_flash_backward", "flash_backward_ragged", optional="d_sinks", fill_with=("ragged",))
@call_of("mr_flash_backward", "flash_backward_blocks", optional="d_sinks blocks", fill_with=("blocks",))
@call_of("mr_flash_backward_workspace_bytes", optional=LISTS, fill_with=("ragged",))
def flash_backward(c, kind):
    gradients = c.new("mr_flash_gradients", queries(c, kind=kind), queries(c, out=True, kind=kind),
                      keys(c, out=True, kind=kind), keys(c, out=True, kind=kind), c.output(16), 1)
    return dict(problem=problem_of(c, kind), q=queries(c, kind=kind), k=keys(c, kind=kind), v=keys(c, kind=kind),
                out=queries(c, kind=kind), lse=c.input(160), gradients=c.host(gradients), deterministic=1,
                bytes=c.output(8, handle=True))


call_of("mr_flash_quantize")(lambda c: c.new("mr_flash_quantize_args", BF16, BATCH, QUERIES, HEADS, DIM, queries(c),
                                             queries(c, F8_E4M3, True), c.output(160), 1, 1))


def span_of(c):
    return c.host(c.new("mr_flash_span", c.integers(0, 256), c.integers(0, 256)))


@call_of("mr_flash_partial_forward")
def flash_partial_forward(c):
    return dict(problem=problem_of(c, sinks=False), span=span_of(c), q=queries(c), k=keys(c), v=keys(c),
                out=queries(c, F32, True), lse=c.output(160))


@call_of("mr_flash_partial_backward")
def flash_partial_backward(c):
    gradients = c.new("mr_flash_partial_gradients", queries(c), c.input(160), c.input(160), queries(c, F32, True),
                      keys(c, F32, True), keys(c, F32, True))
    return dict(problem=problem_of(c, sinks=False), span=span_of(c), q=queries(c), k=keys(c), v=keys(c),
                gradients=c.host(gradients))


call_of("mr_flash_delta", optional="sinks")(lambda c: dict(problem=problem_of(c), out=queries(c), d_out=queries(c),
                                                           delta=c.output(160)))
call_of("mr_flash_merge")(lambda c: c.new("mr_flash_merge_args", 5, 4, 16, c.output(1280), c.output(80), c.input(1280),
                                          c.input(80)))
call_of("mr_flash_finish", optional="sinks lse")(lambda c: c.new(
    "mr_flash_finish_args", BF16, 5, 4, 16, c.input(1280), c.input(80), c.input(16),
    c.new("mr_flash_tensor", c.output(640), 0, 64, 16), c.output(80)))
call_of("mr_flash_sink_gradient")(lambda c: dict(sink=0.5, lse=c.input(20), delta=c.input(20), rows=5, sum=c.output(8)))

# ---- the paged cache: 5 rows of 2 sequences


def config_of(c):
    return c.new("mr_attention_config", 4, 2, 16, F16, 8, 2, 64)


def attention_of(c, planned=True):
    config, batch, attention = config_of(c), batch_of(c), c_void_p()
    c.kept += [config, batch]
    size = c.ask("mr_attention_workspace_bytes", config=addressof(config))
    workspace = c.input(size)
    c.kept.append(c.buffers.pop(workspace))  # the plan stays
    c.check("mr_attention_create", config=addressof(config), workspace=workspace, workspace_bytes=size,
            attention=addressof(attention))
    if planned:
        c.check("mr_attention_plan", attention=attention.value, batch=addressof(batch))
    return attention.value


def batch_of(c):
    return c.new("mr_batch", 2, c.integers(0, 3, 5), c.integers(2, 20), c.integers(0, 1, 2, 3), 2)


def cache_of(c, out):
    config = config_of(c)
    size = c.ask("mr_kv_block_bytes", config=addressof(config))
    return c.host(c.new("mr_kv_cache", c.output(4 * size) if out else c.input(4 * size), 4, size))


@call_of("mr_kv_block_bytes")
@call_of("mr_attention_workspace_bytes")
@call_of("mr_attention_create")
def attention_create(c):
    return dict(config=c.host(config_of(c)), bytes=c.output(8, handle=True), attention=c.output(8, handle=True))


call_of("mr_attention_plan")(lambda c: dict(attention=attention_of(c, False), batch=c.host(batch_of(c))))
call_of("mr_attention_append", optional="rotary")(lambda c: dict(
    attention=attention_of(c), cache=cache_of(c, True), rotary=c.host(rotary_of(c)), query=c.output(1280),
    key=c.output(640), value=c.input(640)))
call_of("mr_attention_run", optional="sinks")(lambda c: dict(
    attention=attention_of(c), cache=cache_of(c, False), args=c.host(c.new("mr_attention_args", 9, 0.25, c.input(16))),
    query=c.input(1280), out=c.output(1280)))

# ---- linear attention: 5 tokens of 2 sequences, 4 heads of 8 x 8

TOKENS, STATE, ROW, COLUMN = 5, 4 * 2 * 4 * 64, 4 * 5 * 4 * 8, 4 * 5 * 4
STATES = "initial_state final_state"


def delta_of(c):
    half = ROW // 2
    return c.new("mr_gated_delta_args", c.input(half), c.input(half), c.input(ROW), c.input(COLUMN), c.input(COLUMN), 0.3,
                 c.input(STATE), c.output(STATE), c.integers(0, 2, TOKENS), c.output(ROW), 2, 2, 4, 8, 8, 4)


def scan_of(c):
    half = ROW // 2
    return c.new("mr_selective_scan_args", c.input(ROW), c.input(COLUMN), c.input(16), c.input(half), c.input(half),
                 c.input(16), c.input(STATE), c.output(STATE), c.integers(0, 2, TOKENS), c.output(ROW), 2, 2, 4, 8, 8, 4)


def wkv7_of(c):
    return c.new("mr_wkv7_args", *(c.input(ROW) for _ in range(6)), 0.5, c.input(STATE), c.output(STATE),
                 c.integers(0, 2, TOKENS), c.output(ROW), 2, 4, 8, 8, 4)


ARRAYS = "q k v g beta x dt a b c d r w out cu_seqlens sequences most_tokens " + STATES  # not read for a size
for function, fill, optional in (("mr_chunk_gated_delta_rule", delta_of, "g beta "), ("mr_selective_scan", scan_of, "d "),
                                 ("mr_chunk_wkv7", wkv7_of, "")):
    call_of(function, optional=optional + STATES)(fill)
for function, fill in (("mr_gated_delta_workspace_bytes", delta_of), ("mr_selective_scan_workspace_bytes", scan_of),
                       ("mr_wkv7_workspace_bytes", wkv7_of)):
    call_of(function, optional=ARRAYS, unread=ARRAYS)(
        lambda c, fill=fill: dict(args=c.host(fill(c)), bytes=c.output(8, handle=True)))

HALF = ROW // 2
GRADIENTS = {"gated_delta": (delta_of, (HALF, HALF, ROW, COLUMN, COLUMN, STATE), "dq dk dv dg dbeta"),
             "selective_scan": (scan_of, (ROW, COLUMN, 16, HALF, HALF, 16, STATE), "dx ddt da db dc dd"),
             "wkv7": (wkv7_of, (ROW,) * 6 + (STATE,), "dr dw dk dv da db")}
for of, (fill, sizes, names) in GRADIENTS.items():
    for function in (f"mr_{of}_backward", f"mr_{of}_backward_workspace_bytes"):
        @call_of(function, optional=f"{names} d_final_state d_initial_state out {STATES}", unread="out final_state",
                 fill_with=(of, fill, sizes))
        def backward(c, of, fill, sizes):
            return {"bytes": c.output(8, handle=True), "args": c.host(c.new(
                f"mr_{of}_backward_args", fill(c), c.input(ROW), c.input(STATE), *(c.output(size) for size in sizes)))}

call_of("mr_short_conv", optional="bias initial_rows final_rows")(lambda c: c.new(
    "mr_short_conv_args", c.input(120), c.input(96), c.input(24), c.input(144), c.output(144), c.integers(0, 2, TOKENS),
    c.output(120), 6, 2, 4, 1, 4))

# ---- devices and types

call_of("mr_device_open", optional="options")(lambda c: dict(
    name=b"cpu", options=c.host(c.new("mr_device_options", 1, None)), device=c.output(8, handle=True)))
call_of("mr_device_synchronize")(lambda c: {})
call_of("mr_dtype_block")(lambda c: dict(type=Q8_0, elements=c.output(4, handle=True), bytes=c.output(4, handle=True)))
call_of("mr_dtype_parse")(lambda c: dict(name=b"q8_0", type=c.output(4, handle=True)))
