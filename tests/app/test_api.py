"""docs/api.md: every block of it, run as it stands against a running app."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "browser"))

from fake_site import Site  # noqa: E402 (over the fake engine)

ADDRESS = "http://127.0.0.1:7860/"


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site():
    site = Site(pause=0.0)
    yield site
    site.close()


def run(command: list[str], code: str, site: Site) -> str:
    code = code.replace(ADDRESS, site.url).replace(ADDRESS.rstrip("/"), site.url.rstrip("/"))
    done = subprocess.run(
        [*command, code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_the_three_ways():
    assert len(blocks("python")) == 2 and len(blocks("bash")) == 1 and len(blocks("json")) == 1


def test_the_python_client(site):
    pytest.importorskip("gradio_client")
    printed = run([sys.executable, "-c"], blocks("python")[0], site)
    assert re.search(r"confu: 32 tokens in \d+ passes, tau [1-9]\.\d\d", printed)
    assert "same text: True" in printed


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(site):
    printed = run(["bash", "-euo", "pipefail", "-c"], blocks("bash")[0], site)
    assert "event: complete" in printed
    data = [line[6:] for line in printed.splitlines() if line.startswith("data: ")]
    answer = json.loads(data[-1])[0]
    assert answer["identical"] is True and answer["settings"]["nodes"] == 20


def test_mcp(site):
    pytest.importorskip("mcp", reason="gradio's extra `mcp` is not installed")
    address = json.loads(blocks("json")[0])["mcpServers"]["confu-explorer"]["url"]
    assert address in blocks("python")[1]
    printed = run([sys.executable, "-c"], blocks("python")[1], site)
    first, _, rest = printed.partition("\n")
    assert "compare - Decode one prompt by several methods" in first
    assert '"identical": true' in rest.replace("True", "true").replace("'", '"')
