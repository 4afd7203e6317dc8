"""The pages of the documentation and their blocks of code.

    python -m tests.support.pages FOLDER

writes the blocks of Python into the folder as modules, which ``make lint`` checks: one package a page, one module for
the blocks that share names, and one for each block that begins with its file's name. Lines have the page's numbers.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page for place in ("*.md", "docs/**/*.md", "*/README.md", "examples/*/*.md") for page in ROOT.glob(place)
)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\w+)\.py\n")
GIVEN = {
    "README.md": "import torch; link: str; model: torch.nn.Module",
    "docs/reference/http-api.md": "from typing import Any; model: str; messages: Any",
    "docs/tutorials/your-own-script.md": (
        "from typing import Any; import torch; link: str; model: torch.nn.Module; loader: list[dict[str, Any]]"
    ),
}
"""What a page takes as given, by its path; it stands in the first line, where a page has its title."""


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the page's blocks of code in these languages."""
    return [text for _, kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind in languages]


def python_modules(page: Path) -> dict[str, str]:
    """Return the source of each module of a page by its name; ``page`` has the blocks without a name."""
    text, name, modules = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)), dict[str, str]()
    for match in BLOCK.finditer(text):
        if match[2] == "python":
            module = named[1] if (named := NAMED.match(match[3])) else "page"
            before = modules.get(module, GIVEN.get(name, ""))
            modules[module] = before + "\n" * (text.count("\n", 0, match.start(3)) - before.count("\n")) + match[3]
    sibling = re.compile(rf"^from ({'|'.join(modules) or 'page'}) import", flags=re.MULTILINE)
    return {module: sibling.sub(r"from .\1 import", source) for module, source in modules.items()}


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for page in PAGES:
        package = folder / re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
        for name, source in python_modules(page).items():
            package.mkdir(parents=True, exist_ok=True)
            (package / f"{name}.py").write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
