"""Speeds of torch's attention on this machine's GPU, in attention_bench's units: scaled_dot_product_attention
with the cuDNN and flash backends, bf16, causal, the shapes that attention_bench prints.
    python3 bench/attention_torch.py
"""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_events import milliseconds


def main():
    for batch, heads, kv_heads, length, dim in [(1, 64, 8, 8192, 64), (2, 16, 16, 8192, 64), (1, 16, 16, 16384, 64),
                                                (1, 32, 8, 8192, 128), (1, 16, 16, 16384, 128)]:
        q, k, v = (torch.randn(batch, h, length, dim, device="cuda", dtype=torch.bfloat16)
                   for h in (heads, kv_heads, kv_heads))
        for name, backend in [("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]:
            try:
                with sdpa_kernel(backend):
                    ms = milliseconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                           enable_gqa=heads != kv_heads), times=9)
            except RuntimeError as error:
                print(f"torch {name}: {batch} x {length} heads {heads}/{kv_heads} dim {dim}: {str(error)[:80]}")
                continue
            operations = 4 * batch * heads * length * length / 2 * dim
            print(f"torch {name}: {batch} x {length} heads {heads}/{kv_heads} dim {dim:3d} {ms * 1e3:9.1f} us "
                  f"{operations / ms * 1e-9:7.1f} TFLOP/s")


if __name__ == "__main__":
    main()
