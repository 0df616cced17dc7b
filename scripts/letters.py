"""Write csrc/runtime/letters.h: which characters are letters, digits and spaces to the tokenizers library that is installed.

python scripts/letters.py
"""

from importlib.metadata import version
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

HEADER = Path(__file__).parents[1] / "csrc/runtime/letters.h"
WIDTH = 150
BEGIN = f"""// Which characters are letters, digits and spaces (\\p{{L}}, \\p{{N}}, \\s), written by scripts/letters.py.
// From tokenizers {version("tokenizers")}.
#pragma once

#include <cstdint>

namespace tarnn::runtime {{

// Of each class, in turn: how many characters in a row are not in it, and how many are.
"""
END = """}  // namespace tarnn::runtime
"""


def runs_of(is_member) -> list[int]:
    """Return how many characters in a row are not in a class, how many are, and so on."""
    runs, before = [0], False
    for character in map(chr, range(0x110000)):
        member = not 0xD800 <= ord(character) < 0xE000 and is_member(character)
        if member != before:
            runs.append(0)
        runs[-1] += 1
        before = member
    return runs[: len(runs) // 2 * 2]


def main() -> None:
    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    classes = {
        "letters": lambda x: len(split("a" + x)) == 1,
        "digits": lambda x: len(split("1" + x)) == 1,
        "spaces": lambda x: len(split("\t" + x)) == 1,
    }
    text = BEGIN
    for name, is_member in classes.items():
        line = f"inline constexpr std::uint16_t {name}[] = {{"
        for number in map(str, runs_of(is_member)):
            if len(line) + len(number) > WIDTH:
                text, line = text + line + "\n", "    "
            line += number + ","
        text += line.removesuffix(",") + "};\n\n"
    HEADER.write_text(text + END)


if __name__ == "__main__":
    main()
