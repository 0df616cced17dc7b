"""Say which symbols a compiled library needs from others: of torch those of its stable C interface, of the system versioned ones.

python scripts/wheels/symbols.py LIBRARY…    exit code 1 where a library needs anything else
"""

import re
import subprocess
import sys
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
ANYWHERE = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize", "__gmon_start__"}  # weak


def of_torch() -> set[str]:
    """Return the functions of torch that csrc/torch.h declares; tests/kernels/test_torch_interface.py holds them to 2.10."""
    return set(re.findall(r"^  X\((\w+),", (CSRC / "torch.h").read_text(), re.MULTILINE))


def needed(library: Path) -> set[str]:
    """Return the undefined symbols of a library (ELF), with their versions where they have one."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listed.stdout.splitlines()}


def foreign(library: Path) -> set[str]:
    """Return what a library needs beyond torch's stable interface and versioned symbols of glibc, libstdc++ and libgcc."""
    versioned = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+$")
    return {name for name in needed(library) - of_torch() - ANYWHERE if not versioned.search(name)}


def main() -> None:
    libraries = [Path(name) for name in sys.argv[1:]]
    wrong = {library: sorted(foreign(library)) for library in libraries}
    for library, names in wrong.items():
        print(f"{library}: {', '.join(names) if names else 'torch by its stable C interface alone'}")
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    main()
