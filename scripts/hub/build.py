"""Make the folder that Hugging Face's kernel-builder takes: delta rule, short convolution and scans on CPUs. No second copy
of them is kept: sources come from csrc/ and src/tarnn/, what is the hub's own from scripts/hub/template/.

    python scripts/hub/build.py                     build/hub/tarnn-recurrences
    python scripts/hub/build.py --try               and compile it here, as kernel-builder would, and run its tests

To publish it: an account in CARD.md and in build.toml (`[general.hub] repo-id`), then `kernel-builder build-and-upload` there.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, CSRC, TEMPLATE = ROOT / "src/tarnn", ROOT / "csrc", Path(__file__).parent / "template"
PACKAGE = "torch-ext/tarnn_recurrences"
OPS = ("delta", "convolution", "scan")
KERNELS = ("delta", "convolution", "diagonal_scan", "selective_scan")
EXTENSION = "_tarnn_recurrences_cpu_local"  # kernel-builder puts a digest in the place of `local`


def python_files(begin: list[str]) -> list[str]:
    """Return these files of src/tarnn and all that they import of it, but for those that the template has itself."""
    own = {str(path.relative_to(TEMPLATE / PACKAGE)) for path in (TEMPLATE / PACKAGE).rglob("*.py")}
    waiting, found = list(begin), []
    while waiting:
        name = waiting.pop()
        if name in found or name in own:
            continue
        found.append(name)
        for node in ast.walk(ast.parse((SOURCE / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tarnn":
                folder = "/".join(node.module.split(".")[1:])
                modules = {
                    f"{folder}/{alias.name}.py"
                    for alias in node.names
                    if (SOURCE / folder / f"{alias.name}.py").exists()
                }
                waiting += modules or {f"{folder}.py"}
    return sorted(found)


def relative(text: str, depth: int) -> str:
    """Return a file of src/tarnn as one of the package: imports that begin with dots, its own operators, no jaxtyping.

    depth: of its folder below the package."""
    text = re.sub(r"^from tarnn(\.[\w.]+) import", rf"from {'.' * depth}\1 import", text, flags=re.MULTILINE)
    text = re.sub(r"^from jaxtyping import .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b(?:Float|Int|Bool)\[Tensor, \"[^\"]*\"\]", "Tensor", text)
    if "torch.ops.tarnn_cpu." in text:
        text = text.replace("torch.ops.tarnn_cpu.", "ops.")
        text = re.sub(
            r"^from torch import Tensor\n",
            rf"\g<0>\nfrom {'.' * (depth + 1)}_ops import ops\n",
            text,
            count=1,
            flags=re.MULTILINE,
        )
    return text


def headers() -> list[str]:
    """Return the headers, and the sources that are included, of the three ops and of what they share."""
    found = list(CSRC.glob("*.h"))
    for folder in (*OPS, "common", "simd"):
        found += [
            path for path in (CSRC / folder).glob("*") if path.suffix == ".h" or path.name == "kernels_of_isa.cpp"
        ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def make(out: Path) -> None:
    """Write the folder, anew."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(TEMPLATE, out)
    build = out / "build.toml"
    listed = ["cpu/recurrences.h", *(name for name in headers() if name.endswith(".h"))]
    build.write_text(build.read_text().replace("@HEADERS@", "\n".join(f'    "{name}",' for name in listed)))
    compiled = [
        name for name in tomllib.loads(build.read_text())["kernel"]["recurrences"]["src"] if name.startswith("csrc/")
    ]
    for name in {*compiled, *headers(), "csrc/isa.cpp"}:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, out / name)
    begin = [f"ops/{op}/op.py" for op in OPS] + [f"kernels/cpu/{op}.py" for op in KERNELS]
    for name in python_files(begin):
        target = out / PACKAGE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relative((SOURCE / name).read_text(), name.count("/")))
    for folder in {path.parent for path in (out / PACKAGE).rglob("*.py")}:
        (folder / "__init__.py").touch()
    (out / "tests/definitions").mkdir()
    for op in OPS:
        shutil.copy(SOURCE / f"ops/{op}/definition.py", out / f"tests/definitions/{op}.py")
    version = re.search(r'"(.*)"', (SOURCE / "_version.py").read_text())[1]  # type: ignore[index]
    card = out / "CARD.md"
    card.write_text(card.read_text().replace("@VERSION@", version))
    shutil.copy(ROOT / "LICENSE", out)


def compile_here(out: Path) -> None:
    """Compile as kernel-builder does, with its names, and write the two files that it would."""
    import torch

    settings = tomllib.loads((out / "build.toml").read_text())
    kernel = settings["kernel"]["recurrences"]
    (out / "torch-ext/registration.h").write_text("#define REGISTER_EXTENSION(name)\n")
    sources = [name for name in (*kernel["src"], *settings["torch"]["src"]) if name.endswith(".cpp")]
    flags = [f"-DTORCH_EXTENSION_NAME={EXTENSION}", "-DCPU_KERNEL", "-DNDEBUG", "-fPIC", *kernel["cxx-flags"]]
    include = [f"-I{name}" for name in (*kernel["include"], "torch-ext")]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
    binary = f"{PACKAGE}/{EXTENSION}.so"
    command = [os.environ.get("CXX", "c++"), "-shared", *flags, *include, *sources, *libraries, "-o", binary]
    subprocess.run(command, cwd=out, check=True)
    (out / PACKAGE / "_ops.py").write_text(
        "from pathlib import Path\n\nimport torch\n\n"
        f'torch.ops.load_library(Path(__file__).with_name("{EXTENSION}.so"))\nops = torch.ops.{EXTENSION}\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/hub/tarnn-recurrences")
    parser.add_argument("--try", dest="run", action="store_true", help="compile it, and run its tests")
    options = parser.parse_args()
    make(options.out)
    print(f"{options.out}: {sum(path.is_file() for path in options.out.rglob('*'))} files")
    if options.run:
        compile_here(options.out)
        paths = os.pathsep.join(str(options.out / name) for name in ("torch-ext", "tests"))
        tests = ["-q", "-p", "no:cacheprovider", "-o", "markers=kernels_ci", "--rootdir", ".", "tests"]
        environment = {**os.environ, "PYTHONPATH": paths}
        sys.exit(subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=options.out, env=environment).returncode)


if __name__ == "__main__":
    main()
