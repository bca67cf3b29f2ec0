"""The page and the libraries beside it: small, named, licensed, and served as files that never change."""

from __future__ import annotations

import re
from pathlib import Path

from ostinato.serve import app
from tests.serve.running import Running

SERVE = Path(app.__file__).parent
VENDOR = SERVE / "vendor"
MOST_BYTES = 400_000


def test_the_page_and_its_libraries_are_small() -> None:
    files = [SERVE / "page.html", SERVE / "docs.html", *(path for path in VENDOR.rglob("*") if path.is_file())]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_each_library_has_its_licence_and_is_in_the_notice() -> None:
    notice = (VENDOR / "NOTICE.md").read_text(encoding="utf-8")
    folders = [path for path in VENDOR.iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        assert (folder / "LICENSE").is_file()
        assert f"`{folder.name}`" in notice
        assert f"| {folder.name.rpartition('-')[2]} |" in notice


def test_the_pages_name_nothing_outside_this_server() -> None:
    for name in ("page.html", "docs.html"):
        text = (SERVE / name).read_text(encoding="utf-8")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


def test_what_the_page_loads_is_there_and_nothing_else_is(server: Running) -> None:
    page = (SERVE / "page.html").read_text(encoding="utf-8")
    scripts = re.findall(r'<script src="/vendor/([^"]+)">', page)
    folder = re.search(r'HIGHLIGHT = location.origin \+ "/vendor/([^"]+)"', page)
    languages = re.search(r"LANGUAGES = (\[[^\]]+\])", page)
    assert folder
    assert languages
    scripts += [f"{folder[1]}{name}.min.js" for name in ("core", *re.findall(r'"(\w+)"', languages[1]))]
    assert sorted(scripts) == sorted(path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*.js"))
    for script in scripts:
        answer = server.get(f"/vendor/{script}")
        assert answer.content == (VENDOR / script).read_bytes()
        assert answer.headers["content-type"].startswith("text/javascript")
        assert "immutable" in answer.headers["cache-control"]
    for other in ("NOTICE.md", "../app.py", "..%2fapp.py", "marked-18.2.0", ""):
        assert server.get(f"/vendor/{other}").status_code == 404


def test_the_policy_of_the_page_names_hashes_and_this_server(server: Running) -> None:
    policy = server.get("/", accept="text/html").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 3  # two scripts and a style
