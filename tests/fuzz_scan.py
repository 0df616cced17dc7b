"""Drawn calls of both scans against their definition, by whatever computes them here.

    python tests/fuzz_scan.py --calls 3000 --first 0

Prints the worst, and exits with 1 where one errs more than twice the definition in its own precision does.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from support.scan_calls import excess


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    options = parser.parse_args()
    found = {number: excess(number) for number in range(options.first, options.first + options.calls)}
    worst = max(found, key=lambda number: found[number])
    print(f"{options.calls} calls; the worst, {worst}: {found[worst]:.2f} of what may be")
    return int(found[worst] > 1)


if __name__ == "__main__":
    sys.exit(main())
