"""The report of a run as a browser draws it."""
import html
import re
import shutil
import socket
import struct
import sys
import time
import zlib

from harness import PROGRAM, Case, main, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTH, HEIGHT = 1200, 1900
SLATE = (0x52, 0x62, 0x7A)  # of the memory's line in a light report


def pixels(png):
    """Rows of (red, green, blue) of a PNG of 8 bits per channel."""
    data, at, packed = png.read_bytes(), 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", data[at + 8:at + 18])
        if kind == b"IDAT":
            packed += data[at + 8:at + 8 + length]
        at += length + 12
    assert depth == 8 and color in (2, 6), (depth, color)
    size, raw = {2: 3, 6: 4}[color], zlib.decompress(packed)
    before, rows = bytes(width * size), []
    for row in range(height):
        start = row * (width * size + 1)
        kind, line = raw[start], bytearray(raw[start + 1:start + 1 + width * size])
        for i in range(width * size if kind else 0):
            left, up, corner = (line[i - size] if i >= size else 0), before[i], (before[i - size] if i >= size else 0)
            guess = left + up - corner
            paeth = min((left, up, corner), key=lambda value: abs(guess - value))  # pylint: disable=cell-var-from-loop
            line[i] = (line[i] + (0, left, up, (left + up) // 2, paeth)[kind]) & 255
        before = bytes(line)
        rows.append([tuple(line[i:i + 3]) for i in range(0, width * size, size)])
    return rows


class Report(Case):
    def browse(self, page, *flags):
        status, out, err = run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
                                f"--user-data-dir={self.folder / 'profile'}", f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=2000",
                                "--enable-logging=stderr", *flags, page.as_uri()], timeout_s=60)
        self.assertEqual(status, 0, err)
        self.assertNotRegex(err, "CONSOLE.*(Error|error)")
        return out

    def test_a_browser_draws_every_curve_and_shows_where_the_run_comes_from(self):
        (self.folder / "story.txt").write_text("".join(f"line {i * 7919 % 1000} of the story\n" for i in range(3000)))
        model = self.write("tiny.json", '{"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, '
                                        '"num_attention_heads": 2}')
        status, _, err = run([PROGRAM, "train", "--data", "story.txt", "--model", model, "--seq", "16", "--batch", "2", "--steps", "45", "--eval-samples", "4",
                              "--eval-every", "20", "--out", "the run"], folder=self.folder)
        self.assertEqual(status, 0, err)
        page = self.folder / "the run/report.html"
        shot = self.folder / "report.png"
        dom = html.unescape(self.browse(page, "--dump-dom", f"--screenshot={shot}"))
        if not shot.exists():  # a Chromium that does one of both at a time
            self.browse(page, f"--screenshot={shot}")

        charts = dict(re.findall(r'<h3>([^<]*)</h3>.*?<path d="([^"]*)"', dom, re.DOTALL))
        self.assertEqual([title.split(",")[0] for title in charts],
                         ["Loss", "Learning rate", "Gradient norm before clipping", "Throughput", "Memory of the largest rank"])
        for title, drawn in charts.items():
            # memory is measured in steps 10, 20, 30, 40 and the last one
            points = 5 if title.startswith("Memory") else 45
            self.assertEqual((drawn.count("M"), drawn.count("L")), (1, points - 1), f"{title}: {drawn}")
            self.assertNotIn("NaN", drawn)
        colors = sum(row.count(SLATE) for row in pixels(shot))
        self.assertGreater(colors, 200, "the memory's line is not in the picture")

        date = time.strftime("%Y-%m-%d", time.gmtime())
        for label, value in (("Started", date[:7]), ("Host", socket.gethostname()), ("Versions", "Trireme 0."), ("Versions", ", torch 2."),
                             ("Command", "train --data"), ("Command", "--steps 45")):
            self.assertRegex(dom, f'>{label}</th><td>[^<]*{re.escape(value)}')


if __name__ == "__main__":
    if CHROMIUM is None:
        print("there is no Chromium to look at a report with; WITH_CHROMIUM=1 scripts/setup installs it")
        sys.exit(77)
    main()
