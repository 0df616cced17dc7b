"""The page of a server as its reader has it: in a browser, by what is seen and pressed."""

import json
import time
import unicodedata

OUTSIDE = """
return [...document.querySelectorAll('body *')].filter(x => !x.closest('.unseen') && x.getClientRects().length)
  .filter(x => { const r = x.getBoundingClientRect(); return r.left < -1 || r.right > innerWidth + 1; })
  .map(x => x.id || x.className || x.tagName);
"""
CONTRASTS = """
const light = color => color.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
  .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const behind = x => {
  const color = numbers(getComputedStyle(x).backgroundColor);
  return color[3] === 0 ? behind(x.parentElement) : color.slice(0, 3);
};
return [...document.querySelectorAll('body *')].filter(x => !x.closest('.unseen') && !x.disabled && x.getClientRects().length
    && [...x.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
  .map(x => { const [a, b] = [numbers(getComputedStyle(x).color).slice(0, 3), behind(x)].map(light);
    return [x.textContent.slice(0, 30), (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; });
"""
NAMELESS = """
return [...document.querySelectorAll('button, input, select, textarea, summary, a')]
  .filter(x => !(x.ariaLabel || x.textContent.trim() || x.labels?.length)).map(x => x.outerHTML);
"""

LINES = """
const widths = [];
for (const x of document.querySelectorAll('.theirs .text')) {
  const range = document.createRange(), node = x.firstChild;
  let top = null, width = 0;
  for (let i = 0; i < node.length; i++) {
    range.setStart(node, i); range.setEnd(node, i + 1);
    const box = range.getBoundingClientRect();
    if (box.top !== top) { widths.push(width); [top, width] = [box.top, 0]; }
    width += 1;
  }
  widths.push(width);
}
return Math.max(...widths);
"""  # characters of the longest line of an answer


def readable(text):
    """Leave out what the page would show as boxes: bytes that are no characters, and what no font draws."""
    hidden = {"Cc", "Cn", "Co", "Cs"}
    return "".join(x for x in text if x in "\t\n" or (x != "\ufffd" and unicodedata.category(x) not in hidden))


def wait(check, seconds=20.0):
    """What check() returns, as soon as it is true."""
    until = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < until, "the page did not come so far"
        time.sleep(0.02)
    return value


class Page:
    """The page as its reader has it."""

    def __init__(self, browser, address, ready="send.disabled === false"):
        self.browser, self.address = browser, address
        self.open(address, ready)
        browser.requests(), browser.complaints()

    def open(self, address, ready="send.disabled === false"):
        """Open an address, or the same one again, as a reload does."""
        if address == self.browser.run("return location.href"):
            self.browser.run("location.reload()")
        else:
            self.browser.open(address)
        wait(lambda: self.browser.run("return document.readyState === 'complete'") and self.ask(ready))

    def ask(self, what):
        """The value of an expression, in which elements with an id are variables; textContent is a string."""
        return self.browser.run(f"return document.getElementById('{what.split('.')[0]}').{what.split('.', 1)[1]}")

    def text(self, name):
        return self.ask(f"{name}.textContent")

    def put(self, **settings):
        for name, value in settings.items():
            self.browser.run(f"document.getElementById('{name}').value = {json.dumps(str(value))}")

    def write(self, text):
        self.browser.point("#text")
        self.browser.press(*text)

    def send(self, text=""):
        """Write a message, and wait for the answer's end."""
        self.write(text)
        self.browser.press("enter")
        self.rest()

    def rest(self):
        wait(lambda: not self.ask("send.disabled"))

    def click(self, name, nth=0):
        """A button of a message, by the beginning of its spoken name: the nth from the top."""
        named = f"filter(x => (x.ariaLabel || x.textContent).startsWith({json.dumps(name)}))"
        self.browser.run(f"[...document.querySelectorAll('button')].{named}[{nth}].click()")

    @property
    def asked(self):
        return self.browser.run("return [...document.querySelectorAll('.mine .text')].map(x => x.textContent)")

    @property
    def answers(self):
        return self.browser.run("return [...document.querySelectorAll('.theirs .text')].map(x => x.textContent)")

    @property
    def facts(self):
        return self.browser.run("return [...document.querySelectorAll('.theirs .facts')].map(x => x.textContent)")
