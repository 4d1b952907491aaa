"""For tests that are one run of other programs: the first that fails, or the first wrong thing seen, ends the test."""

import subprocess
import sys


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def expect(good, message):
    if not good:
        sys.exit(message)
