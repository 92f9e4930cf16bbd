"""A browser without a window, by the protocol that its driver speaks; see test_page.py."""

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
           "--hide-scrollbars", "--disable-extensions", "--no-first-run"]  # fmt: skip


class Browser:
    """A Chromium with one page."""

    def __init__(self, profile: Path) -> None:
        assert DRIVER and BROWSER
        self.driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.driver.stdout is not None
        port = next(
            line.rpartition("port ")[2].strip(" .\n")
            for line in self.driver.stdout
            if "started successfully on port" in line
        )
        self.at = f"http://127.0.0.1:{port}/session"
        chrome = {"binary": BROWSER, "args": [*OPTIONS, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome", "goog:chromeOptions": chrome,
            "goog:loggingPrefs": {"browser": "ALL"},
        }  # fmt: skip
        made = self.send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.at += f"/{made['sessionId']}"

    def send(self, method: str, command: str, body: object = None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.at + command, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from None

    def devtools(self, command: str, **params: object):
        return self.send("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, page: Path) -> None:
        """Returns when it is loaded."""
        self.send("POST", "/url", {"url": page.as_uri()})

    def shown_as(self, scheme: str, width: int, height: int = 900) -> None:
        """In a window of this width; scheme: light or dark."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str, *args: object):
        """What a function with this body returns in the page."""
        return self.send("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, selector: str) -> str:
        """The element that is the first to match; its number."""
        found = self.send("POST", "/element", {"using": "css selector", "value": selector})
        return next(iter(found.values()))

    def click(self, selector: str) -> None:
        self.send("POST", f"/element/{self.find(selector)}/click", {})

    def press(self, key: str) -> None:
        """A key, in whatever has the focus."""
        keys = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def messages(self) -> list[str]:
        """What the console says since the last look."""
        return [one["message"] for one in self.send("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        try:
            self.send("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait(20)
            assert self.driver.stdout is not None
            self.driver.stdout.close()
