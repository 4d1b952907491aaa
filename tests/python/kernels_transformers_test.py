#!/usr/bin/env python3
"""attn_implementation="millrace" in transformers: tiny random models of each family, forward and backward, against the
eager implementation of the same weights; padded batches; generation with a cache.

  tests/python/kernels_transformers_test.py [--device cuda]        run by kernels_test.py, on a CPU
"""

import sys

import torch

try:
    import transformers
except ImportError:
    print("SKIPPED: transformers is not installed")
    sys.exit(77)

import millrace_kernels.torch as mt

SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 16,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {**WINDOWS, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {**WINDOWS, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOssConfig", {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def close(name, got, want, bound):
    error = float((got - want).abs().max() / want.abs().max())
    if not error <= bound:
        raise AssertionError(f"{name}: off by {error:.3g} of the largest, expected at most {bound:.3g}")


def pair(name, dtype):
    """The same random model twice: eager, and with these kernels."""
    config_name, more = FAMILIES[name]
    config = getattr(transformers, config_name)(**SMALL, **more)
    torch.manual_seed(1)
    models = []
    for how in ("eager", "millrace"):
        config._attn_implementation = how
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=how).to(dtype).eval()
        models.append(model)
    with torch.no_grad():
        for parameter in models[0].parameters():  # norms and sinks too: their defaults would hide an error
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    models[1].load_state_dict(models[0].state_dict())
    return models


def run(model, **inputs):
    model.zero_grad()
    out = model(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_family(name, dtype, bound):
    eager, ours = pair(name, dtype)
    torch.manual_seed(2)
    tokens = torch.randint(3, 96, (2, 23))
    want, d_want = run(eager, input_ids=tokens)
    got, d_got = run(ours, input_ids=tokens)
    close(f"{name} logits", got, want, bound)
    largest = max(float(d.abs().max()) for d in d_want.values())
    assert set(d_got) == set(d_want), f"{name}: gradients of {set(d_want) ^ set(d_got)} are missing"
    for key, d in d_want.items():
        error = float((d_got[key] - d).abs().max())
        assert error <= bound * max(largest, 1e-3), f"{name} gradient of {key}: off by {error:.3g} of {largest:.3g}"
    for side in ("left", "right"):
        mask = torch.ones_like(tokens)
        mask[1, :6 if side == "left" else None] = 0 if side == "left" else 1
        if side == "right":
            mask[1, -6:] = 0
        seen = mask.bool()
        with torch.no_grad():
            want = eager(input_ids=tokens, attention_mask=mask).logits[seen]
            got = ours(input_ids=tokens, attention_mask=mask).logits[seen]
        close(f"{name} padded {side}", got, want, bound)


def test_generate(name):
    eager, ours = pair(name, torch.float32)
    prompt = torch.randint(3, 96, (2, 7))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    how = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "eos_token_id": None}
    assert torch.equal(eager.generate(prompt, **how), ours.generate(prompt, **how)), f"{name}: other tokens"


def main():
    if sys.argv[1:2] == ["--device"]:
        torch.set_default_device(sys.argv[2])
    transformers.logging.set_verbosity_error()
    mt.register_attention()
    for name in FAMILIES:
        test_family(name, torch.float32, 2e-4)
        test_generate(name)
        print(f"{name}: passed", flush=True)
    mask = torch.ones(1, 1, 4, 4)
    _, ours = pair("llama", torch.float32)
    try:
        ours(input_ids=torch.tensor([[3, 4, 5, 6]]), attention_mask=mask)
    except NotImplementedError as error:
        assert "attention_mask" in str(error)
    else:
        raise AssertionError("a mask of four dimensions was taken")
    test_quantized()
    print(f"transformers {transformers.__version__} on {torch.get_default_device()}: passed")


def test_quantized():
    model, _ = pair("qwen3", torch.float32)
    tokens = torch.randint(3, 96, (1, 9))
    want = model(tokens).logits
    count = mt.quantize_(model, "q8_0", skip=("lm_head",))
    off = float((model(tokens).logits - want).detach().norm() / want.detach().norm())
    assert count == 14 and off < 0.05, (count, off)


if __name__ == "__main__":
    main()
