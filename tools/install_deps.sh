#!/usr/bin/env bash
# Installs by Debian package name what a group of targets needs, and only what is missing: when everything
# is there it takes no root, no network and a tenth of a second.
#   tools/install_deps.sh build          compiler, CMake, the libraries, pip for the default model
#   tools/install_deps.sh build test     also GoogleTest, clang tools, the cross compiler and qemu
#   tools/install_deps.sh package        what reads the dependencies of a .deb
#   tools/install_deps.sh wheel          what the Python packages are built with, beside PyPI's
#   tools/install_deps.sh npm            npm, for what only that registry carries
# Status 0: all required is there. Status 2: it is not, and the last line says what to install.
# Packages of the group "optional" may be absent: the checks that want them skip and say so.
set -euo pipefail

case "$(uname -m)" in
  x86_64) other=aarch64 ;;
  *) other=x86-64 ;;
esac

packages_of() {
  case "$1" in
    build) echo g++ cmake ninja-build libfmt-dev nlohmann-json3-dev libcli11-dev libtomlplusplus-dev libedit-dev libzstd-dev libboost1.81-dev libssl-dev libcurl4-openssl-dev libpng-dev libjpeg62-turbo-dev python3 python3-pip ca-certificates ;;
    test) echo libgtest-dev clang-format-14 pkg-config ;;
    package) echo dpkg-dev file ;;
    fuzz) echo clang-14 libclang-rt-14-dev ;;
    optional) echo clang-14 libclang-rt-14-dev clang-tidy-14 googletest qemu-user libsimde-dev "g++-$other-linux-gnu" ccache valgrind chromium firefox-esr haproxy python3-venv python3-dev libopenmpi-dev openmpi-bin ;;
    wheel) echo python3-venv python3-dev ;;
    npm) echo npm ;;
    *) echo "tools/install_deps.sh: unknown group '$1', expected build, test, package, wheel, fuzz, optional or npm" >&2; exit 2 ;;
  esac
}

is_installed() {
  # npm and a compiler may come from somewhere else than Debian's archive: the command is what counts.
  case "$1" in
    npm | cmake | ccache | clang-format-14 | clang-tidy-14) command -v "$1" >/dev/null 2>&1 && return 0 ;;
    ninja-build) command -v ninja >/dev/null 2>&1 && return 0 ;;
  esac
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

missing_of() {
  local package
  for package in $(packages_of "$1"); do
    is_installed "$package" || echo "$package"
  done
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

updated=no
install() { # install PACKAGE...: from the archive, refreshing its index once per run
  local options=(-y -qq --no-install-recommends -o Dpkg::Use-Pty=0 -o Acquire::Retries=3)
  if [ "$updated" = no ]; then
    as_root apt-get update -qq || echo "apt-get update failed: trying with the package lists at hand" >&2
    updated=yes
  fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "$@" >/dev/null
}

[ $# -gt 0 ] || set -- build
for group in "$@"; do
  missing=$(missing_of "$group" | tr '\n' ' ')
  [ -n "$missing" ] || continue
  if ! command -v apt-get >/dev/null 2>&1; then
    reason="this is not a Debian system"
  elif [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null 2>&1; then
    reason="not root, and there is no sudo"
  else
    echo "Installing: $missing" >&2
    # shellcheck disable=SC2086  # a list of package names
    install $missing || true
    missing=$(missing_of "$group" | tr '\n' ' ')
    [ -n "$missing" ] || continue
    reason="apt-get could not install them"
  fi
  if [ "$group" = optional ]; then
    echo "SKIPPED: optional packages ($missing) because $reason; to have every check: apt-get install $missing" >&2
  else
    echo "missing packages and $reason; install them and try again: apt-get install $missing" >&2
    exit 2
  fi
done
