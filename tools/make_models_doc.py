#!/usr/bin/env python3
"""Writes the table of architectures in docs/models.md: which are proved, from which files, on which devices.

  tools/make_models_doc.py            write the section of docs/models.md
  tools/make_models_doc.py --check    write nothing; status 1 where the section is not what the tests say, or where
                                      README.md's own table leaves an architecture out or says another cuda than it

A cell is a test: the golden models under tests/golden, which tests/golden_test.cpp and tests/encoder_test.cpp compare
with transformers, say architecture and kind of file; src/model says what an architecture is called and which of its
operations a device does not do (Backend::lacks), which Model::load refuses before a weight is read.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- Written by tools/make_models_doc.py: change src/model or tests/golden, not this section. -->\n"
END = "<!-- The end of what tools/make_models_doc.py writes. -->\n"
# Operations of which a device may lack one: what in an architecture's file asks for it.
CALLS = {"kLatent": ("public LatentDecoder",), "kBidirectional": ("attend_both_ways",),
         "kGatedAttention": ("public GatedDeltaDecoder", "public Qwen35"), "kState": ("gated_delta.h", "mamba_layer.h", "norm_mix(", "time_mix("),
         "kAdapters": (), "kExpertAdapters": (), "kReluSquared": ("kReluSquared",), "kUngatedExperts": (), "kScaledShared": ("shared.scale",),
         "kScaledInputs": ("ssm_multipliers",), "kStateBeside": ("state_beside",), "kChannelDecay": ("channel_decay = true",),
         "kTokenShift": ("time_mix(",), "kPairs": (), "kImages": (), "kSparse": (), "kIndexer": ("index_top",),
         "kHeadSizes": ("layer_heads",), "kSharedKeys": ("kv_source",), "kValueNorm": ("v_norm",),
         "kLayerInputs": ("end_layer",), "kExpertNorms": ("experts_norm_after",)}
NOT_RUN_ON_CUDA = ()  # architectures whose golden models have not run on a GPU
WORDS = {"kLatent": "latent attention", "kBidirectional": "bidirectional attention", "kGatedAttention": "gated attention",
         "kState": "layers with a state", "kReluSquared": "squared ReLU", "kScaledShared": "a scaled shared expert",
         "kScaledInputs": "scaled inputs of a state", "kStateBeside": "attention beside a state",
         "kChannelDecay": "a decay of each channel", "kTokenShift": "a token shift", "kHeadSizes": "heads of several sizes",
         "kSharedKeys": "keys and values of another layer", "kValueNorm": "a norm of values",
         "kLayerInputs": "inputs of layers", "kExpertNorms": "norms of experts", "kIndexer": "an indexer of tokens"}


def architectures():
    """name -> (model types, presets, source), in the order of architecture_list.h."""
    found = {}
    for path in sorted((ROOT / "src/model").glob("*.cpp")):
        text = path.read_text()
        pieces = re.split(r"\n(?=class \w+ (?:final )?: public )", text)
        owner = {}
        for piece in pieces[1:]:
            name = re.search(r'string_view name\(\) const override \{ return "([^"]+)"; \}', piece)
            types = re.search(r"model_types\(\) const override \{\s*return \{([^}]*)\};", piece)
            if not name or not types:
                continue
            presets = re.findall(r'\{"([a-z0-9.-]+)",\s*R"\(', piece)
            cls = re.match(r"class (\w+)", piece).group(1)
            owner[cls] = name.group(1)
            found[name.group(1)] = (re.findall(r'"([^"]+)"', types.group(1)), presets, text, cls)
        for name, cls in re.findall(r"const Architecture& (k\w+) = (k\w+)Object;", text):
            for other, (types, presets, source, own) in list(found.items()):
                if "k" + own == cls and source is text:
                    found[other] = (types, presets, source, name)
    order = re.findall(r"ONE\((\w+)\)", (ROOT / "src/model/architecture_list.h").read_text())
    missing = [o for o in order if o not in {v[3] for v in found.values()}]
    if missing:
        raise SystemExit(f"src/model: found no class for {', '.join(missing)}")
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][3])))


def golden():
    """architecture -> {kind of file -> names of golden models}."""
    out = {}
    for path in sorted((ROOT / "tests/golden").glob("*/*/golden.json")):
        record = json.loads(path.read_text())
        kinds = [f["kind"] for f in record["files"]] if "files" in record else [
            kind for kind, file in (("hf", "hf"), ("gguf", "model.gguf")) if (path.parent / file).exists()]
        for kind in kinds:
            out.setdefault(record["architecture"], {}).setdefault(kind, []).append(path.parent.name)
    return out


def lacking():
    """What the CUDA backend does not do."""
    text = (ROOT / "src/backend/cuda/cuda_backend.cpp").read_text()
    return re.findall(r"missing\.add\(OpFeature::(\w+)\)", text)


def cuda_cell(name, source, proved):
    """What the cuda column says of an architecture whose golden models are `proved`."""
    lacks = [WORDS[m] for m in lacking() if any(call in source for call in CALLS[m])]
    if lacks:
        return f"refused: {', '.join(lacks)}"
    return "not run" if name in NOT_RUN_ON_CUDA else "yes" if proved else "–"


def readme_faults():
    """Where README's table of architectures differs: a row names them by GGUF's name or a model_type."""
    proved, found = golden(), architectures()
    by_type = {word: name for name, (types, *_) in reversed(found.items()) for word in (*types, name)}
    text = (ROOT / "README.md").read_text()
    head, rows = re.search(r"^(\| architecture \|.*)\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE).groups()
    column = [cell.strip() for cell in head.split("|")].index("cuda")
    named = set()
    for row in rows.splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        for word in cells[1].removesuffix(", with experts").split(", "):
            if word not in by_type:
                yield f"README.md: '{word}' is no architecture of src/model"
                continue
            name = by_type[word]
            named.add(name)
            expected = cuda_cell(name, found[name][2], name in proved)
            if cells[column] != ("–" if expected.startswith("refused") else expected):
                yield f"README.md: {word} says '{cells[column]}' of cuda, expected '{expected}'"
    yield from (f"README.md: the table of architectures leaves out {name}" for name in found if name not in named)


def section():
    proved = golden()
    lines = ["| architecture | `model_type` | Hugging Face directory | GGUF | reference, cpu | cuda | `millrace synth` |",
             "|---|---|---|---|---|---|---|"]
    for name, (types, presets, source, _) in architectures().items():
        tests = proved.pop(name, {})
        cells = [f"{len(tests[k])} golden model{'s' if len(tests[k]) > 1 else ''}" if k in tests else "–" for k in ("hf", "gguf")]
        devices, cuda = "yes" if tests else "–", cuda_cell(name, source, tests)
        shown = ", ".join(f"`{p}`" for p in presets if not p.startswith("tiny-"))
        lines.append(f"| {name} | {', '.join(f'`{t}`' for t in types)} | {cells[0]} | {cells[1]} | {devices} | {cuda} | {shown} |")
    if proved:
        raise SystemExit(f"tests/golden: found models of {', '.join(proved)}, which src/model does not have")
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def main():
    page = PAGE.read_text()
    if BEGIN not in page or END not in page:
        raise SystemExit(f"{PAGE.relative_to(ROOT)}: found no section of this tool")
    before, rest = page.split(BEGIN, 1)
    fresh = before + section() + rest.split(END, 1)[1]
    if "--check" in sys.argv[1:]:
        if fresh != page:
            raise SystemExit("docs/models.md is not what src/model and tests/golden say: run tools/make_models_doc.py")
        if faults := list(readme_faults()):
            raise SystemExit("\n".join(faults))
        return
    PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
