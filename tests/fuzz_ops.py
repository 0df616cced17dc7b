"""Drawn calls of an op against its definition, by whatever computes them here.

    python tests/fuzz_ops.py hybrid --calls 10000 --out benchmarks/results/fuzz_hybrid.json
    python tests/fuzz_ops.py "diagonal scan" --first 4711 --calls 1

Prints the worst, and exits with 1 where one errs more than its definition in its own precision explains.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from support.drawn_calls import OPS, drawn, excess
from tqdm import tqdm

from tarnn.cli.machine import machine_facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--unjudged", action="store_true", help="only compute them: sanitizers do the judging")
    parser.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what isn't written shows
    numbers = tqdm(range(options.first, options.first + options.calls), disable=None)
    if options.unjudged:
        for number in numbers:
            call = drawn(options.op, number).leaves()
            call.numbers(call.run())
        return 0
    found = {number: excess(options.op, number) for number in numbers}
    worst = max(found, key=lambda number: found[number])
    over = {number: of_limit for number, of_limit in found.items() if of_limit > 1}
    print(f"{options.calls} calls, {len(over)} over their limit; the worst, {worst}: {found[worst]:.2f} of what may be")
    if options.out is not None:
        facts = {
            "calls": options.calls,
            "first": options.first,
            "over_their_limit": over,
            "largest_share": found[worst],
        }
        command = f"python tests/fuzz_ops.py {' '.join(sys.argv[1:])}"
        options.out.write_text(json.dumps({"command": command, "machine": machine_facts(), **facts}, indent=1) + "\n")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
