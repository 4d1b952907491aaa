#!/usr/bin/env python3
"""Makes the .deb of a build, as `make package` does but uncompressed, and looks at it without installing it.

  tests/package_test.py BUILD    BUILD: a build folder; status 77: not on Debian, or dpkg-dev is not there

Every library that a program or library of it needs belongs to a package that it depends on, or to itself; nothing is
looked for in the folders of the build; the program starts; the man page, the completions and the call of ldconfig are
there; no text of it names the build.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from programs import expect, run

SKIPPED = 77
TOOLS = ("cpack", "dpkg-deb", "dpkg-shlibdeps", "dpkg-query", "readelf", "ldconfig")
SEARCH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
FILES = ("usr/bin/millrace", "usr/share/man/man1/millrace.1", "usr/share/bash-completion/completions/millrace",
         "usr/share/zsh/vendor-completions/_millrace", "usr/share/fish/vendor_completions.d/millrace.fish",
         "usr/share/doc/millrace/LICENSE", "usr/include/millrace/engine.h", "usr/include/millrace/kernels.h")


def installed_libraries():
    """SONAME -> the file that the loader takes."""
    listing = run(shutil.which("ldconfig", path=SEARCH), "-p")
    found = {}
    for name, path in re.findall(r"^\s+(\S+) \([^)]*\) => (\S+)$", listing, re.MULTILINE):
        found.setdefault(name, path)
    return found


def owner_of(path):
    """The Debian package of a file, which may be recorded without the /usr that /lib leads to."""
    real = os.path.realpath(path)
    for name in dict.fromkeys((path, real, path.removeprefix("/usr"), real.removeprefix("/usr"))):
        done = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.split(":")[0]
    return None


def dynamic(path):
    """(libraries needed, folders they are looked for in) of an ELF file."""
    text = run("readelf", "-d", path)
    return re.findall(r"\(NEEDED\).*\[(.*)\]", text), re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text)


def check_libraries(root, depends):
    own = {path.name for path in root.rglob("*.so*")}
    installed = installed_libraries()
    binaries = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()
                and path.read_bytes()[:4] == b"\x7fELF"]
    expect(len(binaries) >= 3, f"found {len(binaries)} programs and libraries, expected the program and two libraries")
    for path in binaries:
        needed, folders = dynamic(path)
        expect(not folders, f"{path.name} looks for libraries in {folders}, expected the system's folders alone")
        for name in needed:
            if name in own or name.startswith("ld-linux"):
                continue
            expect(name in installed, f"{path.name} needs {name}, which is not installed here")
            package = owner_of(installed[name])
            expect(package in depends, f"{path.name} needs {name} of {package}, the package depends on {sorted(depends)}")
    return len(binaries)


def main():
    build = Path(sys.argv[1]).resolve()
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SEARCH) is None]
    if missing:
        print(f"SKIPPED: the package because {missing[0]} is not installed; install it: apt-get install dpkg-dev file")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        made, root, control = Path(folder) / "made", Path(folder) / "root", Path(folder) / "control"
        run("cpack", "-G", "DEB", "--config", build / "CPackConfig.cmake", "-B", made, "-D", f"CPACK_PACKAGE_DIRECTORY={made}",
            "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=none", cwd=folder)
        packages = list(made.glob("*.deb"))
        expect(len(packages) == 1, f"cpack made {[path.name for path in packages]}, expected one .deb")
        run("dpkg-deb", "-x", packages[0], root)
        run("dpkg-deb", "-e", packages[0], control)
        fields = dict(re.findall(r"^ ?([\w-]+): (.*)$", run("dpkg-deb", "-f", packages[0]), re.MULTILINE))
        version = run(root / "usr/bin/millrace", "--version").split()[-1]
        expect(fields["Version"] == version, f"the package is of {fields['Version']}, the program says {version}")
        depends = {choice.split()[0] for part in fields.get("Depends", "").split(",") if part for choice in part.split("|")}
        num_binaries = check_libraries(root, depends)
        for name in FILES:
            expect((root / name).is_file(), f"{name} is not in the package")
        scripts = "".join(path.read_text() for path in control.iterdir() if path.name in ("postinst", "triggers"))
        expect("ldconfig" in scripts, "nothing runs ldconfig when the package is installed")
        for path in root.rglob("*"):
            if path.suffix in (".pc", ".cmake", ".1"):
                expect(str(build) not in path.read_text(), f"{path.relative_to(root)} names {build}")
        print(f"package: {num_binaries} programs and libraries, {len(depends)} packages depended on, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
