#!/bin/bash
# Three hosts on one machine, for front_test.py: namespaces.sh COMMAND... runs it in a network of its own, 10.77.0.254,
# with node1 to node3 (10.77.0.1 to 3) behind a bridge whose ports are port1 to port3. Called by mpirun in ssh's place
# (as namespaces.sh ssh HOST COMMAND...) it runs a command on one of them. Needs root.
set -euo pipefail
if [[ $1 == ssh ]]; then
  host=$2
  shift 2
  ip -n "$host" link show eth0 | grep -q "state UP" || { echo "$host: no route to host" >&2; exit 255; }
  exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
fi
if [[ $1 != inside ]]; then
  exec unshare --net --mount "$0" inside "$@"
fi
shift
mkdir -p /run/netns
mount -t tmpfs none /run/netns # names of ours alone
ip link set lo up
ip link add br0 type bridge
ip address add 10.77.0.254/24 dev br0
ip link set br0 up
for i in 1 2 3; do
  ip netns add "node$i"
  ip link add "port$i" type veth peer name eth0 netns "node$i"
  ip link set "port$i" master br0 up
  ip -n "node$i" address add "10.77.0.$i/24" dev eth0
  ip -n "node$i" link set eth0 up
  ip -n "node$i" link set lo up
done
exec "$@"
