#!/usr/bin/env python3
"""Converts the output of `tmux capture-pane -e -p` to an SVG picture of the terminal.

    tmux capture-pane -e -p -t SESSION | scripts/terminal_to_svg.py --title "inferno play" -o docs/play.svg

The SVG keeps colors, bold, italic and underlined text. It aligns text to the terminal's grid, so the layout is the same
in every monospace font.
"""

import argparse
import re
import sys
import unicodedata
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path

BACKGROUND, FOREGROUND, BAR = "#16181d", "#d7dae0", "#22252c"
PALETTE = [
    *("#3b4048", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#c8ccd4"),
    *("#5c6370", "#ff7a85", "#b5e890", "#ffd68a", "#7cc4ff", "#e08cff", "#6fd6e2", "#ffffff"),
]
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
FONT_SIZE, CELL, LINE, MARGIN, TITLE_HEIGHT = 14, 8.4, 20, 16, 34

JOINER = "\u200d"  # joins several emoji into one character
EMOJI_STYLE = "\ufe0f"  # shows the character before it as an emoji, which is wide

ESCAPE = re.compile(
    r"\x1b\[([0-9;:]*)m"  # SGR sequences, which set colors and styles; all other sequences are dropped
    r"|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)"  # other CSI sequences; OSC sequences, such as links
    r"|\x1b[ -/]*[0-~]|[\x00-\x1f]"  # other escapes, such as character set switches; control characters
)


@dataclass(frozen=True)
class Style:
    color: str | None = None
    background: str | None = None
    bold: bool = False
    dim: bool = False
    italic: bool = False
    underline: bool = False
    inverse: bool = False

    def colors(self):
        """Returns the text color and the background color, which is None for the window's own background."""
        color, background = self.color or FOREGROUND, self.background
        if self.inverse:
            color, background = background or BACKGROUND, color
        if self.dim:
            color = blend(color, background or BACKGROUND)
        return color, background


def blend(color, behind, share=0.55):
    pairs = ((int(color[i : i + 2], 16), int(behind[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)


def indexed(index):
    """Returns a color from the 256-color palette: 16 named colors, a 6 × 6 × 6 cube and shades of gray."""
    if index < 16:
        return PALETTE[index]
    if index < 232:
        cube = index - 16
        levels = (cube // 36, cube // 6 % 6, cube % 6)
        return "#" + "".join(f"{55 + 40 * level if level else 0:02x}" for level in levels)
    return "#" + f"{8 + 10 * (index - 232):02x}" * 3


def take_color(subparameters, fields):
    """Returns the color that an SGR code 38, 48 or 58 specifies, or None if it specifies no valid color.

    The color is in the code's sub-parameters, as in `38:5:1`, or in the next fields, as in `38;5;1`.
    Removes the next fields from `fields` if they contain the color.
    """
    if subparameters:
        kind, *values = subparameters
        if kind == 2 and len(values) > 3:
            values = values[1:]  # without the color space, which is usually empty, as in `38:2::255:0:0`
    else:
        kind = fields.pop(0)[0] if fields else None
        count = {5: 1, 2: 3}.get(kind, 0)
        values = [field[0] for field in fields[:count]]
        del fields[:count]
    values = [min(value, 255) for value in values]
    if kind == 5 and values:
        return indexed(values[0])
    if kind == 2 and len(values) >= 3:
        return "#" + "".join(f"{value:02x}" for value in values[:3])
    return None


def apply(style, parameters):
    """Applies one SGR sequence to a style. Returns the new style.

    `;` separates fields. `:` separates a code from its sub-parameters, as in `4:3`, a curly underline.
    """
    fields = [[int(value or 0) for value in field.split(":")] for field in parameters.split(";")]
    flags = {1: "bold", 2: "dim", 3: "italic", 7: "inverse"}
    while fields:
        code, *subparameters = fields.pop(0)
        if code == 0:
            style = Style()
        elif code in flags:
            style = replace(style, **{flags[code]: True})
        elif code in (4, 21):  # 21 is a double underline; `4:0` is no underline
            style = replace(style, underline=subparameters != [0])
        elif code == 22:
            style = replace(style, bold=False, dim=False)
        elif code == 24:
            style = replace(style, underline=False)
        elif code in (23, 27):
            style = replace(style, **{flags[code - 20]: False})
        elif code in (38, 48, 58):
            color = take_color(subparameters, fields)
            if color and code != 58:  # 58 is the color of the underline, which the picture does not show
                style = replace(style, **{"color" if code == 38 else "background": color})
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style = replace(style, color=PALETTE[code - 30 if code < 90 else code - 82])
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style = replace(style, background=PALETTE[code - 40 if code < 100 else code - 92])
        elif code == 39:
            style = replace(style, color=None)
        elif code == 49:
            style = replace(style, background=None)
    return style


def is_mark(character):
    """Returns whether a character belongs to the character before it: a combining mark, a joiner or a skin tone."""
    is_skin_tone = "\U0001f3fb" <= character <= "\U0001f3ff"
    return unicodedata.category(character) in ("Mn", "Me") or character == JOINER or is_skin_tone


def clusters(text):
    """Splits a text into the characters that a terminal shows: each with its marks and the emoji joined to it."""
    found = []
    for character in text:
        is_joined = found and found[-1].endswith(JOINER) and unicodedata.category(character) == "So"
        if found and (is_mark(character) or is_joined):
            found[-1] += character
        else:
            found.append(character)
    return found


def cells(cluster):
    """Returns the number of terminal cells that a character from `clusters` occupies."""
    if unicodedata.category(cluster[0]) in ("Mn", "Me") or cluster[0] == JOINER:
        return 0
    return 2 if unicodedata.east_asian_width(cluster[0]) in "WF" or EMOJI_STYLE in cluster else 1


def width(text):
    """Returns the number of terminal cells that a text occupies."""
    return sum(map(cells, clusters(text)))


def parse(text):
    """Returns each line as a list of (column, text, style). A style lasts until it changes, even across lines."""
    lines, style = [], Style()
    for line in text.split("\n"):
        runs, column, start = [], 0, 0
        for match in [*ESCAPE.finditer(line), None]:
            piece = line[start : match.start() if match else len(line)]
            for _, group in groupby(clusters(piece), cells):  # wide characters form separate runs
                group = "".join(group)
                runs.append((column, group, style))
                column += width(group)
            if match:
                start = match.end()
                if match.group(1) is not None:
                    style = apply(style, match.group(1))
        lines.append(runs)
    return lines


def is_blank(runs):
    return all(not text.strip() and not style.colors()[1] for _, text, style in runs)


def draw(lines, title, columns):
    while lines and is_blank(lines[-1]):
        lines.pop()
    used = max((column + width(text.rstrip()) for runs in lines for column, text, _ in runs), default=0)
    columns = max(columns or 0, used, len(title) + 16)
    w, h = round(columns * CELL + 2 * MARGIN), TITLE_HEIGHT + len(lines) * LINE + 2 * MARGIN - 6
    buttons = enumerate(("#ff5f57", "#febc2e", "#28c840"))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{w}" height="{h}" rx="9" fill="{BACKGROUND}"/>',
        f'<path d="M0 {TITLE_HEIGHT}V9a9 9 0 0 1 9-9h{w - 18}a9 9 0 0 1 9 9v{TITLE_HEIGHT - 9}z" fill="{BAR}"/>',
        *(f'<circle cx="{20 + 20 * i}" cy="17" r="6" fill="{c}"/>' for i, c in buttons),
        f'<g font-family="{FONT}" font-size="{FONT_SIZE}" fill="{FOREGROUND}">',
        f'<text x="{w / 2:g}" y="22" text-anchor="middle" fill="{blend(FOREGROUND, BAR)}">{escape(title)}</text>',
    ]
    for row, runs in enumerate(lines):
        top = TITLE_HEIGHT + MARGIN - 3 + row * LINE
        for column, text, style in runs:
            color, background = style.colors()
            x, length = round(MARGIN + column * CELL, 1), round(width(text) * CELL, 1)
            if background:
                out.append(f'<rect x="{x:g}" y="{top}" width="{length:g}" height="{LINE}" fill="{background}"/>')
            # Drop the leading and trailing spaces of the run. The other characters stay in their columns.
            shown = text.strip(" ")
            if not shown:
                continue
            x = round(x + (len(text) - len(text.lstrip(" "))) * CELL, 1)
            length = round(width(shown) * CELL, 1)
            look = {
                "fill": color if color != FOREGROUND else None,
                "font-weight": "bold" if style.bold else None,
                "font-style": "italic" if style.italic else None,
                "text-decoration": "underline" if style.underline else None,
            }
            look = "".join(f' {name}="{value}"' for name, value in look.items() if value)
            out.append(
                f'<text x="{x:g}" y="{top + 15}" textLength="{length:g}" lengthAdjust="spacingAndGlyphs"'
                f' xml:space="preserve"{look}>{escape(shown)}</text>'
            )
    return "\n".join([*out, "</g>", "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="?", type=Path, help="captured text [standard input]")
    parser.add_argument("-o", "--output", type=Path, help="the SVG file [standard output]")
    parser.add_argument("--title", default="inferno", help="the title of the window [inferno]")
    parser.add_argument("--columns", type=int, default=80, help="the minimum width of the window in columns [80]")
    args = parser.parse_args()
    data = args.input.read_bytes() if args.input else sys.stdin.buffer.read()
    svg = draw(parse(data.decode("utf-8", "replace").replace("\r\n", "\n")), args.title, args.columns)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(svg, encoding="utf-8")
    else:
        sys.stdout.write(svg)


if __name__ == "__main__":
    main()
