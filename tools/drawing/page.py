"""The one style of everything drawn: elements, tables, pages, pictures on a page or in a file of their own; its colours
are in the files of CSS. Nothing asks anybody for anything (floor 0, pure)."""

from __future__ import annotations

import dataclasses
import html
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron.core.safe_files import read_text

PLOT_STYLE, _PAGE_STYLE, _ZOOM = (
    read_text(Path(__file__).with_name(name), max_bytes=1 << 16, follow=True)
    for name in ("plot.css", "page.css", "zoom.js")
)
ZOOM = f"<script>//<![CDATA[\n{_ZOOM}//]]></script>"  # optional: without it a page shows the same, as a whole
WIDE = 10_000  # units of x across a plot, of paths that stretch with it
LETTER = 6.3  # pixels of a letter or digit, about
NARROWEST = 280  # pixels of a plot, on a phone
COLOURS = 6  # of curves
_LONG = 200  # characters: a longer note is folded on a page
# What the contents list names: headings, and what can be folded, without what is counted in it.
_PART = re.compile(r'<(?:h2|details) id="(?P<anchor>[^"]+)"[^>]*>(?:<summary>)?(?P<title>[^<(]+?)(?= ?[<(])')


@dataclasses.dataclass(frozen=True)
class Key:
    """An entry of a legend. colour: as CSS has it, or several of boxes with blanks between them; kind: "line", "dot",
    "box"."""

    text: str
    colour: str = ""
    kind: str = "box"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A column of labels, and a plot whose x is in percent of its width and whose y is in pixels: a page makes it as
    wide as the screen without a script, and letters keep their size.

    labels, plot: markup; a plot of "" says that there is nothing to draw. height, label_width, least_width: in pixels;
    where the plot would be narrower than its least width, it scrolls. note: sentences below. axes: what the page's
    script knows of the plot's axes, as zoom.js says.
    """

    title: str
    labels: str
    plot: str
    height: int
    keys: tuple[Key, ...] = ()
    label_width: int = 52
    least_width: int = 0
    note: str = ""
    axes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def figure(self, *, wide: bool = False) -> str:
        """A `<figure>` of a page. wide: as wide as the page."""
        drawn = element("div", "no values", class_="empty")
        if self.plot:
            left = element("svg", self.labels, class_="plot", width=self.label_width, height=self.height)
            least = f"min-width:{self.least_width}px" if self.least_width else None
            named = {"role": "img", "aria_label": self.title}
            plot = element(
                "svg",
                self.plot,
                class_="plot",
                width="100%",
                height=self.height,
                style=least,
                **named,
                **self.axes,
            )
            drawn = element(
                "div", left, element("div", plot, class_="scroll" if least else None), class_="drawn"
            )
        note = element("p", html.escape(self.note), class_="note") if self.note else ""
        if len(self.note) > _LONG:
            note = element("details", element("summary", "What it shows"), note)
        needs = f"--needs:{self.label_width + self.least_width + 8}px"
        hint = "The picture goes on to the right: scroll it."
        scrolls = element("i", hint, style=needs) if self.least_width else ""
        caption = element("figcaption", element("b", html.escape(self.title)), legend(self.keys), scrolls)
        return element("figure", caption, drawn, note, class_="wide" if wide else None)

    def svg(self, width: int = 760) -> str:
        """A file of its own, `width` pixels wide; more where the plot needs more."""
        width = max(width, self.label_width + self.least_width + 24)
        inside, x, y = [text(self.title, 12, 20, class_="title")], width, 20
        for key in self.keys:
            begin = _swatch_width(key) + 5 if key.colour else 0
            needs = begin + 12 + round(LETTER * len(key.text))
            if x + needs > width:
                x, y = 12, y + 18
            inside.append(element("svg", _swatch(key), text(key.text, begin, 9), x=x, y=y - 9, class_="plot"))
            x += needs
        box = {"class_": "plot", "height": self.height, "y": y + 10}
        inside.append(element("svg", self.labels, x=4, width=self.label_width, **box))
        plot_width = width - self.label_width - 18
        inside.append(element("svg", self.plot, x=4 + self.label_width, width=plot_width, **box))
        y += 8 + self.height
        for line in textwrap.wrap(self.note, round((width - 24) / 5.4)):
            y += 15
            inside.append(text(line, 12, y))
        height = y + 12
        ground = element("rect", width=width, height=height, rx=8, class_="ground")
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{PLOT_STYLE}</style>\n'
        return head + "\n".join([ground, *inside]) + "\n</svg>\n"


def legend(keys: Iterable[Key]) -> str:
    """Markup of a page."""
    return "".join(element("span", _swatch(key), html.escape(key.text), class_="key") for key in keys)


def _swatch(key: Key) -> str:
    """A picture, 10 pixels high; nothing for a key without a colour."""
    if not key.colour:
        return ""
    colours, width = key.colour.split(), _swatch_width(key)
    if key.kind == "dot":
        drawn = element("circle", cx=7, cy=5, r=4, fill=key.colour)
    else:
        high, own = 3 if key.kind == "line" else 10, width / len(colours)
        size = {"y": 5 - high / 2, "width": own, "height": high, "rx": 1}
        drawn = "".join(
            element("rect", **size, fill=one, x=own * at or None) for at, one in enumerate(colours)
        )
    return element("svg", drawn, width=width, height=10)


def _swatch_width(key: Key) -> int:
    return max(14, 10 * len(key.colour.split()))


def element(name: str, *content: str, **attributes: object) -> str:
    """An element of HTML or SVG. content: markup. attributes: texts, which are escaped here; None is left out, `class_`
    is class, other `_` are `-`."""
    said = ""
    for key, value in attributes.items():
        if value is not None:
            written = f"{value:g}" if isinstance(value, float) else html.escape(str(value))
            said += f' {key.rstrip("_").replace("_", "-")}="{written}"'
    return f"<{name}{said}>{''.join(content)}</{name}>"


def text(words: str, x: float | str, y: float, **attributes: object) -> str:
    """A line of text in a picture. words: escaped here."""
    return element("text", html.escape(words), x=x, y=y, **attributes)


def percent(share: float) -> str:
    """Where a share of a plot's width is in it."""
    return f"{100 * share:.2f}%"


def stretched(height: float, *paths: str) -> str:
    """Paths whose x goes from 0 to WIDE over the whole width of the plot. height: of the plot down to here."""
    box = f"0 0 {WIDE} {height:g}"
    return element("svg", *paths, viewBox=box, preserveAspectRatio="none", width="100%", height=height)


def x_axis(ticks: Iterable[tuple[float, str]], y: float, name: str, *, left: bool = False) -> str:
    """A horizontal axis, 34 pixels high. ticks: shares of the width and their texts. left: where its name is."""
    parts = [element("line", class_="axis", x1="0%", x2="100%", y1=y, y2=y)]
    for share, words in ticks:
        x, anchor = percent(share), "start" if share < 0.01 else "end" if share > 0.99 else "middle"
        parts.append(element("line", class_="axis tick", x1=x, x2=x, y1=y, y2=y + 4))
        parts.append(text(words, x, y + 16, text_anchor=anchor, class_="tick"))
    where = ("0%", "start") if left else ("50%", "middle")
    parts.append(text(name, where[0], y + 31, text_anchor=where[1], class_="whole"))
    return "".join(parts)


def page(title: str, body: Iterable[str]) -> str:
    """A whole page in this style, with a contents list behind its header. body: markup; empty parts are left out."""
    head = (
        '<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{html.escape(title)}</title>\n<style>{PLOT_STYLE}{_PAGE_STYLE}</style>"
    )
    inside = "\n".join(filter(None, body))
    parts = [*_PART.finditer(inside)]
    if len(parts) > 2:
        links = (element("a", part["title"], href=f"#{part['anchor']}") for part in parts)
        head_of_page, end, rest = inside.partition("</header>")
        inside = head_of_page + end + element("nav", *links, aria_label="Contents") + rest
    if "data-x=" in inside:
        inside += ZOOM
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{inside}\n</body>\n</html>\n'


def heading(title: str) -> str:
    """Of a part, which the contents list names."""
    return element("h2", html.escape(title), id=_anchor(title))


def _anchor(title: str) -> str:
    """Of a heading, without what is counted in it."""
    return re.sub(r"[^\w.]+", "-", title.partition(" (")[0].lower()).strip("-")


def fold(title: str, *content: str, is_open: bool = False) -> str:
    """A part of a page that can be folded. content: markup."""
    return element(
        "details",
        element("summary", html.escape(title)),
        *content,
        id=_anchor(title),
        open="open" if is_open else None,
    )


def table(rows: Iterable[Iterable[str]], head: Iterable[str] = ()) -> str:
    """A table that scrolls where it is too wide. rows: cells, as texts; the first of a row is its heading. head: the
    first row, all of headings."""
    lines = [element("tr", *(element("th", html.escape(cell)) for cell in head))] if head else []
    for first, *others in rows:
        cells = (element("td", html.escape(cell)) for cell in others)
        lines.append(element("tr", element("th", html.escape(first)), *cells))
    return element("div", element("table", *lines), class_="scroll")


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """The figures that one wants first. figures: (name, value, note)."""
    cells = []
    for name, value, note in figures:
        parts = (("name", name), ("value", value), ("note", note))
        cells.append(
            element("div", *(element("div", html.escape(said), class_=kind) for kind, said in parts))
        )
    return element("section", *cells, class_="tiles")
