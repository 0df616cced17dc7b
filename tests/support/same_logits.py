"""Compare logits of packed programs on two processors: `python -m support.same_logits FOLDER`, in tests/.

FOLDER holds what `support.packed_programs` wrote, and beside each program N.tarnn the logits that threads_alone.cpp wrote on
either: N.tarnn.here and N.tarnn.there.
"""

import math
import sys
from array import array
from pathlib import Path

from tarnn.kernels.cpu.products import FORMATS

# of the largest logit. Vectors of another length add in another order; in int8 and int4 that can move an activation by a level
LIMITS = {"float32": 2e-5, "bfloat16": 2e-5, "int8": 0.05, "int4": 0.05}


def logits(file: Path) -> array:
    return array("f", file.read_bytes())


def main(folder: str) -> None:
    worst = dict.fromkeys(FORMATS, 0.0)
    for i, file in enumerate(sorted(Path(folder).glob("*.tarnn"), key=lambda x: int(x.stem))):
        here, there = (logits(file.with_suffix(f".tarnn.{where}")) for where in ("here", "there"))
        assert len(here) == len(there) > 0
        largest = max(map(abs, here))
        difference = max(abs(x - y) if math.isfinite(y) else math.inf for x, y in zip(here, there, strict=True))
        kind = FORMATS[i % len(FORMATS)]
        worst[kind] = max(worst[kind], difference / largest)
    print("logits differ by", ", ".join(f"{x:.0e} ({kind})" for kind, x in worst.items()))
    assert all(worst[kind] <= LIMITS[kind] for kind in FORMATS), f"more than {LIMITS}"


if __name__ == "__main__":
    main(*sys.argv[1:])
