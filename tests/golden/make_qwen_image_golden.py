#!/usr/bin/env python3
"""A tiny Qwen 3 VL, dense and with experts, and what transformers' processor and model make of the pictures of make_image_golden.py.

    venv/bin/pip install pillow && venv/bin/python tests/golden/make_qwen_image_golden.py

Writes qwen_images/: qwen3vl/ (a Hugging Face directory), mmproj.gguf (its tower, llama.cpp's names and keys), qwen3vlmoe/
(a directory of one with experts and without a tower: that one's is taken), golden.json {sizes [[width, height, resized width, resized height]], pictures {file: {width, height, tokens}}, hidden, further,
start, prompts [{tokens, images, next (greedy), logprobs [[token, logprob], ...]}], experts (the same of the one with
experts)} and golden.bin: for each picture
its pixels, RGB, as the processor resized them, then its rows, float32: of the tower's end, then of the layers within.
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from PIL import Image, ImageOps
from safetensors.torch import save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

HERE = Path(__file__).parent / "qwen_images"
PICTURES = Path(__file__).parent / "images"
TOKENIZER = Path(__file__).parent / "models" / "qwen3" / "hf"
PATCH, MERGE, HIDDEN, DEEP = 4, 2, 32, [0, 2]
MIN, MAX = 1024, 3136  # pixels
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
TEMPLATE = ("{% for m in messages %}{{ '[' + m['role'] + '] ' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
            "{% for p in m['content'] %}{% if p['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
            "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}{{ '[assistant] ' }}")


def make_net(vocab, start, experts=False):
    text = {"vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0,
                                                      "mrope_section": [3, 3, 2], "mrope_interleaved": True}}
    vision = {"depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": PATCH,
              "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": HIDDEN,
              "num_position_embeddings": 49, "deepstack_visual_indexes": DEEP}
    classes = "Qwen3VLMoe" if experts else "Qwen3VL"
    if experts:
        text |= EXPERTS
    config = getattr(transformers, classes + "Config")(text_config=text, vision_config=vision, vision_start_token_id=start,
                                        vision_end_token_id=start + 1, image_token_id=start + 2,
                                        video_token_id=start + 3, tie_word_embeddings=False)
    net = getattr(transformers, classes + "ForConditionalGeneration")._from_config(
        config, attn_implementation="eager", experts_implementation="eager").float().eval()
    torch.manual_seed(9)
    for name, p in net.named_parameters():
        with torch.no_grad():
            if p.ndim == 1:
                p.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.25 * torch.randn_like(p))
            else:
                fan_in = p.shape[-1] if ".experts." in name else p[0].numel()
                gain = 0.7 if "embed_tokens" in name or "pos_embed" in name else 1.4 / fan_in ** 0.5
                p.copy_(torch.randn_like(p) * gain)
            p.copy_(p.to(torch.bfloat16).float())
    return net


def write_hf(net, vocab, start):
    kind = net.config.model_type
    experts = kind == "qwen3_vl_moe"
    folder = HERE / kind.replace("_", "")
    folder.mkdir()
    turned = lambda n, p: p.transpose(1, 2) if ".experts." in n else p  # as published
    save_file({n: turned(n, p.detach()).to(torch.bfloat16).contiguous().clone() for n, p in net.named_parameters()
               if not (experts and ".visual." in n)}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(net.config.to_json_string(use_diff=False))
    keep = lambda part, names: {k: part[k] for k in names.split()}
    text = keep(config["text_config"], "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
                "num_key_value_heads head_dim max_position_embeddings rms_norm_eps") | (EXPERTS if experts else {})
    # As the published files have it: transformers 4's spelling.
    text |= {"model_type": kind + "_text", "rope_theta": 3000.0, "eos_token_id": 1,
             "rope_scaling": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"}}
    vision = keep(config["vision_config"], "depth hidden_size hidden_act intermediate_size num_heads in_channels patch_size "
                  "spatial_merge_size temporal_patch_size out_hidden_size num_position_embeddings deepstack_visual_indexes")
    out = {"architectures": [type(net).__name__], "model_type": kind, "text_config": text,
           "vision_config": vision | {"model_type": kind}, "image_token_id": start + 2, "video_token_id": start + 3,
           "vision_start_token_id": start, "vision_end_token_id": start + 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(out, indent=1) + "\n")
    processor = {"size": {"longest_edge": MAX, "shortest_edge": MIN}, "patch_size": PATCH, "temporal_patch_size": 2,
                 "merge_size": MERGE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                 "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1) + "\n")
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    for i, name in enumerate((START, END, PAD)):
        tokenizer["added_tokens"].append({"id": start + i, "content": name, "single_word": False, "lstrip": False,
                                          "rstrip": False, "normalized": False, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n")
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def write_mmproj(net):
    """With the keys of llama.cpp's converter."""
    w = gguf.GGUFWriter(HERE / "mmproj.gguf", "clip")
    v = net.config.vision_config
    keys = gguf.Keys.ClipVision
    w.add_type(gguf.GGUFType.MMPROJ)
    w.add_string(gguf.Keys.Clip.PROJECTOR_TYPE, gguf.VisionProjectorType.QWEN3VL)
    w.add_bool(gguf.Keys.Clip.HAS_VISION_ENCODER, True)
    w.add_bool("clip.use_gelu", True)
    for key, value in ((keys.IMAGE_SIZE, int(v.num_position_embeddings**0.5) * PATCH), (keys.PATCH_SIZE, PATCH),
                       (keys.EMBEDDING_LENGTH, v.hidden_size), (keys.FEED_FORWARD_LENGTH, v.intermediate_size),
                       (keys.PROJECTION_DIM, HIDDEN), (keys.BLOCK_COUNT, v.depth),
                       (keys.Attention.HEAD_COUNT, v.num_heads), (keys.SPATIAL_MERGE_SIZE, MERGE)):
        w.add_uint32(key, value)
    w.add_float32(keys.Attention.LAYERNORM_EPS, 1e-6)
    w.add_array(keys.IMAGE_MEAN, [0.5] * 3)
    w.add_array(keys.IMAGE_STD, [0.5] * 3)
    w.add_array(keys.IS_DEEPSTACK_LAYERS, [l in DEEP for l in range(v.depth)])
    names = {"patch_embed.proj.bias": "v.patch_embd.bias", "pos_embed.weight": "v.position_embd.weight"}
    stems = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.linear_fc1": "ffn_up",
             "mlp.linear_fc2": "ffn_down"}
    ends = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    for end in ("weight", "bias"):
        names |= {f"blocks.{l}.{a}.{end}": f"v.blk.{l}.{b}.{end}" for l in range(v.depth) for a, b in stems.items()}
        names |= {f"merger.norm.{end}": f"v.post_ln.{end}", f"merger.linear_fc1.{end}": f"mm.0.{end}",
                  f"merger.linear_fc2.{end}": f"mm.2.{end}"}
        names |= {f"deepstack_merger_list.{i}.{a}.{end}": f"v.deepstack.{l}.{b}.{end}" for i, l in enumerate(DEEP)
                  for a, b in ends.items()}
    for name, p in net.model.visual.named_parameters():
        values = np.ascontiguousarray(p.detach().numpy(), np.float32)
        if name == "patch_embed.proj.weight":  # a tensor for each of two frames
            w.add_tensor("v.patch_embd.weight", np.ascontiguousarray(values[:, :, 0]), raw_dtype=T.F32)
            w.add_tensor("v.patch_embd.weight.1", np.ascontiguousarray(values[:, :, 1]), raw_dtype=T.F32)
        else:
            w.add_tensor(names[name], values, raw_dtype=T.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def load(name, processor):
    picture = ImageOps.exif_transpose(Image.open(PICTURES / name)).convert("RGB")
    made = processor(images=picture, return_tensors="pt")
    height, width = smart_resize(picture.height, picture.width, PATCH * MERGE, MIN, MAX)
    assert made["image_grid_thw"].tolist() == [[1, height // PATCH, width // PATCH]]
    return picture, picture.resize((width, height), Image.Resampling.BICUBIC), made


@torch.no_grad()
def run(net, prompt, seen, start):
    """Prompts have <|vision_start|> where an image stands behind."""
    ids, left = [], list(seen)
    for token in prompt:
        ids += [token]
        if token == start:
            ids += [start + 2] * (int(left.pop(0)["image_grid_thw"].prod()) // MERGE**2)
    ids = torch.tensor([ids])
    out = net(input_ids=ids, pixel_values=torch.cat([s["pixel_values"] for s in seen]), attention_mask=torch.ones_like(ids),
              image_grid_thw=torch.cat([s["image_grid_thw"] for s in seen]), mm_token_type_ids=(ids == start + 2).int())
    return out.logits[0, -1].log_softmax(-1)


def answers(net, asked, seen, start, info):
    """What it says of prompts [(tokens, images)]."""
    prompts = []
    for tokens, names in asked:
        line, after, best = list(tokens), [], None
        for _ in range(6):
            logprobs = run(net, line, [seen[n] for n in names], start)
            best = best if best is not None else logprobs
            after.append(int(logprobs[:start].argmax()))
            line.append(after[-1])
        top = best.topk(20)
        prompts.append({"tokens": tokens, "images": names, "next": after,
                        "logprobs": [[int(i), round(float(v), 6)] for v, i in zip(top.values, top.indices)]})
        other = run(net, tokens, [seen["turned.png" if n == "square.png" else "square.png"] for n in names], start)
        print(after, top.values[:4].tolist(), float((other - best).abs().max()), info)
    return prompts


def main():
    torch.set_num_threads(1)
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    start = len(json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"])
    start = max(start, json.loads((TOKENIZER / "config.json").read_text())["vocab_size"])
    vocab = start + 4
    net = make_net(vocab, start)
    write_hf(net, vocab, start)
    write_mmproj(net)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": MIN, "longest_edge": MAX}, patch_size=PATCH,
                                         temporal_patch_size=2, merge_size=MERGE, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    rng = np.random.default_rng(6)
    seen, chunks, info = {}, [], {}
    for name in ("square.png", "turned.png", "mill.png", "photo.jpg", "alpha.png"):
        _, resized, seen[name] = load(name, processor)
        with torch.no_grad():
            out = net.model.visual(seen[name]["pixel_values"], grid_thw=seen[name]["image_grid_thw"])
        rows = torch.cat([out.pooler_output, *out.deepstack_features], dim=-1)
        chunks += [np.array(resized).tobytes(), rows.numpy().astype("<f4").tobytes()]
        info[name] = {"width": resized.width, "height": resized.height, "tokens": len(rows)}
    sizes = [[int(w), int(h), *smart_resize(int(h), int(w), PATCH * MERGE, MIN, MAX)[::-1]]
             for w, h in [*rng.integers(1, 200, size=(60, 2)), (12, 20), (20, 12), (4, 4), (3, 600), (1000, 5), (56, 56)]
             if max(w, h) <= 200 * min(w, h)]
    asked, words = [], lambda n: rng.integers(4, start, size=n).tolist()
    for parts in ([5, "square.png", 7], [40, "turned.png", 3, "square.png", 30], ["square.png", 1],
                  [4, "mill.png", 2, "photo.jpg", 6, "alpha.png", 3]):
        tokens, names = words(1), []
        for part in parts:
            tokens += [start, start + 1] if isinstance(part, str) else words(part)
            names += [part] if isinstance(part, str) else []
        asked.append((tokens, names))
    prompts = answers(net, asked, seen, start, info)
    mixture = make_net(vocab, start, experts=True)
    mixture.model.visual.load_state_dict(net.model.visual.state_dict())
    write_hf(mixture, vocab, start)
    mixed = answers(mixture, asked[:3], seen, start, info)  # the last has to be resized, and a mmproj has other bounds
    (HERE / "golden.bin").write_bytes(b"".join(chunks))
    (HERE / "golden.json").write_text(json.dumps(
        {"sizes": sizes, "pictures": info, "hidden": HIDDEN, "further": len(DEEP), "start": start, "prompts": prompts,
         "experts": mixed},
        separators=(",", ":")).replace('{"tokens":[', '\n{"tokens":[') + "\n")


if __name__ == "__main__":
    main()
