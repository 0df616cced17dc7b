"""Check pages in Markdown, and the site that is made of them: links, anchors, alt texts, weight, the API.

python scripts/site/check.py build/site build/docs
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

HEAVIEST = 300_000  # bytes of a page with its pictures
FENCE = re.compile(r"^(?P<marks>`{3,}|~{3,}).*?^(?P=marks)`*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(r"<img\b[^>]*>")


def slug(title: str) -> str:
    """Return the anchor of a heading, as code forges make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def without_code(text: str) -> str:
    """Blank out fences and code between backticks; lines stay where they are."""

    def blank(found: re.Match) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", blank, FENCE.sub(blank, text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings, numbered where one stands twice."""
    counts: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text), re.MULTILINE):
        name = slug(title)
        names.add(f"{name}-{counts[name]}" if name in counts else name)
        counts[name] = counts.get(name, 0) + 1
    return names


def links(text: str) -> Iterator[tuple[int, re.Match]]:
    """Yield the line and the match of each link and picture."""
    shown = without_code(text)
    for found in LINK.finditer(text):
        if shown[found.start()] in "![":  # not within code
            yield text[: found.start()].count("\n") + 1, found


def check_page(page: Path, root: Path) -> list[str]:
    """Check the links, anchors and alt texts of one page below root; return a sentence for each fault."""
    text, faults = page.read_text(encoding="utf-8"), []
    for line, found in links(text):
        place = f"{page.relative_to(root)}:{line}"
        if found["picture"] and not found["text"].strip():
            faults.append(f"{place}: the picture {found['target']} has no alternative text.")
        if re.match(r"\w+:", found["target"]):
            continue  # another site: nothing is fetched
        path, _, anchor = unquote(found["target"]).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(root.resolve()):
            faults.append(f"{place}: there is no {path}.")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            faults.append(f"{place}: {path or page.name} has no heading #{anchor}.")
    for found in PICTURE.finditer(without_code(text)):
        if not re.search(r'\balt="[^"]', found[0]):
            line = text[: found.start()].count("\n") + 1
            faults.append(f"{page.relative_to(root)}:{line}: a picture has no alternative text.")
    return faults


def check_listed(index: Path, guides: Iterable[str]) -> list[str]:
    """Look whether each guide has a place in the contents, which are the tables in the index."""
    text = index.read_text(encoding="utf-8")
    return [
        f"{index.name}:1: {name} stands in no table of contents."
        for name in guides
        if not re.search(rf"\b{name}>?$", text, re.M)
    ]


def check_weight(page: Path, root: Path) -> list[str]:
    """Compare a page of HTML, with the pictures that it shows, with the most that it may weigh."""
    text = page.read_text(encoding="utf-8")
    pictures = {(page.parent / unquote(x)).resolve() for x in re.findall(r'<img[^>]*\ssrc="([^":]+)"', text)}
    weight = page.stat().st_size + sum(picture.stat().st_size for picture in pictures if picture.exists())
    if weight <= HEAVIEST:
        return []
    heavy = f"{weight:,} bytes with its pictures, of {HEAVIEST:,}"
    return [f"{page.relative_to(root)}:1: {heavy}. Split the page, or show fewer pictures."]


def check_api(names: Iterable[str], documented: Iterable[str], source: Path) -> list[str]:
    """Look whether each public name is documented; source: the file that makes it public."""
    lines = source.read_text(encoding="utf-8").splitlines()

    def line_of(name: str) -> int:
        return next((i for i, line in enumerate(lines, 1) if re.search(rf"as {name}\b", line)), 1)

    missing = sorted(set(names) - set(documented))
    return [f"{source.name}:{line_of(name)}: {name} is public, and not in the reference." for name in missing]


def check(pages: Path, site: Path | None = None) -> list[str]:
    """Check all pages below a folder, and of the site what it weighs."""
    faults = [fault for page in sorted(pages.rglob("*.md")) for fault in check_page(page, pages)]
    html = sorted(site.rglob("*.html")) if site else []
    return faults + [fault for page in html for fault in check_weight(page, site or page)]


if __name__ == "__main__":
    found = check(*map(Path, sys.argv[1:3]))
    print("\n".join(found) or "links, anchors, alternative texts and weights are right")
    sys.exit(bool(found))
