"""Measure all pages of results/ anew, one script after the other, and go on where that was stopped.

    python benchmarks/all.py                         # about fifty minutes on two quiet cores; --list says what each took
    python benchmarks/all.py step decode             # these pages alone
    python benchmarks/all.py --python ENVIRONMENT/bin/python         # and decode_baselines, by the packages that lie there

Each script leaves its page as soon as it is done. A run that was stopped (Ctrl-C) skips what it had done, and goes on within
`attention` and `favor`; --anew begins again. A script that fails is named at the end, and the others run all the same.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
DONE = ROOT / "runs" / "benchmarks" / "all.json"
NO_PAGES = ("all",)
# short ones: they say whether the machine is quiet
FIRST = ("step", "encoder_step", "generate", "fused_step", "decode")
LAST = ("favor", "optimal_attention", "training_step", "attention")


def in_order(names: Iterable[str]) -> list[str]:
    """The first ones, those that have no place of their own, and the last ones."""
    there = {x for x in names if x not in NO_PAGES}
    between = sorted(there - {*FIRST, *LAST})
    return [x for x in (*FIRST, *between, *LAST) if x in there]


PAGES = in_order(x.stem for x in HERE.glob("*.py"))
RESUMES = ("attention", "favor", "serve")  # go on within a page
NEEDS_PYTHON = "decode_baselines"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help=f"of {', '.join(PAGES)}; by default all")
    parser.add_argument("--list", action="store_true", help="the pages, and minutes that each took last")
    parser.add_argument("--anew", action="store_true", help="also what an earlier run had done")
    parser.add_argument("--quick", action="store_true", help="small and short, into runs/benchmarks")
    parser.add_argument("--python", type=Path, help=f"for {NEEDS_PYTHON}; without, that page stays as it is")
    options = parser.parse_args()
    if unknown := set(options.pages) - {*PAGES}:
        parser.error(f"no page is called {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}.")
    pages = [x for x in PAGES if x in (options.pages or PAGES)]
    if options.list:
        print("\n".join(f"{x:20}{minutes(x)}" for x in pages))
        return 0
    if not options.python and NEEDS_PYTHON in pages:
        pages.remove(NEEDS_PYTHON)
        print(f"without {NEEDS_PYTHON}: it needs --python")
    return measure(pages, options)


def measure(pages: list[str], options: Any) -> int:
    """Run the scripts that are not done yet: 1 if one of them failed."""
    record: dict[str, str] = json.loads(DONE.read_text()) if DONE.exists() and not options.anew else {}
    for at, page in enumerate(pages, 1):
        if record.get(page) == "done":
            print(f"{page} is done already; --anew measures it again")
            continue
        words = ["--quick"] if options.quick else ["--resume"] * (page in RESUMES and page in record)
        takes_python = options.python and page in (NEEDS_PYTHON, "delta", "serve")
        words += ["--python", str(options.python)] if takes_python else []
        note(record, page, "begun")
        print(f"\n=== {at} of {len(pages)}: {page}, {minutes(page)}", flush=True)
        began = time.perf_counter()
        code = call(page, words)
        note(record, page, "failed" if code else "done")
        print(f"=== {page}: {record[page]} after {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)
    if failed := [x for x in pages if record.get(x) != "done"]:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    DONE.unlink(missing_ok=True)
    return 0


def call(page: str, words: list[str]) -> int:
    return subprocess.run([sys.executable, str(HERE / f"{page}.py"), *words], cwd=ROOT).returncode


def note(record: dict[str, str], page: str, state: str) -> None:
    record[page] = state
    DONE.parent.mkdir(parents=True, exist_ok=True)
    DONE.write_text(json.dumps(record))


def minutes(page: str) -> str:
    """What the page's last full run took, as its results say."""
    file = HERE / "results" / f"{page}.json"
    took = json.loads(file.read_text()).get("minutes") if file.exists() else None
    return f"{took} minutes last time" if took else "never timed"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
