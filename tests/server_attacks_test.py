"""What the largest requests may cost the server and everybody else (server/budget.py).

    tests/server_attacks_test.py PATH/TO/millrace [unittest options]
"""

import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "server"))
import shared  # noqa: E402
from budget import Budget  # noqa: E402, F401

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: server_attacks_test.py PATH/TO/millrace [unittest options]")
    shared.BINARY = os.path.abspath(sys.argv[1])
    unittest.main(argv=sys.argv[1:], verbosity=2)
