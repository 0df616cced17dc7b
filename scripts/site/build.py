"""Build the documentation site from docs/*.md, docstrings and results, and check it.

python scripts/site/build.py            into build/docs
python scripts/site/build.py --twice    and again, which must give the same bytes
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.site.api import api_pages, index  # noqa: E402
from scripts.site.check import check, check_api, check_listed  # noqa: E402
from scripts.site.pages import stage  # noqa: E402
from scripts.site.text_copies import read_api, write_copies  # noqa: E402


def generate(pages: Path, guides: list[Path]) -> None:
    """Write the pages of the reference, which are made from code."""
    from scripts.site.command_line import command_line
    from scripts.site.formats import formats
    from scripts.site.http_api import http_api
    from scripts.site.refusals import refusals
    from scripts.site.settings import settings

    api = api_pages(guides)
    made = {
        "cli": command_line(),
        "settings": settings(),
        "http": http_api(),
        "formats": formats(),
        "errors": refusals((ROOT / "docs" / "site" / "errors.md").read_text(encoding="utf-8")),
        "api/index": index(api),
        **{f"api/{name}": text for name, text in api.items()},
    }
    for name, text in made.items():
        path = pages / "reference" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def build(pages: Path, site: Path, doctrees: Path) -> list[str]:
    """Build everything anew; return a sentence for each fault."""
    for folder in (pages, site, doctrees):
        shutil.rmtree(folder, ignore_errors=True)
    guides = stage(ROOT, pages)
    generate(pages, guides)
    listed = [str(guide.relative_to(ROOT).with_suffix("")) for guide in guides]
    if faults := check_listed(pages / "index.md", listed) + check(pages):
        return faults
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    configured = ["-c", str(Path(__file__).parent), "-d", str(doctrees), str(pages), str(site)]
    if subprocess.run([*sphinx, *configured], check=False).returncode:
        return ["Sphinx has warnings, above."]
    api = read_api(doctrees)
    write_copies(pages, site, api)
    (site / ".buildinfo").unlink(missing_ok=True)
    import tarnn

    documented = {name.removeprefix("tarnn.") for name, made in api.items() if made.get("text")}
    return check(pages, site) + check_api(tarnn.__all__, documented, Path(tarnn.__file__))


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--twice", action="store_true", help="build two times, and compare every file")
    work, site = ROOT / "build" / "site", ROOT / "build" / "docs"
    again = parser.parse_args().twice
    faults = build(work / "pages", site, work / "doctrees")
    if again and not faults:
        before = digests(site)
        faults = build(work / "pages", site, work / "doctrees")
        after = digests(site)
        faults += [f"{x}: differs when it is built again" for x in before | after if before.get(x) != after.get(x)]
    print("\n".join(faults) or f"{site / 'index.html'}: {len(digests(site))} files; all checks passed")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
