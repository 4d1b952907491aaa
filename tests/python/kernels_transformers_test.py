#!/usr/bin/env python3
"""attn_implementation="millrace" in transformers: tiny random models of each family, forward and backward, against the
eager implementation of the same weights; padded and packed batches; generation with a cache; encoders.

  tests/python/kernels_transformers_test.py [--device cuda]        run by kernels_test.py, on a CPU
"""

import copy
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
    torch.manual_seed(1)
    models = []
    for how in ("eager", "millrace"):
        config = getattr(transformers, config_name)(**SMALL, **more)  # of its own: models of one config share the last word
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=how).to(dtype).eval()
        models.append(model)
    found = [model.config._attn_implementation for model in models]
    assert found == ["eager", "millrace"], found
    with torch.no_grad():
        for parameter in models[0].parameters():  # norms and sinks too: their defaults would hide an error
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    models[1].load_state_dict(models[0].state_dict())
    return models


def run(model, labels=None, **inputs):
    model.zero_grad()
    out = model(**inputs, labels=inputs["input_ids"] if labels is None else labels)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close_gradients(name, got, want, bound):
    assert set(got) == set(want), f"{name}: gradients of {set(got) ^ set(want)} are missing"
    largest = max(float(d.abs().max()) for d in want.values())
    for key, d in want.items():
        error = float((got[key] - d).abs().max())
        assert error <= bound * max(largest, 1e-3), f"{name} gradient of {key}: off by {error:.3g} of {largest:.3g}"


def test_family(name, dtype, bound):
    eager, ours = pair(name, dtype)
    torch.manual_seed(2)
    tokens = torch.randint(3, 96, (2, 23))
    want, d_want = run(eager, input_ids=tokens)
    got, d_got = run(ours, input_ids=tokens)
    close(f"{name} logits", got, want, bound)
    close_gradients(name, d_got, d_want, bound)
    for side in ("left", "right"):
        mask = torch.ones_like(tokens)
        mask[1, :6 if side == "left" else None] = 0 if side == "left" else 1
        if side == "right":
            mask[1, -6:] = 0
        seen = mask.bool()
        told = torch.nn.functional.pad(seen[:, :-1], (1, 0), value=True)  # by a token that is none of the padding
        labels = tokens.masked_fill(~(seen & told), -100)
        (want, d_want), (got, d_got) = (run(m, labels, input_ids=tokens, attention_mask=mask) for m in (eager, ours))
        close(f"{name} padded {side}", got[seen], want[seen], bound)
        close_gradients(f"{name} padded {side}", d_got, d_want, bound)


def test_generate(name):
    eager, ours = pair(name, torch.float32)
    prompt = torch.randint(3, 96, (2, 7))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    how = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "eos_token_id": None}
    tokens = eager.generate(prompt, **how)
    for cache in ("dynamic", "static"):
        assert torch.equal(tokens, ours.generate(prompt, **how, cache_implementation=cache)), f"{name}, {cache}: other tokens"


def test_static_cache(name):
    """Keys that are not filled yet are nobody's; a window's are moved. Without a mask, with one of what there is, and with
    one as long as the cache."""
    eager, ours = pair(name, torch.float32)
    tokens = torch.randint(3, 96, (2, 17))
    padding = torch.ones((2, 24), dtype=torch.int64)
    padding[1, :2] = 0
    seen = padding[:, :17].bool()
    with torch.no_grad():
        for kind in ("none", "so far", "whole"):
            whole = eager(input_ids=tokens, attention_mask=None if kind == "none" else padding[:, :17], use_cache=False).logits
            cache, given = transformers.StaticCache(config=ours.config, max_cache_len=24), []
            for begin, end in ((0, 9), (9, 10), (10, 17)):
                mask = {"none": None, "so far": padding[:, :end], "whole": padding}[kind]
                given.append(ours(input_ids=tokens[:, begin:end], attention_mask=mask, past_key_values=cache).logits)
            kept = seen if kind != "none" else torch.ones_like(seen)
            close(f"{name}, static cache, mask {kind}", torch.cat(given, 1)[kept], whole[kept], 2e-4)


def test_packed(name):
    """Sequences that share a row, told by positions that begin anew."""
    eager, ours = pair(name, torch.float32)
    tokens = torch.randint(3, 96, (2, 23))
    positions = torch.cat((torch.arange(9), torch.arange(14))).expand(2, -1)
    how = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    (want, d_want), (got, d_got) = run(eager, **how), run(ours, **how)
    close(f"{name} packed", got, want, 2e-4)
    close_gradients(f"{name} packed", d_got, d_want, 2e-4)
    whole = ours(input_ids=tokens, use_cache=False).logits
    assert float((whole - got).abs().max()) > 0.01, "packed sequences do not differ from one"


def test_encoders():
    """Bidirectional attention, windowed too, and a decoder's view of a padded encoder."""
    torch.manual_seed(3)
    tokens = torch.randint(3, 96, (2, 23))
    mask = torch.ones_like(tokens)
    mask[1, -6:] = 0
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "pad_token_id": 0}
    bart = {"vocab_size": 96, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64}
    decoder = transformers.LlamaConfig(**SMALL)
    decoder.is_causal = False
    for config, inputs, kept in ((transformers.BertConfig(**sizes), {}, mask.bool()),
                                 (transformers.ModernBertConfig(**sizes, local_attention=6), {}, mask.bool()),
                                 (decoder, {}, mask.bool()),
                                 (transformers.BartConfig(**bart), {"decoder_input_ids": tokens[:, :9]}, slice(None))):
        models = []
        for how in ("eager", "millrace"):
            models.append(transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=how).eval())
        models[1].load_state_dict(models[0].state_dict())
        with torch.no_grad():
            want, got = (m(input_ids=tokens, attention_mask=mask, **inputs).last_hidden_state[kept] for m in models)
        close(type(config).__name__, got, want, 2e-4)


def test_refused():
    """Masks that the library has no kernel for: said, and not left out."""
    chunked = transformers.Llama4TextConfig(**SMALL, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=96)
    both_ways = transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True)
    for config in (chunked, both_ways):
        model = transformers.AutoModel.from_config(config, attn_implementation="millrace")
        try:
            model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8, 9]]))
        except NotImplementedError as error:
            assert "has no kernel" in str(error)
        else:
            raise AssertionError(f"{type(config).__name__}: a mask of another pattern was left out")
    compiled = torch.compile(transformers.AutoModel.from_config(chunked, attn_implementation="millrace"), backend="eager")
    try:
        compiled(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8, 9]]), use_cache=False)
    except (NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
        assert "no kernel" in str(error), error
    else:
        raise AssertionError("compiled: a mask of another pattern was left out")


def main():
    if sys.argv[1:2] == ["--device"]:
        torch.set_default_device(sys.argv[2])
    transformers.logging.set_verbosity_error()
    mt.register_attention()
    for name in FAMILIES:
        test_family(name, torch.float32, 2e-4)
        test_generate(name)
        test_packed(name)
        test_static_cache(name)
        print(f"{name}: passed", flush=True)
    mask = torch.ones(1, 1, 4, 4)
    _, ours = pair("llama", torch.float32)
    try:
        ours(input_ids=torch.tensor([[3, 4, 5, 6]]), attention_mask=mask)
    except NotImplementedError as error:
        assert "attention_mask" in str(error)
    else:
        raise AssertionError("a mask of four dimensions was taken")
    test_encoders()
    test_refused()
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
