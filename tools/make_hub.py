#!/usr/bin/env python3
"""`make hub`: the millrace-kernels wheel laid out for Hugging Face's `kernels` package.

  tools/make_hub.py WHEEL OUT

OUT becomes a repository of the hub: build.toml, build/<variant>/ with the package in it. The variant names torch's
stable ABI: one for every torch from 2.10 on. `kernels.get_local_kernel(Path(OUT))` loads it.
"""

import json
import platform
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "millrace_kernels/"
# What a hub kernel offers at its top: torch's functions, for there is no `import millrace_kernels.torch` there.
TOP = "\nfrom .torch import *  # noqa: E402,F401,F403\n"


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    wheel, out = Path(sys.argv[1]), Path(sys.argv[2])
    if not wheel.is_file():
        sys.exit(f"{wheel} is not there: make wheel-kernels builds it")
    variant = f"torch-stable-abi210-cpu-{platform.machine()}-linux"
    to = out / "build" / variant
    shutil.rmtree(out, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            left_out = name.endswith(("/", "/jax.py", "/jax.pyi", "libmillrace_jax.so")) or "/include/" in name
            if not name.startswith(PACKAGE) or left_out:  # "/": auditwheel's archives name folders
                continue
            path = to / name.removeprefix(PACKAGE)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))
    top = to / "__init__.py"
    top.write_text(top.read_text() + TOP)
    metadata = {"id": "millrace_kernels", "name": "millrace-kernels", "version": 1, "license": "see LICENSE",
                "backend": {"type": "cpu"}, "python-depends": []}
    (to / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "python" / "kernels" / "build.toml", out / "build.toml")
    shutil.copy(ROOT / "python" / "kernels" / "README.md", out / "README.md")
    print(to)


if __name__ == "__main__":
    main()
