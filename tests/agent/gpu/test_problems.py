"""Problem texts of driver errors, and the remedies in them."""

import re

import pytest

from agent.gpu.backend import Code, NvmlError
from agent.gpu.session import problem_of
from tests.files import ROOT

TEXT_SUFFIXES = {".py", ".md", ".yaml", ".json", ".js", ".tpl", ".txt"}


def test_advice_to_reset_includes_removing_the_agent() -> None:
    folders = ("agent", "extender", "docs", "manifests", "charts", "simulation", "images")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    advising = {}
    for path in (*paths, *ROOT.glob("*.md")):
        if path.suffix not in TEXT_SUFFIXES:
            continue
        text = path.read_text()
        for found in re.finditer("gpu-reset", text):
            around = text[max(found.start() - 400, 0) : found.start() + 400]
            says = re.search(r"(drain|take)[^.]{1,120}agent", around, re.DOTALL)
            advising[str(path), found.start()] = says is not None

    assert advising, "the search finds something"
    assert all(advising.values()), advising


@pytest.mark.parametrize("code", [Code.ResetRequired, Code.CorruptedInforom])
def test_reset_problems_say_how_to_remove_the_agent(code: Code) -> None:
    text = problem_of(NvmlError("nvmlDeviceGetPowerUsage", code), "cannot read GPU 0").text

    assert "drain the node, the agent too" in text
    assert text.index("idlegpu.io/agent=false") < text.index("nvidia-smi --gpu-reset")
