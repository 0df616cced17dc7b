"""For readers that are programs: a .md beside each page, llms.txt (what there is) and llms-full.txt (guides and reference)."""

import json
import re
from pathlib import Path

from scripts.site.check import FENCE

ENTRY = re.compile(r"^(?:(?P<title>[^<\n]+) <)?(?P<page>[\w./-]+)>?$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(?P<options>(?::[^\n]*\n)*)(?P<body>.*?)^```\n?", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^```\{eval-rst\}\n\.\. auto\w+:: (?P<name>[\w.]+)\n.*?^```\n", re.MULTILINE | re.DOTALL)


def write_copies(pages: Path, site: Path, api: dict[str, dict[str, str]]) -> None:
    """Write the copies into the site. api: name → signature and text, as autodoc found them."""
    for page in sorted(pages.rglob("*.md")):
        target = site / page.relative_to(pages)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = DIRECTIVE.sub(lambda found: entry(found["name"], api), page.read_text(encoding="utf-8"))
        target.write_text(TOCTREE.sub(listed, text), encoding="utf-8")
    index = (site / "index.md").read_text(encoding="utf-8")
    (site / "llms.txt").write_text(contents(index, site), encoding="utf-8")
    names = re.findall(r"\(((?:README|docs/[\w-]+|reference/[\w./-]+)\.md)\)", index)
    whole = [f"<!-- {name} -->\n\n{(site / name).read_text(encoding='utf-8')}" for name in dict.fromkeys(names)]
    (site / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")


def entry(name: str, api: dict[str, dict[str, str]]) -> str:
    """Write a function, or a class with its methods, as text."""
    parts = []
    for key in [name, *(x for x in api if x.startswith(f"{name}."))]:
        made = api.get(key, {})
        if key == name or made.get("text"):
            parts.append(
                f"```python\n{key}{made.get('signature', '')}\n```\n\n```text\n{made.get('text', '').strip()}\n```\n"
            )
    return "\n".join(parts)


def listed(found: re.Match) -> str:
    """Write a table of contents as a list of links to the copies."""
    caption = re.search(r":caption: (.+)", found["options"])
    rows = [f"* [{x['title'] or x['page']}]({x['page']}.md)" for x in ENTRY.finditer(found["body"])]
    return (f"## {caption[1]}\n\n" if caption else "") + "\n".join(rows) + "\n"


def contents(index: str, site: Path) -> str:
    """Return llms.txt: the contents, each page with its first sentence."""

    def described(found: re.Match) -> str:
        text = (site / found["path"]).read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        return f"* [{title[1] if title else found['path']}]({found['path']}): {first_sentence(text)}"

    return re.sub(r"^\* \[[^\]]*\]\((?P<path>[^)]+\.md)\)$", described, index, flags=re.MULTILINE)


def first_sentence(text: str) -> str:
    """Return how the first paragraph of a page begins, without marks of links."""
    blocks = re.split(r"\n{2,}", FENCE.sub("", text))
    first = next((block for block in blocks if re.match(r"[\w`*“]", block) and not block.startswith("* ")), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    return re.split(r"(?<=[.?!])\s(?=[A-Z])", plain)[0]


def read_api(doctrees: Path) -> dict[str, dict[str, str]]:
    return json.loads((doctrees / "api.json").read_text(encoding="utf-8"))
