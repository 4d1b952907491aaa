#!/usr/bin/env bash
# Proves that a fresh clone works on a bare machine: a Debian 12 with nothing but git and make in a chroot, the
# last commit cloned into it, and the two commands (or those given) run there.
#   sudo tools/fresh_clone.sh [FOLDER [MAKE_TARGET...]]      FOLDER defaults to a new one under /var/tmp
# Needs root and the package debootstrap. FOLDER/bare is kept and copied for each run, so that the second run is
# quicker. PREPARE=script is run with the chroot's path before anything else: what a machine behind a proxy needs
# (certificates, pip and npm settings) goes there and not into the repository.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d /var/tmp/fresh-clone.XXXXXX)}
shift || true
[ $# -gt 0 ] || set -- run test
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
  echo "tools/fresh_clone.sh needs root and debootstrap: apt-get install debootstrap" >&2
  exit 2
fi

mkdir -p "$folder"
if [ ! -f "$folder/bare/.complete" ]; then
  rm -rf "$folder/bare"
  debootstrap --variant=minbase --include=git,make bookworm "$folder/bare"
  touch "$folder/bare/.complete"
fi
machine=$(mktemp -d "$folder/machine.XXXXXX")
cp -a "$folder/bare/." "$machine"
cp -L /etc/resolv.conf "$machine/etc/resolv.conf"
printf '127.0.0.1 localhost\n::1 localhost\n' >"$machine/etc/hosts"  # Debian's installer writes it, debootstrap does not
[ -z "${PREPARE:-}" ] || "$PREPARE" "$machine"

# Devices of its own, none of the host's: whoever removes the folder while it is mounted removes nothing else.
mount -t proc proc "$machine/proc"
mount -t tmpfs -o mode=755 tmpfs "$machine/dev"
trap 'umount -R "$machine/dev" "$machine/proc"' EXIT
mkdir "$machine/dev/pts" "$machine/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$machine/dev/pts"
mount -t tmpfs tmpfs "$machine/dev/shm"
ln -s pts/ptmx "$machine/dev/ptmx"
ln -s /proc/self/fd "$machine/dev/fd"
device() { mknod -m 666 "$machine/dev/$1" c "$2" "$3"; }  # NAME MAJOR MINOR
device null 1 3
device zero 1 5
device full 1 7
device random 1 8
device urandom 1 9
device tty 5 0
git clone --quiet --no-local "$root" "$machine/root/millrace"

status=0
for target in "$@"; do
  start=$SECONDS
  chroot "$machine" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
    make -C /root/millrace "$target" && result=passed || { result=FAILED; status=1; }
  echo "fresh clone: make $target $result in $((SECONDS - start)) s ($machine)"
done
exit $status
