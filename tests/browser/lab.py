"""JupyterLab on loopback and a page of it in headless Chromium, for tests and benchmarks."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat

CHROMIUM = Path("/usr/bin/chromium")
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook of code cells for this Python's kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, path)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """A JupyterLab that serves `folder`; yields its address with the token in it, as a format."""
    port, token = free_port(), secrets.token_hex(16)
    state = folder / ".jupyter"  # nothing of the user's configuration
    page_config = state / "CONFIG" / "labconfig" / "page_config.json"
    page_config.parent.mkdir(parents=True)
    news = "@jupyterlab/apputils-extension:announcements"
    page_config.write_text(json.dumps({"disabledExtensions": {news: True}}))
    folders = {f"JUPYTER_{kind}_DIR": str(state / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    options = [
        f"--ServerApp.root_dir={folder}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.open_browser=False",
        "--ServerApp.allow_root=True",
        "--LabApp.expose_app_in_browser=True",
        f"--IdentityProvider.token={token}",
    ]
    environment = {**os.environ, **folders, "JUPYTER_PREFER_ENV_PATH": "1"}
    log = (folder / "lab.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        cwd=folder,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/api?token={token}", process, folder / "lab.log")
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}"
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


def _wait_until_up(address: str, process: subprocess.Popen, log: Path, *, limit_s=90) -> None:
    for _ in range(limit_s * 5):
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not come up:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def chromium() -> Iterator:
    """Debian's Chromium, headless, through playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(_FLAGS))
        yield browser
        browser.close()


_IDLE = """() => {
  const panel = window.jupyterapp?.shell.currentWidget;
  const kernel = panel?.sessionContext?.session?.kernel;
  return panel?.context?.isReady && kernel?.status === 'idle'
    && kernel.connectionStatus === 'connected';
}"""
_RAN = """() => [...window.jupyterapp.shell.currentWidget.content.widgets]
  .filter(cell => cell.model.type === 'code').every(cell => cell.model.executionCount)"""
_EXECUTE = """async code => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  let text = '';
  const future = kernel.requestExecute({code: code, store_history: false});
  future.onIOPub = m => {
    if (m.content.name === 'stdout') text += m.content.text;
    if (m.header.msg_type === 'error') text += m.content.evalue;
  };
  await future.done;
  return text;
}"""
# Time of each key press, and of each picture once it has been decoded, of one image.
_WATCH = """image => {
  const first = !window.keys;
  window.keys = []; window.pictures = [];
  if (first) document.addEventListener('keydown', () => window.keys.push(performance.now()), true);
  if (!image.watched) image.addEventListener('load', async () => {
    await image.decode().catch(() => {});
    requestAnimationFrame(() => window.pictures.push(performance.now()));
  });
  image.watched = true;
}"""
_BYTES = """async image => {
  const buffer = await (await fetch(image.src)).arrayBuffer();
  let text = '';
  for (const byte of new Uint8Array(buffer)) text += String.fromCharCode(byte);
  return btoa(text);
}"""


class Notebook:
    """One notebook open in JupyterLab, run from the top."""

    def __init__(self, browser, address: str, *, timeout_s: float = 120) -> None:
        self.page = browser.new_page(viewport={"width": 1400, "height": 1300})
        self.page.set_default_timeout(timeout_s * 1000)
        self.page.goto(address)
        self.page.wait_for_function(_IDLE)
        self.page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        self.page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        self.page.wait_for_function(_RAN)
        self.page.wait_for_function(_IDLE)

    def execute(self, code: str) -> str:
        """What the code prints in the notebook's kernel."""
        return self.page.evaluate(_EXECUTE, code)

    def output(self, number: int):
        """The output area of the code cell with this number, from 0."""
        return self.page.locator(".jp-CodeCell").nth(number).locator(".jp-Cell-outputArea")

    def slider(self, number: int, place: int):
        """A slider's handle: the one at `place`, from 0, in the output of cell `number`."""
        return self.output(number).locator(".noUi-handle").nth(place)

    def image(self, number: int):
        return self.output(number).locator("img.widget-image")

    def picture(self, number: int) -> bytes:
        """The bytes of the picture that the page shows in the output of cell `number`."""
        return base64.b64decode(self.image(number).evaluate(_BYTES))

    def settled(self, number: int = 0, panel: str = "panel") -> str:
        """Text in the output of cell `number`, once its picture is the last one of `panel`.

        A slider that moved twice sends the second move only after the kernel has handled the
        first, and so perhaps behind the first question: the answer must come twice.
        """
        ask = f"import hashlib; print(hashlib.sha256({panel}.png).hexdigest())"
        before = None
        for _ in range(200):
            wanted = self.execute(ask).strip()
            shown = hashlib.sha256(self.picture(number)).hexdigest()
            if before == wanted == shown:
                self.page.evaluate("() => new Promise(requestAnimationFrame)")
                return self.output(number).inner_text()
            before = wanted
            time.sleep(0.05)
        raise AssertionError("the picture on the page is not the one that the kernel drew last")

    def until(self, text: str, number: int = 0, panel: str = "panel") -> str:
        """The settled text once it holds `text`."""
        for _ in range(100):
            if text in (shown := self.settled(number, panel)):
                return shown
            time.sleep(0.1)
        raise AssertionError(f"{text!r} did not appear: {shown[-500:]}")

    def press(self, place: int, key: str, times: int = 1) -> str:
        """Press a key on a slider of the first cell; the settled text."""
        handle = self.slider(0, place)
        handle.focus()
        for _ in range(times):
            handle.press(key)
        return self.settled()

    def watch(self, number: int) -> None:
        """Start to note the times of key presses and of pictures of cell `number`."""
        self.image(number).evaluate(_WATCH)

    def times(self) -> tuple[list[float], list[float]]:
        """Key presses and pictures noted since `watch`, in milliseconds."""
        return self.page.evaluate("[window.keys, window.pictures]")
