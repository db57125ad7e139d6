#include "observe/report_assets.h"

namespace trireme {

const std::string_view kReportStyle = R"css(
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e3e6eb; --grid: #eceef2; --text: #171b22; --muted: #626b7a;
  --blue: #2563c9; --blue-faint: #a9c4ee; --orange: #cf5a1d; --violet: #7347c2; --teal: #0c8074; --slate: #52627a;
  --warn-bg: #fdf1e4; --warn-line: #ecc08f; --shadow: 0 1px 2px rgba(20, 30, 50, .05);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11141a; --card: #191e26; --line: #2a313c; --grid: #252b35; --text: #e6e9ee; --muted: #97a1b1;
    --blue: #6ba3ff; --blue-faint: #34507f; --orange: #f59a62; --violet: #b394f2; --teal: #4cc4b4; --slate: #a3b2c8;
    --warn-bg: #33271a; --warn-line: #6e4f2a; --shadow: none;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 56px; }
header { margin-bottom: 24px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -.02em; font-weight: 650; overflow-wrap: anywhere; }
header p { margin: 6px 0 0; color: var(--muted); }
h2 { margin: 36px 0 12px; font-size: 17px; letter-spacing: -.01em; font-weight: 650; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shadow); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 620; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.tile small { display: block; color: var(--muted); font-size: 12.5px; min-height: 1.5em; }
.warning { margin: 16px 0 0; padding: 10px 14px; background: var(--warn-bg); border: 1px solid var(--warn-line); border-radius: 10px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
.chart { padding: 14px 16px 10px; position: relative; }
.chart.wide { grid-column: 1 / -1; }
.chart h3 { margin: 0; font-size: 14px; font-weight: 620; }
.chart .top { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: baseline; margin-bottom: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-left: auto; font-size: 12.5px; color: var(--muted); }
.key { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: middle; }
.key.dot { width: 8px; height: 8px; border-radius: 50%; }
.chart svg { display: block; width: 100%; overflow: visible; touch-action: pan-y; cursor: crosshair; outline-offset: 4px; }
.chart text { fill: var(--muted); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--line); }
.cursor { stroke: var(--muted); stroke-dasharray: 3 3; }
.mark { stroke: var(--muted); stroke-opacity: .35; stroke-dasharray: 2 3; }
.tip { position: absolute; pointer-events: none; z-index: 2; padding: 7px 10px; border-radius: 8px; background: var(--card);
  border: 1px solid var(--line); box-shadow: 0 4px 14px rgba(10, 15, 30, .16); font-size: 12.5px; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tip[hidden] { display: none; }
.tip b { display: block; font-weight: 600; }
.tip div { display: flex; justify-content: space-between; gap: 18px; align-items: center; }
.tip div > span { color: var(--muted); }
.sample { padding: 14px 16px; margin-bottom: 12px; }
.sample p { margin: 0 0 8px; color: var(--muted); font-size: 13px; }
pre { margin: 0; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; tab-size: 4; }
mark { background: none; color: var(--muted); }
table { border-collapse: collapse; width: 100%; }
td, th { padding: 8px 16px; text-align: left; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:first-child td, tr:first-child th { border-top: 0; }
th { width: 30%; font-weight: 500; color: var(--muted); }
details { padding: 12px 16px; }
summary { cursor: pointer; font-weight: 560; }
details pre { margin-top: 12px; }
footer { margin-top: 36px; color: var(--muted); font-size: 13px; }
@media (max-width: 760px) { .charts { grid-template-columns: minmax(0, 1fr); } main { padding: 24px 14px 40px; } }
@media print { body { background: #fff; } .card { break-inside: avoid; box-shadow: none; } }
)css";

}  // namespace trireme
