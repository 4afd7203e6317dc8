"""Draw which folders of the package import which: ``python docs/draw_packages.py`` writes both pictures.

A box is a folder with its modules, amber if a directory has more than 13. A line is an import: grey down to a lower
layer, blue within a layer, red up. Its width grows with the number of importing modules. Imports of the base, which
all layers use, are left out. `packages-before.svg` shows `BEFORE`, from git's history.
"""

import ast
import subprocess
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "explanation" / "images"
PACKAGE = "p2ptrain"
BEFORE = "7e0dfd34228d9455534541754d43a73b4543bc06"
"""The commit before the modules moved into folders by what they do."""
LAYERS = (
    "cli", "monitor", "status", "node", "serving", "pipeline", "training", "averaging", "network", "codecs", "models",
    "native", "kernels", "base",
)  # fmt: skip
STEPS = (-220, 60, 240, -80, 150, -170)
"""Shifts of rows with one or two boxes, so that lines pass beside them."""
WIDTH, MARGIN, LABEL, ROW, HEIGHT = 1180, 20, 80, 92, 36
COLOURS = {"down": "#6b7890", "across": "#2f6fde", "up": "#d33"}
OPACITY = {"down": 0.28, "across": 0.6, "up": 0.9}
Box = tuple[float, float, float]
"""Left, top and width."""


@dataclass(frozen=True)
class Folder:
    """A folder of a layer; the layer's own folder has an empty name."""

    layer: str
    name: str


def sources(revision: str | None) -> dict[str, str]:
    """Return the package's modules, by dotted name, of the working tree or of a commit."""
    if revision is None:
        texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / PACKAGE).rglob("*.py")}
    else:
        listed = _git("ls-tree", "-r", "--name-only", revision, PACKAGE).splitlines()
        texts = {path: _git("show", f"{revision}:{path}") for path in listed if path.endswith(".py")}
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text for path, text in texts.items()}


def folder_of(module: str, modules: dict[str, str]) -> Folder:
    parts = module.split(".")[1:]
    if not parts or parts[0] not in LAYERS:
        return Folder("base", "")
    is_folder = len(parts) > 2 or any(other.startswith(f"{module}.") for other in modules)
    return Folder(parts[0], parts[1] if is_folder and len(parts) > 1 else "")


def imports(modules: dict[str, str]) -> Counter[tuple[Folder, Folder]]:
    """Count for each pair of folders the modules of the first that import from the second."""
    found: Counter[tuple[Folder, Folder]] = Counter()
    for name, text in modules.items():
        if name in (PACKAGE, f"{PACKAGE}.__main__"):
            continue  # They hand out names of all layers.
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
        inside = [node for node in nodes if (node.module or "").split(".")[0] == PACKAGE]
        full = {f"{node.module}.{alias.name}" for node in inside for alias in node.names}
        targets = {each if each in modules else each.rpartition(".")[0] for each in full}
        own = folder_of(name, modules)
        others = {folder_of(each, modules) for each in targets}
        found.update((own, other) for other in others if other != own and other.layer != "base")
    return found


def draw(modules: dict[str, str], title: str) -> str:
    """Return the picture as SVG."""
    sizes = Counter(folder_of(name, modules) for name in modules)
    layers = [layer for layer in LAYERS if any(folder.layer == layer for folder in sizes)]
    boxes: dict[Folder, Box] = {}
    for row, layer in enumerate(layers):
        folders = sorted((each for each in sizes if each.layer == layer), key=lambda each: each.name)
        widths = [max(58.0, 8.0 + 6.6 * len(each.name), 5.0 * sizes[each]) for each in folders]
        space = (WIDTH - LABEL - 2 * MARGIN - sum(widths)) / (len(folders) + 1)
        left = float(LABEL + MARGIN) + (STEPS[row % len(STEPS)] if len(folders) < 3 else 0)
        for folder, width in zip(folders, widths, strict=True):
            boxes[folder] = left + space, 50.0 + row * ROW, width
            left += space + width
    height = 50 + len(layers) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="28" font-size="17">{escape(title)}</text>',
    ]
    for (source, target), number in sorted(imports(modules).items(), key=lambda item: (item[1], str(item[0]))):
        parts.append(
            _line(boxes[source], boxes[target], number, layers.index(target.layer) - layers.index(source.layer))
        )
    for layer in layers:
        top = 50 + layers.index(layer) * ROW + HEIGHT / 2 + 5
        parts.append(f'<text x="{MARGIN}" y="{top:.0f}" font-size="14" font-weight="bold">{layer}</text>')
    for folder, (left, top, width) in boxes.items():
        middle, fill = left + width / 2, "#fde9c8" if _fullest(folder, modules) > 13 else "#eef3fb"
        box = f'x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="5"'
        files = f"{sizes[folder]} file{'s' * (sizes[folder] > 1)}"
        parts.append(f'<rect {box} fill="{fill}" stroke="#456"/>')
        at = f'x="{middle:.0f}" text-anchor="middle" fill="#123"'
        parts.append(f'<text {at} y="{top + 15:.0f}" font-size="12">{folder.name or "·"}</text>')
        parts.append(f'<text {at} y="{top + 30:.0f}" font-size="11">{files}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _line(source: Box, target: Box, number: int, down: int) -> str:
    kind = "across" if not down else "down" if down > 0 else "up"
    middle, other = source[0] + source[2] / 2, target[0] + target[2] / 2
    x0, x1 = _towards(source, other), _towards(target, middle)
    y0 = source[1] + (HEIGHT if down > 0 else 0)
    y1 = target[1] + (HEIGHT if down < 0 else 0)
    bend = (y1 - y0) / 2 if down else -ROW * 0.45
    path = f"M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend if down else y1 + bend:.0f}"
    return (
        f'<path d="{path} {x1:.0f},{y1:.0f}" fill="none" stroke="{COLOURS[kind]}" stroke-opacity="{OPACITY[kind]}"'
        f' stroke-width="{min(6.0, 0.6 + 0.4 * number):.1f}"/>'
    )


def _towards(box: Box, other: float) -> float:
    """Return where a line leaves a box: on the side of the other end."""
    half = box[2] / 2
    return box[0] + half + max(-0.8 * half, min(0.8 * half, (other - box[0] - half) / 8))


def _fullest(folder: Folder, modules: dict[str, str]) -> int:
    """Return the most modules that one directory in a box has, for some boxes hold several."""
    packages = {name.rpartition(".")[0] for name in modules}
    inside = [name for name in modules if folder_of(name, modules) == folder]
    return max(Counter(name if name in packages else name.rpartition(".")[0] for name in inside).values())


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, revision in (("today", None), ("before", BEFORE)):
        modules = sources(revision)
        lines = sum(text.count("\n") for text in modules.values())
        title = f"{PACKAGE} {name}: {len(modules)} modules, {lines:,} lines"
        (IMAGES / f"packages-{name}.svg").write_text(draw(modules, title))
