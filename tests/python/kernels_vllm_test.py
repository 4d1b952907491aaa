#!/usr/bin/env python3
"""vLLM itself, with examples/python_kernels/vllm_attention_backend.py as its attention: a tiny Llama with random weights
on a CPU says what transformers says. Run by kernels_test.py in an environment of its own.

The wheel of vLLM on PyPI is built for CUDA. What its CPU worker calls of vLLM's own CPU build beside attention is
defined here in torch's terms, where that build does not.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1",
                  VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", GLOO_SOCKET_IFNAME="lo",
                  VLLM_HOST_IP="127.0.0.1")

import torch  # noqa: E402

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "python_kernels"
PROMPTS = [[3, 17, 42, 5, 9, 60, 33, 2, 8, 41, 40, 39, 38, 37, 36, 35, 34, 1, 2, 3], [7, 7, 1], [50, 20, 30, 10, 0, 61]]
NEW_TOKENS = 20


def slot_mapping(query_start_loc, positions, block_table, slots, block_size):
    slots.fill_(-1)
    starts = query_start_loc.tolist()
    for row, (first, last) in enumerate(zip(starts, starts[1:])):
        at = positions[first:last].long()
        slots[first:last] = block_table[row, at // block_size].long() * block_size + at % block_size


STAND_INS = {
    "init_cpu_memory_env": ("(int[] nodes) -> ()", lambda nodes: None),
    "compute_slot_mapping_kernel_impl": ("(Tensor query_start_loc, Tensor positions, Tensor block_table, "
                                         "Tensor(a!) slot_mapping, int block_size) -> ()", slot_mapping),
    "greedy_argmax": ("(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
}


def define_stand_ins():
    library = torch.library.Library("_C", "FRAGMENT")
    for name, (schema, kernel) in STAND_INS.items():
        if not hasattr(torch.ops._C, name):
            library.define(name + schema)
            library.impl(name, kernel, "CompositeExplicitAutograd")
    return library


def make_model(folder):
    import transformers
    torch.manual_seed(5)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                                      initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def expected(model, prompt):
    """Greedy tokens and their log-probabilities, each by the whole sequence anew."""
    tokens, log_probabilities = list(prompt), []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            row = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
            tokens.append(int(row.argmax()))
            log_probabilities.append(float(row.max()))
    return tokens[len(prompt):], log_probabilities


def main():
    try:
        import vllm
    except ImportError as error:
        print(f"SKIPPED: vLLM is not installed ({error})")
        return 77
    sys.path.insert(0, str(EXAMPLES))
    import vllm_attention_backend as example
    library = define_stand_ins()
    example.register()
    calls = []
    attend = example.attend

    def counted(query, *args, **named):
        calls.append(query.shape[0])
        return attend(query, *args, **named)

    example.attend = counted
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder)
        llm = vllm.LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=96,
                       kv_cache_memory_bytes=4 << 20, block_size=16, max_num_batched_tokens=128, max_num_seqs=4, seed=0,
                       compilation_config={"custom_ops": ["none"]}, disable_log_stats=True)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0,
                                     detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs):
            made = output.outputs[0]
            tokens, log_probabilities = expected(model, prompt)
            assert list(made.token_ids) == tokens, f"{list(made.token_ids)}, expected {tokens}"
            error = max(abs(step[token].logprob - want)
                        for step, token, want in zip(made.logprobs, tokens, log_probabilities))
            assert error < 1e-4, f"log-probabilities are off by {error}"
    # Two layers, at least a step for every new token, and all prompts' rows in some.
    assert len(calls) >= 2 * NEW_TOKENS and max(calls) > len(PROMPTS), f"attention was called for {calls}"
    del library
    print(f"vllm {vllm.__version__}: passed, {len(calls)} calls of attention")
    return 0


if __name__ == "__main__":
    sys.exit(main())
