#!/usr/bin/env python3
"""Draws a training curve: curve-svg.py CURVE.csv OUT.svg

CURVE.csv is what `digits --curve CURVE.csv` writes: step, loss, held-out accuracy.
"""

import csv
import sys

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 40, 44
LOSS, ACCURACY, INK, GRID = "#c2410c", "#1d4ed8", "#57606a", "#d0d7de"


def main(source, target):
    with open(source, newline="") as file:
        rows = [(int(step), float(loss), float(accuracy)) for step, loss, accuracy in csv.reader(file)]
    steps = rows[-1][0]
    top_loss = max(loss for _, loss, _ in rows)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(part):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    def line(color, points):
        path = " ".join(f"{x(step):.1f},{y(part):.1f}" for step, part in points)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'

    def text(at_x, at_y, words, color=INK, anchor="middle"):
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" fill="{color}" text-anchor="{anchor}">{words}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" '
        'role="img" aria-label="Loss and held-out accuracy against training steps">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for part in (0, 0.25, 0.5, 0.75, 1):
        out.append(f'<path d="M{LEFT} {y(part):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        out.append(text(LEFT - 8, y(part) + 4, f"{part * top_loss:.2f}", LOSS, "end"))
        out.append(text(WIDTH - RIGHT + 8, y(part) + 4, f"{part:.2f}", ACCURACY, "start"))
    for step in range(0, steps + 1, steps // 4):
        out.append(text(x(step), HEIGHT - BOTTOM + 18, step))
    out.append(text(WIDTH / 2, HEIGHT - 8, "training steps (full batch, one allreduce each)"))
    out.append(text(LEFT, TOP - 16, "loss", LOSS, "start"))
    out.append(text(WIDTH - RIGHT, TOP - 16, "accuracy on held-out rows", ACCURACY, "end"))
    out.append(line(LOSS, [(step, loss / top_loss) for step, loss, _ in rows]))
    out.append(line(ACCURACY, [(step, accuracy) for step, _, accuracy in rows]))
    out.append(text(x(steps) - 6, y(rows[-1][2]) + 18, f"{rows[-1][2]:.3f}", ACCURACY, "end"))
    out.append("</svg>\n")
    with open(target, "w") as file:
        file.write("\n".join(out))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
