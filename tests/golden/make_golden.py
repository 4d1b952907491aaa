"""Builds tiny random-weight models of every architecture and records what transformers says of them.

    python -m venv venv && venv/bin/pip install -r tests/golden/requirements.txt
    venv/bin/python tests/golden/make_golden.py            # rewrites tests/golden/models and blocks.*
    venv/bin/python tests/golden/make_golden.py --check    # compares with what is there
    venv/bin/python tests/golden/make_golden.py llama2     # only the named models

Everything is seeded. transformers runs in float32 on the CPU on exactly the numbers the files decode to.

Written per model, models/<name>/:
  hf/           Hugging Face directory (where the model has one)
  model.gguf    or model-00001-of-0000N.gguf (where the model has one); same numbers as hf/
  golden.f32    little-endian float32: logits, one row of vocab_size per recorded position
  golden.json   name, architecture (GGUF's word), files [{kind: hf|gguf, path}], vocab_size, window (or null),
                logit_std, float64_difference (max |float32 run - float64 run| over max |logit|: the noise floor),
                features {what: relative change of the logits when it is left out},
                prompts [{tokens, positions, offset (row in golden.f32 of positions[0]),
                          router_margin (MoE: per recorded position, smallest gap between the last chosen and
                          the first rejected expert's router logit in any layer; a gap below your error can flip)}],
                min_router_margin (over every token of every prompt),
                greedy {prompt (index), tokens (argmax continuation, end tokens ignored), gaps (top-2 logit gap)},
                texts [{text, tokens}] (Hugging Face tokenizers, special tokens added), chat {messages, text}
Each prompt was run alone; run together, or cut into chunks, they must give the same.

blocks.json / blocks.bin: random blocks of every type. Entries {type, blocks, raw_offset, raw_bytes,
scales_offset, scales_bytes (mxfp4_split only), values_offset, values_count (float32)}; byte offsets into
blocks.bin. Decoding is exact: every product fits in 24 bits, so the values must agree to the last bit.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import gguf
import jinja2
import numpy as np
import torch
import transformers

import quantize_formats
import tiny_models
import write_models

HERE = Path(__file__).parent
PROMPT_LENGTHS = (333, 1, 5, 17, 40, 150)
GREEDY_TOKENS = 24
MESSAGES = [{"role": "user", "content": "the water"}, {"role": "assistant", "content": "in the mill"},
            {"role": "user", "content": "a"}]


def state_dict(model):
    """Published names and layouts to those of the transformers modules."""
    out, stacks = {}, {}
    if model.modules:
        return model.modules({name: torch.from_numpy(np.array(w.values)) for name, w in model.weights.items()})
    for name, w in model.weights.items():
        value = torch.from_numpy(np.array(w.values))
        if model.transposed(name):
            value = value.T.contiguous()
        if w.codes is not None:  # gpt-oss experts are [E, in, out] in the module
            value = value.transpose(1, 2).contiguous()
        if ".experts." in name and model.type in ("qwen3_moe", "qwen3_vl_moe_text", *tiny_models.MIXTURES):
            before, after = name.replace(".block_sparse_moe", ".mlp").split(".experts.")
            proj = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(after.split(".")[1], after.split(".")[1])
            stacks.setdefault(before + ".experts.", {}).setdefault(proj, []).append(value)
        elif ".block_sparse_moe." in name:
            out[name.replace(".block_sparse_moe", ".mlp")] = value
        else:
            out[name] = value
    for at, parts in stacks.items():
        gate, up, down = (torch.stack(parts[p]) for p in tiny_models.PROJ)
        out[at + "gate_up_proj"], out[at + "down_proj"] = torch.cat([gate, up], dim=1), down
        if model.type == "llama4_text":  # [E, in, out]
            out |= {at + p: out[at + p].transpose(1, 2).contiguous() for p in ("gate_up_proj", "down_proj")}
    return out


def causal_lm(model):
    """Of Mistral 4 transformers' automatic class knows only the model that sees."""
    return transformers.Mistral4ForCausalLM if model.type == "mistral4" else transformers.AutoModelForCausalLM


def load(model, **changes):
    if model.reference:
        return model.reference(model.config | changes, state_dict(model)).eval()
    config = {k: v for k, v in (model.config | changes).items() if k not in ("quantization_config", "torch_dtype")}
    config = transformers.CONFIG_MAPPING[model.type].from_dict(json.loads(json.dumps(config)))
    make = getattr(causal_lm(model), "from_config", None) or causal_lm(model)._from_config
    net = make(config, attn_implementation="eager", experts_implementation="eager").float().eval()
    state = state_dict(model)
    if model.config["tie_word_embeddings"]:
        state["lm_head.weight"] = state[model.embedding()]
    net.load_state_dict(state, strict=True)
    return net


@torch.no_grad()
def logits_of(net, tokens):
    return net(torch.tensor([tokens]), use_cache=False).logits[0]


def positions_of(length, window):
    """First and last four, all around block and window edges, and every 13th (37th without a window)."""
    edges = [15, 16, 17, 31, 32, 33] + ([window - 1, window, window + 1, window + 16, 2 * window] if window else [])
    some = [*range(4), *range(0, length, 13 if window else 37), *edges, *range(length - 4, length)]
    if length < 100:
        some = [0, 15, 16, length - 2, length - 1]
    elif length < 300:
        some = [window or 16, length - 1]
    return sorted({p for p in some if 0 <= p < length})


def sigmoid_margins(router, logits):
    """Of groups and of the experts in the chosen ones, the gap between the last chosen and the first rejected."""
    scores = (logits.sigmoid() + router.e_score_correction_bias).view(len(logits), router.num_group, -1)
    groups = scores.topk(2, dim=-1).values.sum(dim=-1)
    best, order = torch.sort(groups, dim=-1, descending=True)
    closed = order[:, router.topk_group :]
    scores = scores.scatter(1, closed[:, :, None].expand(-1, -1, scores.shape[-1]), float("-inf")).flatten(1)
    margin = torch.sort(scores, dim=-1, descending=True).values
    margin = margin[:, router.top_k - 1] - margin[:, router.top_k]
    if router.num_group > router.topk_group:
        margin = torch.minimum(margin, best[:, router.topk_group - 1] - best[:, router.topk_group])
    return margin


def router_margins(net, top_k, tokens):
    """Logits and, per token, the smallest routing margin over the layers."""
    margins = []

    def hook(module, inputs, output):
        logits = output[1] if net.config.model_type == "llama4_text" else output[0]
        if net.config.model_type == "gemma4_text":  # probabilities
            logits = logits.log()
        if hasattr(module, "e_score_correction_bias"):
            margins.append(sigmoid_margins(module, logits))
            return
        if len(inputs) > 1 and inputs[1] is not None:  # LFM 2: a bias of the choice
            logits = logits.sigmoid() + inputs[1]
        best = torch.sort(logits, dim=-1, descending=True).values
        margins.append(best[:, top_k - 1] - best[:, top_k])

    routers = [m for n, m in net.named_modules() if n.endswith(("mlp.router", "mlp.gate", "feed_forward.router",
                                                                     "feed_forward.gate", "block_sparse_moe.router",
                                                                     "mixer.gate"))
               or type(m).__name__ == "Gemma4TextRouter"]
    handles = [m.register_forward_hook(hook) for m in routers]
    out = logits_of(net, tokens)
    for h in handles:
        h.remove()
    return out, torch.stack(margins).min(dim=0).values


@contextlib.contextmanager
def index_margins(top):
    """Of every choice of an indexer, the gap between the last chosen token and the first rejected one, relative to
    how far the scores are spread: a list, filled meanwhile."""
    margins, topk = [], torch.Tensor.topk

    def noting(scores, k, *args, **kwargs):
        if k == top:
            best = scores.sort(dim=-1, descending=True).values
            gaps, spread = best[..., top - 1] - best[..., top], best[..., :top].std(dim=-1)
            some = best[..., top] > -1e30  # others see no more than `top` tokens
            margins.append(float((gaps / spread)[some].min()) if some.any() else 1.0)
        return topk(scores, k, *args, **kwargs)

    torch.Tensor.topk = noting
    try:
        yield margins
    finally:
        torch.Tensor.topk = topk


def choose_prompts(model, net, rng):
    """Random prompts; for a mixture, drawn again until no routing decision hangs by a thread."""
    vocab, top_k = model.config["vocab_size"], next(
        (model.config[key] for key in ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
         if model.config.get(key)), None)
    out = []
    for length in PROMPT_LENGTHS:
        for _ in range(300):
            tokens = rng.integers(0, vocab, size=length).tolist()
            if not top_k:
                out.append((tokens, logits_of(net, tokens), None))
                break
            with index_margins(model.config.get("index_topk")) as index:
                logits, margin = router_margins(net, top_k, tokens)
            if margin.min() > 5e-4 and min(index, default=1.0) > 1e-5:
                out.append((tokens, logits, margin))
                break
        else:
            raise SystemExit(f"{model.name}: no prompt of {length} tokens with a clear routing")
    return out


def greedy(net, prompts, limited):
    """The continuation of the longest prompt whose argmax is never close; with a cache it must be the same.

    limited: but for limits of Mamba-2's dt, which transformers' single steps leave out."""
    for index in (0, 5, 4, 3, 2):
        tokens, gaps = list(prompts[index][0]), []
        for _ in range(GREEDY_TOKENS):
            top = torch.topk(logits_of(net, tokens)[-1], 2)
            gaps.append(float(top.values[0] - top.values[1]))
            tokens.append(int(top.indices[0]))
        if min(gaps) > 5e-3:
            break
    else:
        raise SystemExit("no prompt with a clear greedy continuation")
    new = tokens[len(prompts[index][0]) :]
    if limited:
        return {"prompt": index, "tokens": new, "gaps": [round(g, 5) for g in gaps]}
    with torch.no_grad():
        prompt = torch.tensor([prompts[index][0]])
        # Without a mask, generate would hide every token that equals the padding id.
        cached = net.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GREEDY_TOKENS, do_sample=False,
                              eos_token_id=None, pad_token_id=0)[0, -GREEDY_TOKENS:]
    assert cached.tolist() == new, "generate with a cache disagrees with full recomputation"
    return {"prompt": index, "tokens": new, "gaps": [round(g, 5) for g in gaps]}


def feature_changes(model, prompts):
    """How much the logits of the long prompt move when one feature is left out: proof that each one counts."""
    c, tokens, want = model.config, prompts[0][0], prompts[0][1]
    variants = {}
    if c.get("sliding_window") and not c.get("max_window_layers"):
        variants |= {"window one wider": {"sliding_window": c["sliding_window"] + 1}, "window": {"sliding_window": 4096}}
    rope = c.get("rope_scaling") or {}
    if rope:
        variants["rope scaling"] = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": c["rope_theta"]}}
    if rope.get("rope_type") == "yarn":
        variants["yarn without truncation"] = {"rope_scaling": rope | {"truncate": True}}
        variants["yarn attention factor"] = {"rope_scaling": rope | {"attention_factor": 1.0}}
    if "norm_topk_prob" in c:
        variants["norm_topk_prob"] = {"norm_topk_prob": not c["norm_topk_prob"]}
    for key, other in (("routed_scaling_factor", 1.0), ("topk_group", c.get("n_group")), ("attention_chunk_size", 4096),
                       ("attn_temperature_tuning", False), ("partial_rotary_factor", 1.0), ("use_qk_norm", False)):
        if key in c and not (key == "use_qk_norm" and model.type != "llama4_text"):
            variants[key] = {key: other}
    if "swiglu_limit" in c:
        variants["swiglu limit"] = {"swiglu_limit": 1e6}
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        if key in c:
            variants[key] = {key: 1e-1 if key != "rms_norm_eps" else 1e-2}
    for key, other in (("activation_function", "relu"), ("hidden_act", "relu")):
        if c.get(key, "silu") != "silu":
            variants[key] = {key: other}
    if c.get("scale_attn_by_inverse_layer_idx"):
        variants["scale_attn_by_inverse_layer_idx"] = {"scale_attn_by_inverse_layer_idx": False}
    if "partial_rotary_factor" in c:
        variants["partial_rotary_factor"] = {"partial_rotary_factor": 1.0}
    variants = {what: change for what, change in (variants | model.variants).items() if change is not None}
    nets = {what: load(model, **change) for what, change in variants.items()}
    for what, ends in (("biases", "bias"), ("sinks", "sinks"), ("q/k norm", ("q_norm.weight", "k_norm.weight"))):
        if any(name.endswith(ends) and not name.endswith(("e_score_correction_bias", "expert_bias"))
               for name in model.weights):
            nets[what] = load(model)
            for name, value in nets[what].named_parameters():
                if name.endswith(ends):
                    value.data.fill_({"biases": 0.0, "sinks": -1e9}.get(what, 1.0))
    out = {what: float((logits_of(net, tokens) - want).abs().max() / want.abs().max()) for what, net in nets.items()}
    assert min(out.values()) > 1e-3, (model.name, out)
    return {what: float(f"{value:.2g}") for what, value in out.items()}


def check_hf(model, folder, prompts):
    """transformers' own loader reads the directory and gives the same logits (FP8 and packed weights need a GPU or
    packages of their own there: skipped)."""
    if model.hf.get("fp8") or model.hf.get("packed") or model.reference:
        return
    net = causal_lm(model).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager",
        **({"quantization_config": transformers.Mxfp4Config(dequantize=True)} if model.hf.get("experts") == "mxfp4" else {}))
    got, want = logits_of(net.float(), prompts[0][0]), prompts[0][1]
    assert (got - want).abs().max() < 1e-4, (model.name, float((got - want).abs().max()))


def check_mxfp4(model):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name, w in model.weights.items():
        if w.codes is not None:
            blocks = torch.from_numpy(quantize_formats.mxfp4_hf_blocks(w))
            got = convert_moe_packed_tensors(blocks, torch.from_numpy(w.scales), dtype=torch.float32)
            assert torch.equal(got, torch.from_numpy(w.values).transpose(1, 2)), name


def float64_difference(net, prompts):
    wide, worst = net.double(), 0.0
    for tokens, logits, _ in prompts:
        worst = max(worst, float((logits_of(wide, tokens) - logits).abs().max() / logits.abs().max()))
    return float(f"{worst:.2g}")


def record(model, folder):
    net = load(model)
    prompts = choose_prompts(model, net, np.random.default_rng([ord(ch) for ch in model.name]))
    files = []
    check_mxfp4(model)
    if model.hf:
        write_models.write_hf(model, folder / "hf")
        check_hf(model, folder / "hf", prompts)
        files.append({"kind": "hf", "path": "hf"})
    if model.gguf:
        folder.mkdir(parents=True, exist_ok=True)
        first = write_models.write_gguf(model, folder / "model.gguf")
        write_models.read_back(model, first)
        files.append({"kind": "gguf", "path": first.name})

    window = model.config.get("sliding_window") if model.type in ("gpt_oss", "mistral", "mixtral") else model.window
    window = window or model.config.get("attention_chunk_size")
    rows, entries = [], []
    for tokens, logits, margin in prompts:
        at = positions_of(len(tokens), window)
        entry = {"tokens": tokens, "positions": at, "offset": len(rows)}
        if margin is not None:
            entry["router_margin"] = [round(float(margin[p]), 5) for p in at]
        entries.append(entry)
        rows += [logits[p].numpy() for p in at]
    data = np.stack(rows).astype("<f4")
    assert np.isfinite(data).all() and 0.7 < data.std() < 4, (model.name, data.std())
    data.tofile(folder / "golden.f32")

    tokenizer = model.tokenizer
    chat = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(tokenizer["template"]).render(
        messages=MESSAGES, add_generation_prompt=True, bos_token=tokenizer["bos"], eos_token=tokenizer["eos"])
    golden = {
        "format": 1, "name": model.name, "files": files, "vocab_size": model.config["vocab_size"], "window": window,
        "architecture": model.gguf_name(),
        "logit_std": round(float(data.std()), 3), "features": feature_changes(model, prompts),
        "greedy": greedy(net, prompts, model.hf.get("limited", False)), "texts": tokenizer["texts"], "chat": {"messages": MESSAGES, "text": chat},
        "min_router_margin": None if prompts[0][2] is None else round(min(float(m.min()) for _, _, m in prompts), 5),
        "float64_difference": float64_difference(net, prompts), "prompts": entries,
    }
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    for key in ("files", "features", "greedy", "texts", "chat", "float64_difference", "prompts"):
        text = text.replace(f'"{key}":', f'\n"{key}":', 1)
    (folder / "golden.json").write_text(text.replace('{"tokens"', '\n {"tokens"') + "\n")
    summary = {k: golden[k] for k in ("logit_std", "float64_difference", "min_router_margin", "features")}
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{model.name}: {size / 1000:.0f} kB, min greedy gap {min(golden['greedy']['gaps'])}, {summary}", flush=True)


def record_blocks(folder):
    entries, data = [], bytearray()

    def append(array):
        data.extend(bytes(-len(data) % 16))
        at = len(data)
        data.extend(np.ascontiguousarray(array).tobytes())
        return at

    for name, raw, scales, values in quantize_formats.block_fixture(np.random.default_rng(7)):
        count = raw.shape[0] if raw.ndim == 2 else values.size
        entry = {"type": name, "blocks": count, "raw_offset": append(raw), "raw_bytes": raw.nbytes}
        if scales is not None:
            entry |= {"scales_offset": append(scales), "scales_bytes": scales.nbytes}
        entry |= {"values_offset": append(values.astype("<f4")), "values_count": values.size}
        entries.append(entry)
    (folder / "blocks.bin").write_bytes(data)
    (folder / "blocks.json").write_text("[\n" + ",\n".join(json.dumps(e) for e in entries) + "\n]\n")


def close(a, b):
    """Numbers of two JSON values agree to float32 noise, everything else exactly."""
    if isinstance(a, float) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-3 * max(1.0, abs(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a if k not in ("float64_difference", "features"))
    if isinstance(a, list):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b))
    return a == b


def compare(fresh, kept):
    """Files byte for byte; recorded logits to 1e-5 of the largest, for another CPU sums in another order."""
    names = lambda root: {f.relative_to(root) for f in root.rglob("*") if f.is_file()}
    wrong = [f"{n}: only in one of the two" for n in sorted(names(fresh) ^ names(kept))]
    for n in sorted(names(fresh) & names(kept)):
        a, b = (fresh / n).read_bytes(), (kept / n).read_bytes()
        if n.name == "golden.f32" and len(a) == len(b):
            x, y = np.frombuffer(a, "<f4"), np.frombuffer(b, "<f4")
            same = np.abs(x - y).max() <= 1e-5 * np.abs(y).max()
        else:
            same = a == b or n.name == "golden.json" and close(json.loads(a), json.loads(b))
        if not same:
            wrong.append(f"{n}: differs")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models to make; all when none is named")
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models = tiny_models.build()
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for name in args.names or models:
            record(models[name](), scratch / name)
            kept = HERE / "models" / name
            if args.check:
                wrong += [f"models/{name}/{line}" for line in compare(scratch / name, kept)]
            else:
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(scratch / name, kept)
        if not args.names:
            (scratch / "blocks").mkdir()
            record_blocks(scratch / "blocks")
            for file in ("blocks.bin", "blocks.json"):
                if not args.check:
                    shutil.copy(scratch / "blocks" / file, HERE / file)
                elif (scratch / "blocks" / file).read_bytes() != (HERE / file).read_bytes():
                    wrong.append(f"{file}: differs")
    for line in wrong:
        print(line)
    if args.check:
        print("check:", "differs" if wrong else "as committed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
