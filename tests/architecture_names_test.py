#!/usr/bin/env python3
"""Fails when a source file of src/, apps/ or python/src knows an architecture by name that is not its own.

An architecture is a file of src/model/ with a class derived from Architecture; its name and its model_types are read
from there. Outside that file:
    no string is such a name, or begins like its GGUF keys ("llama.");
    nothing named architecture or model_type is compared with a string;
    the object it defines (kLlama) is named in architecture_list.h alone.
Comments and tests (*_test.cpp, test_*) are not looked at. Where the same word names another thing (a tokenizer) is
listed below. Run with --self-test it builds small trees with each of these faults and fails unless each
is found.
"""

import re
import sys
from pathlib import Path

import made_trees

SOURCES = {".cpp", ".h", ".cu", ".cuh", ".inc"}
LIST = Path("src/model/architecture_list.h")
OTHER_MEANINGS = {  # place -> words that are names of something else there
    "src/model/gated_delta.cpp": {"qwen2"},  # a tokenizer
    "src/model/qwen35.cpp": {"qwen3.5-27b", "qwen3.5-35b-a3b"},  # presets
    "src/tokenizer/": {"llama", "llama4", "qwen2", "gpt2", "bert", "modern-bert", "gemma4", "falcon-h1", "lfm2",
                       "qwen35"},  # tokenizer.ggml.model, tokenizer.ggml.pre
    "apps/cli/quantize/vocabulary.cpp": {"llama", "gpt2"},
    "apps/cli/synth/metadata.cpp": {"gpt2"},
    "src/model/qwen": {"qwen2"},  # of a synthetic tokenizer
    "src/chat/": {"mistral", "gemma4"},  # ways to write tool calls
}

TOKEN = re.compile(r'R"\((?P<raw>.*?)\)"|"(?P<string>(?:\\.|[^"\\\n])*)"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/',
                   re.DOTALL)
NAME = re.compile(r'string_view name\(\) const override \{\s*return "([^"]+)";')
MODEL_TYPES = re.compile(r"model_types\(\) const override \{\s*return \{([^}]*)\};")
OBJECT = re.compile(r"^const Architecture& (\w+) =", re.MULTILINE)
COMPARED = re.compile(
    r'(?:architecture|model_type)\w*(?:\(\))?\s*(?:[=!]=\s*"|\.(?:starts_with|ends_with|find|compare|contains)\(\s*")'
    r'|"\s*[=!]=\s*[\w.>()-]*(?:architecture|model_type)')


def without_comments(text):
    """The text with every comment blank, line by line."""
    def replacement(match):
        whole = match.group()
        return re.sub(r"[^\n]", " ", whole) if whole.startswith("/") else whole

    return TOKEN.sub(replacement, text)


def read_sources(root):
    texts = {}
    for top in ("src", "apps", "python/src"):
        for path in sorted((root / top).rglob("*")):
            is_test = path.stem.endswith("_test") or path.stem.startswith("test_")
            if path.suffix in SOURCES and not is_test:
                texts[path.relative_to(root)] = without_comments(path.read_text(encoding="utf-8"))
    return texts


def read_architectures(texts):
    """({name in files: source file}, {object: source file})."""
    names, objects = {}, {}
    for path, text in texts.items():
        if path.parts[:2] != ("src", "model") or not (own := NAME.findall(text)):
            continue
        own += [literal for types in MODEL_TYPES.findall(text) for literal in re.findall(r'"([^"]+)"', types)]
        names |= dict.fromkeys(own, path)
        objects |= {found: path for found in OBJECT.findall(text)}
    return names, objects


def faults_of(path, text, names, objects):
    def line(position):
        return f"{path}:{text.count(chr(10), 0, position) + 1}"

    for match in TOKEN.finditer(text):
        literal = match.group("string")
        if literal is None or str(path) == "src/hub/known_models.cpp":  # names of published models there
            continue
        begins = [literal] + [literal[:at] for at, character in enumerate(literal) if character == "."]
        for own in (names[begin] for begin in begins if begin in names):
            if own == path:
                continue
            if any(str(path).startswith(place) and literal in words for place, words in OTHER_MEANINGS.items()):
                continue
            yield f'{line(match.start())}: knows "{literal}", which is {own}\'s'
    for match in COMPARED.finditer(text) if path not in names.values() else ():  # its own it may tell apart
        yield f"{line(match.start())}: compares {match.group().split()[0]} with a string: ask the Architecture"
    for found, own in objects.items():
        if path in (own, LIST) or found not in text:
            continue
        for match in re.finditer(rf"\b{found}\b", text):
            yield f"{line(match.start())}: names {found}, which is for {LIST} alone"


def faults_in(root):
    texts = read_sources(root.resolve())
    names, objects = read_architectures(texts)
    faults = [] if names else ["no architecture found in src/model"]
    listed = texts.get(LIST, "")
    faults += [f"{own}: {found} is not in {LIST}" for found, own in objects.items() if found not in listed]
    for path, text in texts.items():
        faults += faults_of(path, text, names, objects)
    return faults, len(texts), names


GOOD_TREE = {
    "src/model/architecture_list.h": "#define MILLRACE_ARCHITECTURES(ONE) ONE(kLlama)\n",
    "src/model/llama.cpp": """
class Llama final : public Architecture {
  std::string_view name() const override { return "llama"; }
  std::vector<std::string_view> model_types() const override { return {"llama", "mistral"}; }
  bool own(const Gguf& gguf) { return gguf.get_bool("llama.own"); }
};
class LlamaMoe final : public Llama {
  std::string_view name() const override { return "llamamoe"; }
  std::vector<std::string_view> model_types() const override { return {"llama_moe"}; }
};
const Architecture& kLlama = kObject;
""",
    "src/model/architecture.cpp": 'if (a->name() == config.architecture) return *a;  // "llama"\n',
    "src/model/rope.cpp": 'if (type == "llama3") return; /* "llama" */ gguf.get("general.architecture");\n',
    "src/model/config_test.cpp": 'EXPECT_EQ(config.architecture, "llama");\n',
    "src/tokenizer/gguf.cpp": 'if (model == "llama") return;\n',
    "apps/cli/synth.cpp": 'help("millrace synth tiny-llama tiny.gguf");\n',
}
BAD_FILES = {  # file -> (text, a piece of the message that must come)
    "src/model/model.cpp": ('\nif (c.name == "llama") x();\n', 'model.cpp:2: knows "llama", which is src/model/llama.cpp'),
    "src/engine/out.cpp": ('table = {{"mistral", 1}};\n', 'knows "mistral"'),
    "src/engine/second.cpp": ('table = {{"llamamoe", 1}};\n', 'knows "llamamoe"'),
    "src/engine/second_type.cpp": ('table = {{"llama_moe", 1}};\n', 'knows "llama_moe"'),
    "apps/cli/keys.cpp": ('writer.set("llama.block_count", 1);\n', 'knows "llama.block_count"'),
    "apps/cli/plan.cpp": ('if (plan.architecture != "bert") x();\n', "compares architecture"),
    "apps/cli/plan2.cpp": ('if (config.architecture.starts_with("qwen")) x();\n', "compares architecture"),
    "apps/server/info.cpp": ('if ("x" == info.architecture) x();\n', "with a string"),
    "src/chat/format.h": ("if (&a == &kLlama) x();\n", "names kLlama"),
    "src/tokenizer/other.cpp": ('x("mistral");\n', 'knows "mistral"'),
    "src/model/bert.cpp": ('std::string_view name() const override { return "bert"; }\nconst Architecture& kBert = o;\n',
                           "kBert is not in"),
}


def self_test():
    return made_trees.judge(lambda root: faults_in(root)[0], GOOD_TREE, made_trees.of_one_file(BAD_FILES))


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    faults, num_files, names = faults_in(Path(__file__).resolve().parent.parent)
    for fault in faults:
        print(fault)
    print(f"architecture names: {num_files} files, {', '.join(sorted(names))}, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
