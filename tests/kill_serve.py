"""Kill `tarnn serve` with SIGKILL under load, start it again, and look whether all is there.

    python tests/kill_serve.py --rounds 20 [--run FOLDER] [--seed 1]

Without --run, a small model with random weights. Exits with an AssertionError if a state is lost or changed.
"""

import argparse
import tempfile
from pathlib import Path

from support.kill_serve import kill_under_load
from support.served import save_served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = options.run or Path(folder) / "run"
        if options.run is None:
            save_served(run, "linear")
        count = kill_under_load(run, Path(folder) / "states", options.rounds, options.seed, print)
    print(f"killed {options.rounds} times: {count} states, none lost, none changed")


if __name__ == "__main__":
    main()
