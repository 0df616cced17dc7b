"""Docstrings as reStructuredText: paragraphs, arguments as a list, indented formulas as they stand."""

import re

ARGUMENT = re.compile(r"(?P<names>[*\w]+(?:(?:, | and )[*\w]+)*): (?P<text>.*)")


def as_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring for Sphinx. A paragraph that is indented is a formula or an example."""
    out: list[str] = []
    inside = False  # below "Args:" or the like, where indented lines are text
    for block in blocks(lines):
        head = indent(block[0])
        if block[0].strip().startswith(">>>"):
            out += [*(line[head:] for line in block), ""]
            continue
        if re.fullmatch(r"\w+:", block[0].strip()):
            inside, out = True, [*out, f"**{block[0].strip()[:-1]}**", ""]
            block = block[1:]
        elif head == 0:
            inside = False
        if block and (inside or indent(block[0]) == 0):
            out += items(block)
        elif block:
            out += literal(block)
    return out


def blocks(lines: list[str]) -> list[list[str]]:
    """Split at empty lines."""
    text = "\n".join(line.rstrip() for line in lines).strip("\n")
    return [block.split("\n") for block in re.split(r"\n{2,}", text) if block]


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def literal(block: list[str]) -> list[str]:
    return ["::", "", *(f"    {line}" for line in block), ""]


def items(block: list[str]) -> list[str]:
    """Write a paragraph. Lines with a hanging indent are items of a list; lines that are indented further are formulas."""
    base = indent(block[0])
    hanging = any(indent(line) > base for line in block) or all(ARGUMENT.match(line.strip()) for line in block)
    if not hanging:
        return [*(escaped(line.strip()) for line in block), ""]
    out: list[str] = []
    for line in block:
        deeper, text = indent(line) - base, line.strip()
        if deeper == 0:
            found = ARGUMENT.fullmatch(text)
            text = f"``{found['names']}``: {escaped(found['text'])}" if found else escaped(text)
            out += (
                ["", f"- {text}"] if found or text.startswith("- ") or not out or out[-1].startswith("  ") else [text]
            )
        elif deeper > 4 and formula(text):
            out += ["", "  ::", "", f"      {text}", ""]
        else:
            out.append(f"  {escaped(text)}")
    return [*out, ""]


def formula(text: str) -> bool:
    return bool(re.search(r"[=←] |Σ", text)) and not text.endswith((".", ","))


def escaped(text: str) -> str:
    """Names between backticks are code; all else is text."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick that is alone, or code that goes on in the next line
        return re.sub(r"([\\*|_`])", r"\\\1", text)
    return "".join(
        f"\\ ``{part}``\\ " if i % 2 and part else re.sub(r"([\\*|_])", r"\\\1", part) for i, part in enumerate(parts)
    )
