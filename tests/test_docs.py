"""Rules for the Markdown pages: links resolve, the index and the architecture are complete."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from extender.answers.routes import ROUTES
from tests.files import ROOT, tracked
from tests.reference import PAGES as PAGES_WITH_PARTS
from tests.reference import PARTS, VALUES, api_routes, part_of, render_values

LONGEST_README: Final = 220
BLOCK: Final = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MENTION: Final = re.compile(r"\bdocs/[\w/-]+\.md\b")
HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
SECTION: Final = re.compile(r"^### (\w+)\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
RUNBOOK: Final = re.compile(
    r"\n- \*\*Meaning:\*\* .+\n- \*\*Look:\*\* `[^`\n]+`"
    r"\n- \*\*Do:\*\* .+\n- \*\*Harmless\*\* .+\n+",
    re.DOTALL,
)
"""Parts of a runbook; exactly one command shows more."""
WITHOUT_DOCS: Final = {".lock", ".json", ".png", ".gz", ".zip"}
"""Kinds of files that name no page and may be large."""

PAGES: Final = sorted(tracked("*.md"))


def prose(path: Path) -> str:
    """Return a page without its code blocks, whose contents are neither links nor headings."""
    return BLOCK.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub creates from a page's headings."""
    seen: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(prose(path)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        number = seen.get(slug, 0)
        seen[slug] = number + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def relative_links(path: Path) -> Iterator[tuple[str, str]]:
    """Yield file and anchor of each link within the repository."""
    for target in LINK.findall(prose(path)):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_and_anchor_resolves(path: Path) -> None:
    broken = []
    for file, anchor in relative_links(path):
        target = path if not file else (path.parent / file).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{file}#{anchor}" if anchor else file)

    assert broken == []


def test_every_page_that_a_file_mentions_exists() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {page}"
        for path in tracked("*")
        if path.is_file() and not path.is_symlink() and path.suffix not in WITHOUT_DOCS
        for page in MENTION.findall(path.read_text(encoding="utf-8", errors="replace"))
        if not (ROOT / page).exists()
    }

    assert missing == set()


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / file).resolve() for file, _ in relative_links(index)}

    assert set((ROOT / "docs").rglob("*.md")) - {index} - linked == set()


def test_each_alert_has_a_runbook_with_a_remedy() -> None:
    rules = yaml.safe_load(
        (ROOT / "manifests/components/prometheus-rule/prometheus-rule.yaml").read_text()
    )
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    page = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
    sections = dict(SECTION.findall(page))

    assert list(sections) == [alert["alert"] for alert in alerts]
    assert {alert["alert"]: alert["annotations"]["runbook"] for alert in alerts} == {
        name: f"docs/runbooks.md#{name.lower()}" for name in sections
    }
    wrong = {name for name, text in sections.items() if not RUNBOOK.fullmatch(text)}
    assert wrong == set()


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def test_overlays_name_the_images_of_this_release() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    named = re.findall(r"newTag: (\S+)", (ROOT / "docs" / "install.md").read_text())

    assert set(named) == {version}


def test_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {
        str(path.parent.relative_to(ROOT))
        for program in ("extender", "agent", "worker_device")
        for path in tracked(f"{program}/*.py")
    }

    assert sorted(name for name in packages if f"`{name}`" not in page) == []


def test_the_architecture_names_no_package_or_module_that_is_gone() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = re.findall(r"`((?:extender|agent|worker_device|tests)(?:/\w+)*)`", page)
    modules = re.findall(r"`((?:\w+/)*\w+\.py)`", page)

    gone = [name for name in packages if not (ROOT / name).is_dir()]
    for name in modules:
        places = (ROOT / name, ROOT / "extender" / name)
        if not any(place.is_file() for place in places):
            gone.append(name)
    assert gone == []


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in PAGES_WITH_PARTS.items() for name in names]
)
def test_generated_parts_match_the_code(path: str, name: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")

    assert part_of(text, name) == PARTS[name](), "run: python -m tests.reference"


def test_every_setting_that_a_page_names_exists() -> None:
    reference = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `([a-z_.]+)`", reference, re.MULTILINE))
    sections = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    named = {
        name
        for path in PAGES
        if path.name != "CHANGELOG.md"
        for name in re.findall(rf"`((?:{sections})\.[a-z_]+)`", path.read_text(encoding="utf-8"))
    }

    assert len(named) > 40
    assert named - known - {"tls.crt", "tls.key"} == set()


def test_every_metric_that_a_page_an_alert_or_a_panel_names_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(idlegpu_\w+)`", reference, re.MULTILINE))
    named = {
        re.sub("_(bucket|sum|count)$", "", name)
        for path in [*PAGES, *tracked("manifests/components/*")]
        if path.is_file()
        for name in re.findall(r"\bidlegpu_[a-z_]+[a-z]\b", path.read_text(encoding="utf-8"))
    }

    assert len(named) > 60
    assert named - known - {"idlegpu_wanted_gpus"} == set()  # prometheus-adapter's


def test_the_charts_values_are_those_of_its_schema() -> None:
    assert VALUES.read_text(encoding="utf-8") == render_values(), "run: python -m tests.reference"


def test_the_table_of_routes_has_the_routes_of_the_api_and_no_others() -> None:
    assert {f"{route.method} {route.path}" for route in ROUTES} == api_routes()
