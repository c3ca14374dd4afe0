"""Pages in a real Chromium without a window. The system's own browser is used; nothing is downloaded."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from rollout_runs import GROUP_SIZE, MANY, add_batch, consume, make_rollout, small_run, start_run
from stalewise.reporting.browser import RunServer, make_server

expect.set_options(timeout=30_000)  # in place of five seconds: other tests run beside these
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine: install the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Path], RunServer]]:
    """One server for each run, for as long as there are tests."""
    servers: dict[Path, RunServer] = {}

    def start(run: Path) -> RunServer:
        if run not in servers:
            servers[run] = make_server(run)
            threading.Thread(target=servers[run].serve_forever, args=(0.05,), daemon=True).start()
        return servers[run]

    yield start
    for server in servers.values():
        server.shutdown()
        server.server_close()


@pytest.fixture
def page(chromium: Browser, serve: Callable[[Path], RunServer]) -> Iterator[Page]:
    """A page whose every error fails the test; it closes before the servers do."""
    context = chromium.new_context(viewport={"width": 1280, "height": 850})
    made = context.new_page()
    errors: list[str] = []
    made.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
    yield made
    context.close()
    assert errors == []


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred thousand short rollouts, most of them consumed."""
    run = start_run(tmp_path_factory.mktemp("runs") / "big")
    kinds = [make_rollout(i, text=f"text {i}") for i in range(1000)]
    rollouts = [
        replace(kinds[i % 1000], rollout_id=i, group=i // GROUP_SIZE, prompt_id=f"prompt/{i // GROUP_SIZE}")
        for i in range(MANY)
    ]
    batch = add_batch(run, 0, rollouts, shard_rows=10_000)
    consume(run, batch, 0, range(8), per_update=10_000)
    return run
