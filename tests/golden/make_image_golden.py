#!/usr/bin/env python3
"""A tiny Gemma 3 that sees, two pictures, and what Pillow and transformers make of them.

    venv/bin/pip install pillow && venv/bin/python tests/golden/make_image_golden.py

Writes images/: gemma3/ (a Hugging Face directory), mmproj.gguf (its tower, llama.cpp's names and keys), square.png and
turned.png (of the tower's own size), mill.png, photo.jpg (lying on its side, as its EXIF data says), alpha.png, golden.json {pictures {file: {width, height}}, image_size,
rows, prompts [{tokens, images, next (greedy), logprobs [[token, logprob], ...]}]} and
golden.bin: for each of mill.png and photo.jpg its pixels, RGB, the same resized, then its rows, float32.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from PIL import Image, ImageOps
from safetensors.torch import save_file

HERE = Path(__file__).parent / "images"
TOKENIZER = Path(__file__).parent / "models" / "gemma3" / "hf"
TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + '] ' }}{% if m['content'] is string %}"
            "{{ m['content'] }}{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}{{ '<start_of_image>' }}"
            "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}{{ '[model] ' }}")


def pictures():
    """A drawing, a photograph that was held sideways, and one with transparent parts."""
    y, x = np.mgrid[0:45, 0:70]
    mill = np.stack([127 + 120 * np.sin(x / 9), 127 + 120 * np.cos(y / 5 + x / 20), (x * 7 + y * 11) % 256], -1)
    Image.fromarray(mill.astype(np.uint8)).save(HERE / "mill.png")
    y, x = np.mgrid[0:56, 0:56]
    square = np.stack([127 + 120 * np.sin(x / 6 + y / 11), 255 - 4 * x, (x * 5 + y * 3) % 256], -1).astype(np.uint8)
    Image.fromarray(square).save(HERE / "square.png")
    Image.fromarray(np.ascontiguousarray(square.transpose(1, 0, 2)[::-1])).save(HERE / "turned.png")
    y, x = np.mgrid[0:48, 0:96]
    photo = np.stack([200 - y * 3, 60 + x, 127 + 100 * np.sin((x + y) / 15)], -1)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(HERE / "photo.jpg", quality=85, exif=exif)
    rgba = np.dstack([mill[:8, :8], np.full((8, 8), 90)]).astype(np.uint8)
    Image.fromarray(rgba, "RGBA").save(HERE / "alpha.png")


def make_net(vocab):
    text = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 24,
            "sliding_window_pattern": 2, "query_pre_attn_scalar": 16, "max_position_embeddings": 1024,
            "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
              "num_attention_heads": 3, "image_size": 56, "patch_size": 7,
              "vision_use_head": False}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=16,
                                       boi_token_index=vocab - 3, eoi_token_index=vocab - 2, image_token_index=vocab - 1,
                                       image_token_id=vocab - 1, tie_word_embeddings=True)
    net = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
    torch.manual_seed(5)
    for name, p in net.named_parameters():
        with torch.no_grad():
            if p.ndim == 1:
                is_layer_norm = "layernorm" in name and "vision" in name or "layer_norm" in name
                mean = 1.0 if is_layer_norm and name.endswith("weight") else 0.0
                p.copy_(mean + 0.25 * torch.randn_like(p))
            else:
                cols = p[0].numel() if "mm_input_projection" not in name else p.shape[0]
                p.copy_(torch.randn_like(p) * (1.3 / cols**0.5 if "embed" not in name or "patch" in name else 1.0))
            p.copy_(p.to(torch.bfloat16).float())
    return net


def published(name):
    """As the published checkpoints name it."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.")
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return "vision_tower.vision_model." + name.removeprefix("vision_tower.")
    return name


def write_hf(net, vocab):
    folder = HERE / "gemma3"
    folder.mkdir()
    save_file({published(n): p.detach().to(torch.bfloat16).clone() for n, p in net.named_parameters()},
              folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(net.config.to_json_string(use_diff=False))
    keep = lambda part, names: {k: part[k] for k in names.split() if k in part}
    text = keep(config["text_config"], "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
                "num_key_value_heads head_dim sliding_window query_pre_attn_scalar max_position_embeddings layer_types "
                "rope_parameters rms_norm_eps hidden_activation eos_token_id bos_token_id pad_token_id")
    text["model_type"] = "gemma3_text"
    vision = keep(config["vision_config"], "model_type hidden_size intermediate_size num_hidden_layers "
                  "num_attention_heads image_size patch_size vision_use_head")
    out = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
           "vision_config": vision, "mm_tokens_per_image": 16, "boi_token_index": vocab - 3, "eoi_token_index": vocab - 2,
           "image_token_index": vocab - 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(out, indent=1) + "\n")
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    added = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    for i, name in enumerate(added):
        tokenizer["model"]["vocab"][name] = vocab - 3 + i
        tokenizer["added_tokens"].append({"id": vocab - 3 + i, "content": name, "single_word": False, "lstrip": False,
                                          "rstrip": False, "normalized": False, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n")
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n")


def write_mmproj(net):
    """With the keys of llama.cpp's converter."""
    w = gguf.GGUFWriter(HERE / "mmproj.gguf", "clip")
    v = net.config.vision_config
    w.add_type(gguf.GGUFType.MMPROJ)
    w.add_string(gguf.Keys.Clip.PROJECTOR_TYPE, "gemma3")
    w.add_bool(gguf.Keys.Clip.HAS_VISION_ENCODER, True)
    w.add_bool("clip.use_gelu", True)
    for key, value in ((gguf.Keys.ClipVision.IMAGE_SIZE, v.image_size), (gguf.Keys.ClipVision.PATCH_SIZE, v.patch_size),
                       (gguf.Keys.ClipVision.EMBEDDING_LENGTH, v.hidden_size),
                       (gguf.Keys.ClipVision.FEED_FORWARD_LENGTH, v.intermediate_size),
                       (gguf.Keys.ClipVision.PROJECTION_DIM, 32), (gguf.Keys.ClipVision.BLOCK_COUNT, v.num_hidden_layers),
                       (gguf.Keys.ClipVision.Attention.HEAD_COUNT, v.num_attention_heads),
                       (gguf.Keys.ClipVision.Projector.SCALE_FACTOR, 2)):
        w.add_uint32(key, value)
    w.add_float32(gguf.Keys.ClipVision.Attention.LAYERNORM_EPS, v.layer_norm_eps)
    w.add_array(gguf.Keys.ClipVision.IMAGE_MEAN, [0.5] * 3)
    w.add_array(gguf.Keys.ClipVision.IMAGE_STD, [0.5] * 3)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, v.num_hidden_layers)
    for name, p in net.named_parameters():
        name = published(name)
        if name.startswith("language_model."):
            continue
        values = p.detach().numpy()
        if "soft_emb_norm" in name:
            values = values + 1
        mapped = names.get_name(name.replace("_weight", ".weight"), try_suffixes=(".weight", ".bias"))
        w.add_tensor(mapped, np.ascontiguousarray(values, np.float32), raw_dtype=T.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def load(name, size):
    picture = ImageOps.exif_transpose(Image.open(HERE / name)).convert("RGB")
    resized = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255
    return np.array(picture), np.array(resized), ((pixels - 0.5) / 0.5)[None]


@torch.no_grad()
def run(net, prompt, pixels, vocab):
    """Prompts have <start_of_image> where an image stands behind."""
    ids = []
    for token in prompt:
        ids += [token] + [vocab - 1] * (16 if token == vocab - 3 else 0)
    ids = torch.tensor([ids])
    out = net(input_ids=ids, pixel_values=torch.cat(pixels), token_type_ids=(ids == vocab - 1).long(),
              attention_mask=torch.ones_like(ids))
    return out.logits[0, -1].log_softmax(-1)


def main():
    torch.set_num_threads(1)
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    pictures()
    vocab = json.loads((TOKENIZER / "config.json").read_text())["vocab_size"] + 3
    net = make_net(vocab)
    write_hf(net, vocab)
    write_mmproj(net)
    rng = np.random.default_rng(6)
    size, seen, chunks, info = net.config.vision_config.image_size, {}, [], {}
    for name in ("mill.png", "photo.jpg"):
        picture, resized, seen[name] = load(name, size)
        with torch.no_grad():
            rows = net.get_image_features(seen[name])
        rows = getattr(rows, "pooler_output", rows)
        rows = rows if torch.is_tensor(rows) else torch.cat(list(rows))
        chunks += [picture.tobytes(), resized.tobytes(), rows.reshape(16, 32).numpy().astype("<f4").tobytes()]
        info[name] = {"width": picture.shape[1], "height": picture.shape[0]}
    for name in ("square.png", "turned.png"):
        seen[name] = load(name, size)[2]
    boi, eoi, prompts = vocab - 3, vocab - 2, []
    words = lambda n: rng.integers(4, vocab - 3, size=n).tolist()
    for parts in ([5, "square.png", 7], [40, "turned.png", 3, "square.png", 30], ["square.png", 1],
                  [4, "mill.png", 2, "photo.jpg", 6]):
        tokens, names = [1], []
        for part in parts:
            tokens += [boi, eoi] if isinstance(part, str) else words(part)
            names += [part] if isinstance(part, str) else []
        line, after, best = list(tokens), [], None
        for _ in range(6):
            logprobs = run(net, line, [seen[n] for n in names], vocab)
            best = best if best is not None else logprobs
            after.append(int(logprobs.argmax()))
            line.append(after[-1])
        top = best.topk(20)
        prompts.append({"tokens": tokens, "images": names, "next": after,
                        "logprobs": [[int(i), round(float(v), 6)] for v, i in zip(top.values, top.indices)]})
        other = run(net, tokens, [seen["turned.png" if n == "square.png" else "square.png"] for n in names], vocab)
        print(after, float((other - best).abs().max()))
    (HERE / "golden.bin").write_bytes(b"".join(chunks))
    (HERE / "golden.json").write_text(json.dumps(
        {"pictures": info, "image_size": size, "rows": 16, "hidden": 32, "boi": boi, "prompts": prompts},
        separators=(",", ":")).replace('{"tokens"', '\n{"tokens"') + "\n")


if __name__ == "__main__":
    main()
