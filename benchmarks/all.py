"""Measure all pages of results/ anew, one script after the other.

    python benchmarks/all.py                         # about fifty minutes on two quiet cores
    python benchmarks/all.py step decode             # these pages alone
    python benchmarks/all.py --python ENVIRONMENT/bin/python         # and decode_baselines, by the packages that lie there

Each script leaves its page as soon as it is done. A script that fails is named at the end, and the others run all the same.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FIRST = (
    "step",
    "encoder_step",
    "generate",
    "fused_step",
    "decode",
)  # short ones: they say whether the machine is quiet
LAST = ("favor", "optimal_attention", "training_step", "attention")
TAKE_PYTHON = ("decode_baselines", "delta", "serve")
OTHERS = {x.stem for x in HERE.glob("*.py")} - {"all", *FIRST, *LAST}
PAGES = (*FIRST, *sorted(OTHERS), *LAST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help=f"of {', '.join(PAGES)}; by default all")
    parser.add_argument("--quick", action="store_true", help="small and short, into runs/benchmarks")
    parser.add_argument("--python", type=Path, help="of the other packages; without it decode_baselines stays as it is")
    options = parser.parse_args()
    if unknown := set(options.pages) - {*PAGES}:
        parser.error(f"no page is called {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}.")
    pages = [x for x in PAGES if x in (options.pages or PAGES)]
    if not options.python and "decode_baselines" in pages:
        pages.remove("decode_baselines")
        print("without decode_baselines: it needs --python")
    failed = []
    for page in pages:
        words = ["--quick"] * options.quick
        words += ["--python", str(options.python)] if options.python and page in TAKE_PYTHON else []
        print(f"\n=== {page}", flush=True)
        if call(page, words):
            failed.append(page)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def call(page: str, words: list[str]) -> int:
    return subprocess.run([sys.executable, str(HERE / f"{page}.py"), *words], cwd=HERE.parent).returncode


if __name__ == "__main__":
    sys.exit(main())
