#!/usr/bin/env python3
"""Draws what unisono-bench has measured: bench-svg.py [options] OUT.svg FILE.json...

A panel for each file, as `unisono-bench OPERATION... --json FILE` writes it: above, microseconds against bytes for whoever was
measured; below, how many times longer the others take than the first. --markdown prints the numbers as tables, too.
"""

import argparse
import itertools
import json
import math
import sys
from html import escape
from pathlib import Path

WIDTH, TIMES, RATIOS = 440, 210, 110  # A panel, and the heights of its two parts.
LEFT, GAP, TOP, BETWEEN, BOTTOM = 52, 40, 58, 26, 62
INK, GRID = "#57606a", "#d0d7de"
COLORS = ["#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#0e7490", "#57606a"]


CASE = ["type", "operator", "root", "transport", "algorithm", "place"]  # What rows of one operation, call and size may differ in.


def rows_of(path):
    """What a file has, and its rows."""
    try:
        content = json.loads(Path(path).read_text())
        rows = content["results"]
        if all(key in row for row in rows for key in ("operation", "call", "bytes", "peers", *CASE)) and content["ranks"]:
            return content, rows
        what = "no collectives"
    except (OSError, ValueError) as error:
        what = error
    except (KeyError, TypeError):
        what = "no collectives"
    sys.exit(f"{path} cannot be drawn: {what}; files of `unisono-bench OPERATION... --json FILE` can")


def measured(path, operation, call, only):
    """The ranks of a file, and for each that was measured microseconds by bytes, the first one first."""
    content, rows = rows_of(path)
    series, drawn = {}, {}
    for row in rows:
        if row["operation"] != operation or row["call"] != call or any(str(row.get(key)) != value for key, value in only.items()):
            continue
        here = row.get("subjects") or {f"unisono ({row['transport']})": row}
        for name, cell in here.items():
            if not cell.get("p50_us"):
                continue
            other = drawn.setdefault((name, row["bytes"]), row)
            if other is not row:
                differ = [f"{key} {other[key]} and {row[key]}" for key in CASE if other[key] != row[key]]
                sys.exit(f"{path} has {name} twice for {row['bytes']} bytes: {', '.join(differ) or 'the same'}; --only KEY=VALUE chooses")
            series.setdefault(name, {})[row["bytes"]] = cell["p50_us"]
        # Their lines name operation and size alone: all such rows have the same.
        for name, cell in row["peers"].items():
            series.setdefault(name, {})[row["bytes"]] = cell["p50_us"]
    # JSON objects are sorted by name; the list tells who is first.
    order = content.get("subjects", [])
    ranked = sorted(series.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    return content["ranks"], dict(ranked)


def size_name(size):
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size >= unit:
            return f"{size // unit}{name}"
    return str(size)


def markdown(title, series):
    """A table of times, and of the others' times over the first's; in bold where the first is ahead."""
    first, *others = series
    heads = [title, first, *(head for name in others for head in (name, "×"))]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for size, time in sorted(series[first].items()):
        cells = [long_size_name(size), short(time)]
        for name in others:
            other = series[name].get(size)
            ratio = f"{other / time:.2f}" if other else "–"
            cells += [short(other) if other else "–", f"**{ratio}**" if other and other > time else ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def short(time):
    """Three digits, as far as they say anything."""
    return f"{time:.2f}" if time < 10 else f"{time:.1f}" if time < 100 else f"{time:.0f}"


def long_size_name(size):
    name = size_name(size)
    return name if name.isdigit() else f"{name[:-1]} {name[-1]}iB"


class Panel:
    def __init__(self, left, title, series, names, top_ratio):
        self.left, self.title, self.series, self.names = left, title, series, names
        sizes = sorted({size for times in series.values() for size in times})
        times = [time for by_size in series.values() for time in by_size.values()]
        self.sizes = [math.log2(max(sizes[0], 1)), math.log2(max(sizes[-1], 2))]
        self.times = [math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))]
        self.ratios = [0, top_ratio]

    def x(self, size):
        low, high = self.sizes
        return self.left + (WIDTH - LEFT) * (math.log2(max(size, 1)) - low) / max(high - low, 1)

    def y_time(self, time):
        low, high = self.times
        return TOP + TIMES * (1 - (math.log10(time) - low) / max(high - low, 1))

    def y_ratio(self, ratio):
        return TOP + TIMES + BETWEEN + RATIOS * (1 - ratio / self.ratios[1])

    def draw(self):
        right, out = self.left + WIDTH - LEFT, [text(self.left, TOP - 14, self.title, INK, "start", True)]
        for power in range(self.times[0], self.times[1] + 1):
            y = self.y_time(10**power)
            out += [line(self.left, right, y), text(self.left - 6, y + 4, f"{10**power:g}" if power < 5 else f"1e{power}", INK, "end")]
        for ratio in range(0, self.ratios[1] + 1):
            y = self.y_ratio(ratio)
            out += [line(self.left, right, y, ratio == 1), text(self.left - 6, y + 4, f"{ratio}×", INK, "end")]
        low, high = (math.ceil(bound / 5) * 5 for bound in self.sizes)
        for power in range(low, high + 1, 5):
            if self.sizes[0] <= power <= self.sizes[1]:
                out.append(text(self.x(2**power), TOP + TIMES + BETWEEN + RATIOS + 18, size_name(2**power), INK))
        first = next(iter(self.series.values()))
        for name, times in self.series.items():
            color = COLORS[self.names.index(name) % len(COLORS)]
            out.append(curve([(self.x(size), self.y_time(time)) for size, time in sorted(times.items())], color))
            ratios = [(size, time / first[size]) for size, time in sorted(times.items()) if size in first]
            if times is not first:
                top = self.ratios[1]
                out.append(curve([(self.x(size), self.y_ratio(min(ratio, top))) for size, ratio in ratios], color))
                # What lies above the panel stands at its edge, with its number.
                beyond = [(size, ratio) for size, ratio in ratios if ratio > top]
                out += [text(self.x(size), self.y_ratio(top) - 5, f"↑{short(ratio)}×", color) for size, ratio in beyond]
        return out


def line(left, right, y, strong=False):
    return f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{INK if strong else GRID}"/>'


def text(x, y, words, color=INK, anchor="middle", bold=False):
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def curve(points, color):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{color}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>{dots}'


def pairs(option, given):
    """What KEY=TEXT,... says."""
    try:
        return dict(pair.split("=", 1) for pair in given.split(",") if pair)
    except ValueError:
        sys.exit(f"{option} takes KEY=VALUE,..., not {given}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operation", default="allreduce")
    parser.add_argument("--call", default="graph", help="graph (the default), stream, blocking or work")
    parser.add_argument("--only", default="", help=f"KEY=VALUE,...: rows with these alone, of {', '.join(CASE)}")
    parser.add_argument("--unit", default="GPUs", help="what a rank is, for the titles")
    parser.add_argument("--names", default="", help="KEY=TEXT,... for the legend; who has an empty TEXT is left out")
    parser.add_argument("--markdown", action="store_true", help="print tables, too")
    parser.add_argument("out", metavar="OUT.svg")
    parser.add_argument("files", metavar="FILE.json", nargs="+")
    arguments = parser.parse_args()
    renamed, only = pairs("--names", arguments.names), pairs("--only", arguments.only)
    if unknown := only.keys() - set(CASE):
        sys.exit(f"--only knows no {', '.join(sorted(unknown))}; it knows {', '.join(CASE)}")

    found = []
    for path in arguments.files:
        ranks, series = measured(path, arguments.operation, arguments.call, only)
        series = {renamed.get(name, name): times for name, times in series.items() if renamed.get(name, name)}
        if not series:
            sys.exit(f"{path} has no {arguments.operation} called by {arguments.call}")
        found.append((f"{arguments.operation}, {ranks} {arguments.unit}", series))
    if arguments.markdown:
        print("\n".join(markdown(title, series) for title, series in found))
    names = list(dict.fromkeys(name for _, series in found for name in series))
    worst = 2.0
    for _, series in found:
        first = next(iter(series.values()))
        worst = max([worst, *(t / first[s] for times in series.values() for s, t in times.items() if s in first)])
    panels = [Panel(LEFT + i * (WIDTH + GAP), title, series, names, min(math.ceil(worst), 5))
              for i, (title, series) in enumerate(found)]

    legend, x = [], LEFT
    for name, color in zip(names, itertools.cycle(COLORS)):
        legend += [f'<path d="M{x} 16h18" stroke="{color}" stroke-width="3"/>', text(x + 24, 20, name, color, "start")]
        x += 48 + 7 * len(name)
    width = max(LEFT + len(panels) * (WIDTH + GAP) - GAP, x)
    height = TOP + TIMES + BETWEEN + RATIOS + BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" '
        f'role="img" aria-label="{escape("; ".join(title for title, _ in found))}: time by size">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *legend,
    ]
    for panel in panels:
        out += panel.draw()
    below = f"µs a call (above) and times the first's (below), by bytes; calls: {arguments.call}"
    out += [text(LEFT, height - 12, below, INK, "start"), "</svg>\n"]
    Path(arguments.out).write_text("\n".join(out))


if __name__ == "__main__":
    main()
