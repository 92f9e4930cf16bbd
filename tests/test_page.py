"""A report as a page: what it says, that it is one piece, escaped, quick, and fit to look at."""

import dataclasses
import html.parser
import inspect
import linecache
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from browser import BROWSER, DRIVER, Browser

import autofuse
from autofuse.dispatch.protocol import HANDLERS, OPTIONS
from autofuse.observe import advice, page, recorded
from autofuse.observe.listing import groups, listings, tallies
from autofuse.record import policy

WIDTHS, SCHEMES = (1200, 380), ("light", "dark")
HERE = __file__


def cell(x, w, outs):
    h = torch.tanh(x + 1.0)
    for _ in range(3):
        z = torch.sigmoid(h @ w * 2.0 + x)
        h = z * h + (1 - z) * x
        h += torch.nn.functional.silu(z)
        outs.append(h.mul_(0.5).add_(x, alpha=3))
        if h.mean() > 9:
            break
        h.sum().item()
    return h


def lines_of(function):
    """Text of each line of `function`, by number."""
    lines, start = inspect.getsourcelines(function)
    return {start + k: line.rstrip("\n") for k, line in enumerate(lines)}


def number_of(text, function=cell):
    return next(number for number, line in lines_of(function).items() if text in line)


@pytest.fixture
def report():
    return autofuse.explain(cell, torch.ones(8, 8), torch.ones(8, 8), [])


class Seen(html.parser.HTMLParser):
    """What a page is made of."""

    EMPTY = {"meta", "link", "br"}

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.given, self.text = [], [], [], [], []
        self.code = []  # texts of lines of source and of kernels
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.given += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "summary":
            assert self.open[-1] == "details"
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "code":
            self.code.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "code":
            self.code[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)


# what is known


def test_lines_that_recorded_each_op(on):
    report = autofuse.explain(cell, torch.ones(8, 8), torch.ones(8, 8), [])
    first, *others = report.flushes
    names = [{**lines_of(cell)}[number].strip() for _, number in first.lines]
    assert names == ["h = torch.tanh(x + 1.0)"] * 2
    repeated = next(flush for flush in others if len(flush.ops) == 11)
    want = ["torch.sigmoid"] * 3 + ["h = z * h"] * 4 + ["h += "] * 2 + ["outs.append"] * 2
    assert repeated.lines == tuple((HERE, number_of(text)) for text in want)


def test_what_became_of_each_line(report, on):
    found = {number: tally for (_, number), tally in tallies(report).items()}
    turns = 3
    assert found[number_of("h = z * h")].recorded == {"mul": 2 * turns, "rsub": turns, "add": turns}
    matmul = found[number_of("torch.sigmoid")]
    assert matmul.recorded.total() == 3 * turns and matmul.ended == {"__matmul__": 1}
    assert matmul.eager == {("__matmul__", "not in the table"): turns}
    test = found[number_of("h.mean()")]
    assert test.waited == {"if h.mean() > 9": turns} and test.ended["mean"] == turns
    assert found[number_of("item()")].waited == {"h.sum().item()": turns}
    assert number_of("break") not in found
    counted = sum(tally.recorded.total() for tally in found.values())
    assert counted == report.ops_fused.total()
    eager = sum(tally.eager.total() for tally in found.values())
    assert eager == report.ops_eager.total()


def test_chains_that_are_alike(report):
    found = groups(report.flushes)
    assert sum(group.count for group in found) == len(report.flushes) > len(found)
    assert sum(group.saved for group in found) == report.bytes_saved > 0


def test_values_kept_for_backward_are_not_saved():
    p = torch.nn.Parameter(torch.ones(256))

    def loss(x):
        return (torch.tanh(torch.sigmoid(x * p * 2) * x.exp() * 3) + p).square().sum()

    report = autofuse.explain(loss, torch.ones(512, 256))
    (group,) = groups(report.flushes)
    assert group.flush.kept and group.saved == report.bytes_saved
    assert "keeps for backward" in page.document(report)


def test_ops_recorded_before_the_region_have_no_line():
    x = autofuse.wrap(torch.ones(3)) * 2
    with autofuse.explain() as report:
        autofuse.materialize(x + 1)
    assert [line is None for line in report.flushes[0].lines] == [True, False]


def test_nothing_is_left_of_it():
    """Handlers and methods are the ones that were there, also after reports inside reports."""
    before = dict(HANDLERS), dict(OPTIONS), dict(vars(autofuse.Tensor))
    with autofuse.explain(), autofuse.explain():
        assert HANDLERS[torch.sigmoid] is not before[0][torch.sigmoid]
    assert (dict(HANDLERS), dict(OPTIONS), dict(vars(autofuse.Tensor))) == before
    assert not recorded._noted and not recorded._replaced


def test_machine_code_switched_in_the_region():
    native, x = autofuse.config.native, autofuse.wrap(torch.ones(3))
    try:
        for switched in (not native, native):
            with autofuse.explain() as report:
                autofuse.config.native = switched
                autofuse.materialize(torch.exp(x * 2).neg())
            assert all(flush.ops == ("mul", "exp", "neg") for flush in report.flushes)
            autofuse.materialize(x.exp().add(1).mul(2))
    finally:
        autofuse.config.native = native
    assert autofuse.stats().ops_recorded == 12


# advice


def test_advice_has_the_policys_microseconds(report, monkeypatch):
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 100.0)
    monkeypatch.setitem(policy._OP_US, "cpu", 7.0)
    monkeypatch.setattr(policy, "_RECORDED_US", 2.0)
    found = {one.text.split(" at ")[0]: one.us for one in advice.advice_on(report)}
    assert found["h.sum().item()"] == 2 * (7.0 - 2.0)  # two of three would go
    assert found["if h.mean() > 9"] == 2 * (7.0 - 2.0 + 100.0)  # each ends a chain of `gt`, too
    kept = next(us for text, us in found.items() if text.startswith("a result of sigmoid"))
    assert kept == policy.us_moved(3 * 256, "cpu") > 0


def test_reads_that_end_chains_cost_flushes(monkeypatch):
    x = autofuse.wrap(torch.ones(4))
    with autofuse.explain() as report:
        for _ in range(4):
            (x * 2 + 1).neg().tolist()
    monkeypatch.setitem(policy.FLUSH_US, "cpu", 100.0)
    (one,) = advice.advice_on(report)
    assert one.us == 3 * 100.0 + policy.us_recorded(3, "cpu")


def test_advice_is_sorted_by_what_it_saves(report, monkeypatch):
    many = [advice.Advice("little", 1.0), advice.Advice("unknown"), advice.Advice("much", 9.5)]
    monkeypatch.setattr(advice, "_ADVISERS", (lambda *_: many,))
    assert report.advice == ["much", "little", "unknown"]
    text = "".join(Seen(page.document(report)).text)
    assert re.search(r"9\.5 µsmuch1 µslittlenot knownunknown", text)


# the page


def test_a_page_in_one_piece(report, tmp_path):
    path = report.html(str(tmp_path / "report.html"))
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    seen = Seen(text)
    assert len(seen.ids) == len({*seen.ids}) and seen.tags.count("h1") == 1
    assert not {"script", "iframe", "img", "object", "form"} & {*seen.tags}
    assert not any(name == "src" or name.startswith("on") for name, _ in seen.given)
    links = {value for name, value in seen.given if name == "href"}
    assert all(link == "data:," or link[1:] in seen.ids for link in links)
    assert "@import" not in text and "url(" not in text and "http://" not in text
    assert "https://" not in text and "default-src 'none'" in text
    assert 'lang="en"' in text and "<title>autofuse: " in text and "prefers-color-scheme" in text


def test_the_page_says_what_became_of_everything(report):
    seen = Seen(page.document(report))
    text = "".join(seen.text)
    for line in lines_of(cell).values():
        assert line in seen.code
    for flush in report.flushes:
        for source in flush.sources:
            assert source.text in seen.code
    assert "recorded 12" in text and "eager 3: __matmul__ (not in the table)" in text
    assert "waits 3: h.sum().item()" in text and "ends 1 chain: __matmul__" in text
    assert seen.tags.count("details") >= len(groups(report.flushes))
    assert repr(report).partition(": ")[2].rstrip(">") in text


def test_a_notebooks_page_is_part_of_another(report):
    text = report._repr_html_()
    seen = Seen(text)
    assert not {"html", "body", "script"} & {*seen.tags}
    style = re.search("<style>(.*?)</style>", text, re.S).group(1)
    rules = re.findall(r"(?:^|[{}])\s*([^{}@]+)\{", style)
    assert rules and all(
        part.strip().startswith(".autofuse") for rule in rules for part in rule.split(",")
    )
    other = autofuse.explain(cell, torch.ones(8, 8), torch.ones(8, 8), [])
    assert seen.ids and not {*seen.ids} & {*Seen(other._repr_html_()).ids}


def test_a_report_that_is_open_and_one_of_nothing():
    with autofuse.explain() as report:
        autofuse.materialize(autofuse.wrap(torch.ones(2)) + 1)
        assert "so far" in report._repr_html_()
    with autofuse.explain() as report:
        pass
    text = "".join(Seen(page.document(report)).text)
    assert "No chain ran." in text and "nothing was recorded" in text


def test_every_kernel_of_a_backward(monkeypatch):
    p = torch.nn.Parameter(torch.ones(4, 4))

    def step(x):
        (torch.tanh(torch.sigmoid(x * p * 2) * x.exp() * p) + p).square().sum().backward()

    report = autofuse.explain(step, torch.ones(4, 4))
    uses = [use for use in report.kernels if use.backward]
    seen = Seen(page.document(report))
    assert uses and all(use.source in seen.code for use in uses)


NASTY = """
import torch, autofuse
x = autofuse.wrap(torch.ones(3))
with autofuse.explain() as report:
    y = x * 2 + 1  # <script>window.alerted = 1</script> &amp; <img src=x onerror=alert(1)>
    y.sum()  # </code></li></ol><h1>"quoted" 'too'
"""


def nasty(folder):
    """A report about a file whose name and lines are markup."""
    path = folder / """<b onclick="x">'&amp;.py"""
    path.write_text(NASTY)
    space = {}
    exec(compile(NASTY, str(path), "exec"), space)
    return path, space["report"]


def test_source_and_names_are_text(tmp_path):
    path, report = nasty(tmp_path)
    for text in (page.document(report), report._repr_html_()):
        seen = Seen(text)
        assert NASTY.splitlines()[4] in seen.code and NASTY.splitlines()[5] in seen.code
        assert not {"script", "img", "b"} & {*seen.tags} and seen.tags.count("h1") == 1
        assert path.name in "".join(seen.text)
        assert not any(name.startswith("on") for name, _ in seen.given)


def test_names_that_are_no_text(tmp_path):
    """A file name of other bytes, source that has gone, and lines beyond the end of a file."""
    name = str(tmp_path / "\udce9.py")
    x = autofuse.wrap(torch.ones(3))
    space = {"autofuse": autofuse, "x": x}
    with autofuse.explain() as report:
        exec(compile("\n" * 80 + "autofuse.materialize(x * 2 + 1)", name, "exec"), space)
    written = report.html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "\\udce9.py" in written and not linecache.getline(name, 81)
    ((_, (only,)),) = listings(tallies(report))
    assert only.number == 81 and only.text == ""


def test_lines_between_are_left_out(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("y = x * 2\n" + "\n" * 50 + "z = (y + 1).sum()\n" + "\n" * 50)
    space = {"x": autofuse.wrap(torch.ones(3))}
    with autofuse.explain() as report:
        exec(compile(path.read_text(), str(path), "exec"), space)
    ((name, lines),) = listings(tallies(report))
    assert name == str(path)
    assert [line.number for line in lines] == [1, 2, 3, 4, 5, 49, 50, 51, 52, 53, 54, 55]
    assert [line.number for line in lines if line.text is None] == [5]


def test_cells_of_notebooks_have_their_numbers(report, monkeypatch):
    """In what is printed, too; a file that is there keeps its name."""
    cells = {flush.position[0]: ("Cell", "In[3]") for flush in report.flushes}
    compiler = SimpleNamespace(format_code_name=cells.get)
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert "Cell In" not in page.document(report)
    cells["/tmp/ipykernel_7/8.py"] = "Cell", "In[4]"
    report.flushes[0].position = "/tmp/ipykernel_7/8.py", 2
    assert "at Cell In[4]:2" in page.document(report) and "at Cell In[4]:2" in str(report)
    shell.compile = None  # of another program that has IPython
    assert "at /tmp/ipykernel_7/8.py:2" in str(report)


def many(report, count):
    """The same with so many flushes, no two alike."""
    base = next(flush for flush in report.flushes if flush.sources)
    report.flushes += [
        dataclasses.replace(base, position=(HERE, 1 + k % 9000), reason=f"reason {k}")
        for k in range(count)
    ]
    return report


def test_many_flushes_make_a_page_that_is_not_long(report):
    alike, count = len(groups(report.flushes)), 10_000
    text = page.document(many(report, count))
    assert len(text) < 3_000_000
    seen = Seen(text)
    left = alike + count - page.MOST_CHAINS
    assert seen.tags.count("details") < 2 * page.MOST_CHAINS + 9
    assert f"{left:g} other chains, run {left:,} times, are left out" in "".join(seen.text)
    assert "lines more are left out" in "".join(seen.text)


# in a browser


@pytest.fixture(scope="module")
def browser():
    if not (DRIVER and BROWSER):
        pytest.skip("no browser: Debian has them as chromium and chromium-driver")
    with tempfile.TemporaryDirectory(prefix="autofuse-browser-") as profile:
        opened = Browser(Path(profile))
        try:
            yield opened
        finally:
            opened.close()


VISIBLE = "return document.querySelector(arguments[0]).checkVisibility()"


def test_a_click_shows_the_kernel(browser, report, tmp_path):
    browser.open(report.html(tmp_path / "report.html"))
    browser.shown_as("light", 1200)
    assert not browser.run(VISIBLE, "#chain-1 pre")
    browser.click("#chain-1 > summary")
    browser.click("#chain-1 .kernel > summary")
    assert browser.run(VISIBLE, "#chain-1 pre")
    text = browser.run("return document.querySelector('#chain-1 pre').innerText")
    assert text.strip() == report.flushes[0].sources[0].text.strip()


def test_a_keyboard_alone_shows_the_kernel(browser, report, tmp_path):
    browser.open(report.html(tmp_path / "report.html"))
    browser.shown_as("light", 1200)
    focused = "return document.activeElement.closest('details')?.id ?? ''"
    for _ in range(20):
        browser.press("\ue004")  # Tab
        if browser.run(focused) == "chain-1":
            break
    browser.press("\ue007")  # Enter
    browser.press("\ue004")
    browser.press(" ")
    assert browser.run(VISIBLE, "#chain-1 pre")
    browser.press("\ue004")  # the text, which scrolls
    assert browser.run("return document.activeElement.tagName") == "PRE"


# elements whose text has less than 4.5 times the light of what is behind it, or is cut off
POOR = """
function channel(v) { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 }
function light(c) { return 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]) }
function colour(text) { return text.match(/[\\d.]+/g).map(Number) }
function behind(e) {
  for (; e; e = e.parentElement) {
    const c = colour(getComputedStyle(e).backgroundColor)
    if (c.length < 4 || c[3] > 0) return c
  }
  return [255, 255, 255]
}
document.querySelectorAll('details').forEach(d => { d.open = true })
const poor = []
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.tagName === 'STYLE') continue
  const [a, b] = [light(colour(getComputedStyle(e).color)), light(behind(e))]
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
  const box = e.getBoundingClientRect()
  const cut = !e.closest('pre') && (box.right > window.innerWidth + 1 || box.left < -1)
  if (ratio < 4.5 || cut) poor.push([e.className || e.tagName, e.textContent.slice(0, 30), ratio])
}
return poor
"""  # noqa: E501


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_read(browser, report, tmp_path, width, scheme):
    """In both schemes, and without scrolling sideways on a telephone."""
    browser.open(report.html(tmp_path / "report.html"))
    browser.shown_as(scheme, width)
    assert browser.run(POOR) == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    paper = browser.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_a_screen_reader_is_told(browser, report, tmp_path):
    """By the tree that the browser gives to one."""
    browser.open(report.html(tmp_path / "report.html"))
    nodes = browser.devtools("Accessibility.getFullAXTree")["nodes"]
    told = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    roles = [role for role, _ in told]
    assert "main" in roles and roles.count("table") == 1 and "columnheader" in roles
    headings = [name for role, name in told if role == "heading"]
    assert headings[:2] == ["What autofuse did", "What would help"]
    opens = [name for role, name in told if role == "DisclosureTriangle"]
    assert any("2 ops: 1 kernel" in name for name in opens)
    spoken = " ".join(name for role, name in told if role == "StaticText")
    assert "recorded 12" in spoken and "waits 3" in spoken
    assert "●" not in spoken  # signs are for the eye


def test_markup_in_a_line_does_nothing(browser, tmp_path):
    _, report = nasty(tmp_path)
    browser.messages()
    browser.open(report.html(tmp_path / "report.html"))
    assert browser.run("return window.alerted === undefined")
    assert "<script>window.alerted = 1</script>" in browser.run("return document.body.innerText")
    loaded = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert browser.messages() == []


def test_ten_thousand_flushes_open_in_two_seconds(browser, report, tmp_path):
    path = many(report, 10_000).html(tmp_path / "report.html")
    times = []
    for _ in range(3):
        began = time.perf_counter()
        browser.open(path)
        browser.run("return document.body.getBoundingClientRect().height")  # laid out
        times.append(time.perf_counter() - began)
    assert min(times) < 2.0
