"""A real browser without a screen, driven by chromedriver: the little of W3C WebDriver that a page's test needs."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1600",
)  # fmt: skip
KEYS = {  # as WebDriver names them
    "right": "\ue014",
    "left": "\ue012",
    "down": "\ue015",
    "up": "\ue013",
    "tab": "\ue004",
    "enter": "\ue007",
    "escape": "\ue00c",
}
MISSING = "no browser: it takes chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"


def is_there() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """One page at a time; `close` ends the browser and its driver."""

    def __init__(self, profile: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.address = f"http://127.0.0.1:{port}/session"
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:loggingPrefs": logs, "goog:chromeOptions": options}
        try:
            found = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}}, patience=30.0)
        except BaseException:
            self.driver.kill()
            raise
        self.address += f"/{found['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None, patience: float = 0.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        until = time.monotonic() + patience
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)["value"]
            except urllib.error.HTTPError as error:
                raise RuntimeError(error.read().decode()) from error
            except urllib.error.URLError:  # the driver is not listening yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, code: str) -> Any:
        """What a function with this body returns in the page."""
        return self._ask("POST", "/execute/sync", {"script": code, "args": []})

    def press(self, *keys: str) -> None:
        """Real key presses."""
        actions = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def point(self, selector: str, x: float = 0.5, y: float = 0.5, *, click: bool = True) -> None:
        """The mouse to a place in an element, as parts of its width and height, and a real click."""
        box = self.run(
            f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}});"
            "const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height];"
        )
        place = {"x": round(box[0] + x * box[2]), "y": round(box[1] + y * box[3])}
        actions: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, "origin": "viewport", **place}]
        if click:
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """A window of that size, for an eye that prefers light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setDeviceMetricsOverride", size)
        self._tell("Emulation.setEmulatedMedia", {"features": [scheme]})

    def _tell(self, command: str, parameters: dict[str, Any]) -> None:
        """A command of Chrome's own protocol."""
        self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def requests(self) -> list[str]:
        """The addresses that the page has asked since the last call."""
        log = self._ask("POST", "/se/log", {"type": "performance"})
        events = [json.loads(line["message"])["message"] for line in log]
        return [x["params"]["request"]["url"] for x in events if x["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors on the page's console."""
        log = self._ask("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in log if line["level"] == "SEVERE"]

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()
