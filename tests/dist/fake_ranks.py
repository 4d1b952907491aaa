"""Stands in for mpirun and its ranks, for front_test.py: one process that says what ranks would say, and then does
what ranks should not.

    fake_ranks.py FILE [words that mpirun gets ...] --front HOST:PORT ...

FILE holds a JSON object: "claims", what every rank says it has (but for the number of ranks, which is the launcher's
where "any_number" is set); "key", another one than the right one; "block_bytes" of the KV cache; "strangers", how many
connect first and say nothing; "loads", and it never has; "dies", at which message ("make" or "step"), of so many ranks.
A step is never answered: from then on every beat says that its rank waits for another.
"""

import json
import os
import socket
import struct
import sys
import time

MESSAGE = struct.Struct("@iiiiQ")  # RankMessage
BEAT = struct.Struct("@dQQQ16Q16Q16d16d")
MAKE_EXECUTOR, STEP, READ_BLOCK = 1, 2, 6  # of RankMessage::Kind


def read(connection, count):
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


def main():
    plan = json.loads(open(sys.argv[1]).read())
    words = sys.argv[2:]
    ranks = int(words[words.index("-n") + 1])
    host, port = words[words.index("--front") + 1].rsplit(":", 1)
    key = plan.get("key", os.environ["MILLRACE_RANK_KEY"])
    claims = dict(plan["claims"])
    if plan.get("any_number"):
        claims["--tensor-parallel"] = str(ranks)
    strangers = [socket.create_connection((host, int(port))) for _ in range(plan.get("strangers", 0))]
    dies_at, dies_of = plan.get("dies", ("never", 0))

    def join(rank, data=False):
        connection = socket.create_connection((host, int(port)))
        hello = {"key": key, "host": "nowhere", "rank": rank, "ranks": ranks, "pid": 1000 + rank, "data": data,
                 "claims": list(claims.items())}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            piece = connection.recv(1)  # what follows the line is a message
            if not piece:
                sys.exit(3)
            answer += piece
        if answer != b"\n":
            sys.exit(4)
        return connection

    beats = [join(rank) for rank in range(ranks)]
    orders = join(0, data=True)
    for stranger in strangers:
        stranger.close()
    orders.settimeout(0.2)
    began = None  # of the step that nobody finishes

    def beat():
        waited = 0.0 if began is None else time.monotonic() - began
        for connection in beats:
            connection.sendall(BEAT.pack(waited, 0, 0, 0, *[0] * 64))

    while True:
        beat()
        try:
            first = orders.recv(1)
        except TimeoutError:
            continue
        if not first:
            return
        orders.settimeout(5)
        kind, _, _, _, count = MESSAGE.unpack(first + read(orders, MESSAGE.size - 1))
        read(orders, count)
        if ranks == dies_of and kind == {"make": MAKE_EXECUTOR, "step": STEP}.get(dies_at):
            sys.exit(5)
        if kind == MAKE_EXECUTOR and not plan.get("loads"):
            orders.sendall(b"\x01")
        elif kind == READ_BLOCK:
            orders.sendall(bytes(plan["block_bytes"]))
        elif kind == STEP:
            began = time.monotonic()
        orders.settimeout(0.2)


if __name__ == "__main__":
    main()
