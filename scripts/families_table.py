"""The table of model families whose attention tarnn can take over, in docs/families.md, from what the tests run.

python scripts/families_table.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "families.md"
KINDS = {
    "decoder": "decoder of text",
    "encoder": "encoder of text",
    "vision": "encoder of images",
    "speech": "encoder of sound",
    "sequences": "encoder and decoder of text",
    "sequences of sound": "encoder of sound, decoder of text",
}
REASONS = {
    "position_bias": "adds a bias by position to the products",
    "mask of shape": "hands its bias by position as a mask",
}


def page() -> str:
    """The whole page."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.families import FAMILIES, REFUSED, inputs_of, model_of

    rows = []
    for name, family in sorted(FAMILIES.items(), key=lambda x: (list(KINDS).index(x[1].kind), x[0])):
        padded = [side for side in inputs_of(family.kind) if side != "whole"]
        cache = "yes" if family.kind == "decoder" else "–"
        rows.append(
            f"| {name} | `{type(model_of(family)).__name__}` | {KINDS[family.kind]} | {', '.join(padded) or '–'} | {cache} |"
        )
    refused = [f"| {name} | it {REASONS[words]} |" for name, (_, words) in REFUSED.items()]
    return f"""# Model families that take part

Made by `scripts/families_table.py` from what `tests/conversion` runs: a tiny model with random weights of each family, whose
outputs with a window as long as the input equal those of torch's own attention, and change when the window is short.
`padding` says on which sides it was tried. `constant cache`: whether `constant_cache(model)` generates with it.
Cross-attention and a model's own sliding-window layers stay as they are.

| family | class | kind | padding | constant cache |
|---|---|---|---|---|
{chr(10).join(rows)}

Refused by name when they are run:

| family | why |
|---|---|
{chr(10).join(refused)}
"""


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
    print(TARGET)
