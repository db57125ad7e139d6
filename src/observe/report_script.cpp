#include "observe/report_assets.h"

namespace trireme {

const std::string_view kReportScript = R"js(
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = { wide: 300, normal: 190 };
  const PAD = { left: 52, right: 12, top: 8, bottom: 24 };

  function node(name, attributes, parent) {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (parent) parent.append(element);
    return element;
  }
  function html(name, className, text, parent) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }

  // Round values that cover [low, high], about `count` of them.
  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999);
    const values = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step);
    return values;
  }
  const plain = (v) => (v === 0 ? "0" : Math.abs(v) < 1e-4 || Math.abs(v) >= 1e6 ? (+v.toPrecision(3)).toExponential() : String(+v.toPrecision(5)));
  function compact(v) {
    for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (Math.abs(v) >= size) return +(v / size).toPrecision(4) + unit;
    return plain(v);
  }
  const whole = (v) => Math.round(v).toLocaleString("en-US");

  // Pairs of finite values only; a hole ends the line.
  function path(series, sx, sy) {
    let text = "", pen = "M";
    series.x.forEach((x, i) => {
      const y = series.y[i];
      if (y === null || y === undefined) { pen = "M"; return; }
      text += pen + sx(x).toFixed(1) + " " + sy(y).toFixed(1);
      pen = "L";
    });
    return text;
  }
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }
  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (v !== null && v !== undefined) { low = Math.min(low, v); high = Math.max(high, v); }
    return [low, high];
  }

  function chart(options) {
    const series = options.series.filter((s) => s.x.length && s.y.some((v) => v !== null));
    if (!series.length) return;
    const card = html("section", "card chart" + (options.wide ? " wide" : ""), undefined, document.getElementById("charts"));
    const top = html("div", "top", undefined, card);
    html("h3", "", options.title, top);
    if (series.length > 1) {
      const legend = html("div", "legend", undefined, top);
      for (const s of series) {
        const item = html("span", "", undefined, legend);
        html("i", "key" + (s.dots ? " dot" : ""), undefined, item).style.background = s.color;
        item.append(s.name);
      }
    }
    const svg = node("svg", { tabindex: 0, role: "img", "aria-label": options.title + ", arrow keys read values" }, card);
    const tip = html("div", "tip", undefined, card);
    tip.hidden = true;

    const [x0, x1] = extent(series.flatMap((s) => s.x));
    let [y0, y1] = extent(series.flatMap((s) => s.y));
    if (options.fromZero) y0 = Math.min(y0, 0);
    if (y0 === y1) { const d = Math.abs(y0) * 0.1 || 1; y0 -= options.fromZero && y0 === 0 ? 0 : d; y1 += d; }
    const slack = (y1 - y0) * 0.05;
    y1 += slack;
    if (!(options.fromZero && y0 === 0)) y0 -= slack;

    const height = options.wide ? HEIGHT.wide : HEIGHT.normal;
    let sx, sy, cursor, width = 0, at = null;

    function draw() {
      width = svg.clientWidth || 600;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.style.height = height + "px";
      const right = width - PAD.right, bottom = height - PAD.bottom;
      sx = (x) => PAD.left + (x1 === x0 ? 0.5 : (x - x0) / (x1 - x0)) * (right - PAD.left);
      sy = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - PAD.top);
      for (const v of ticks(y0, y1, options.wide ? 6 : 4)) {
        node("line", { class: "grid", x1: PAD.left, x2: right, y1: sy(v), y2: sy(v) }, svg);
        node("text", { x: PAD.left - 8, y: sy(v) + 4, "text-anchor": "end" }, svg).textContent = options.axis(v);
      }
      node("line", { class: "axis", x1: PAD.left, x2: right, y1: bottom, y2: bottom }, svg);
      const steps = x0 === x1 ? [x0] : ticks(x0, x1, Math.max(2, Math.floor(width / 110))).filter((v) => Number.isInteger(v));
      for (const v of steps) node("text", { x: sx(v), y: height - 6, "text-anchor": "middle" }, svg).textContent = compact(v);
      if (options.marks)
        for (const v of data.checkpoints) node("line", { class: "mark", x1: sx(v), x2: sx(v), y1: PAD.top, y2: bottom }, svg);
      for (const s of series) {
        node("path", { d: path(s, sx, sy), fill: "none", stroke: s.color, "stroke-width": s.thin ? 1.2 : 2,
          "stroke-linejoin": "round", "stroke-linecap": "round" }, svg);
        // A value between two holes is no line.
        const isHole = (i) => s.y[i] === null || s.y[i] === undefined;
        s.x.forEach((x, i) => { if (!isHole(i) && (s.dots || (isHole(i - 1) && isHole(i + 1)))) node("circle", { cx: sx(x), cy: sy(s.y[i]), r: 3.2, fill: s.color }, svg); });
      }
      cursor = node("g", {}, svg);
    }

    // Shows the values at the step of the longest series that is nearest to `x`.
    function show(x) {
      const main = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
      at = nearest(main.x, x);
      const step = main.x[at];
      cursor.replaceChildren();
      node("line", { class: "cursor", x1: sx(step), x2: sx(step), y1: PAD.top, y2: height - PAD.bottom }, cursor);
      tip.replaceChildren();
      html("b", "", "step " + whole(step), tip);
      for (const s of series) {
        const i = nearest(s.x, step);
        if (s !== main && s.dots && Math.abs(sx(s.x[i]) - sx(step)) > 12) continue;
        const row = html("div", "", undefined, tip);
        const label = html("span", "", undefined, row);
        html("i", "key" + (s.dots ? " dot" : ""), undefined, label).style.background = s.color;
        label.append(s.name);
        html("span", "", s.y[i] === null ? "not finite" : options.value(s.y[i]), row).style.color = "var(--text)";
        if (s.y[i] !== null) node("circle", { cx: sx(s.x[i]), cy: sy(s.y[i]), r: 4, fill: s.color, stroke: "var(--card)", "stroke-width": 2 }, cursor);
      }
      tip.hidden = false;
      const beside = svg.offsetLeft + sx(step) + 14;
      tip.style.left = (beside + tip.offsetWidth > card.clientWidth - 8 ? beside - tip.offsetWidth - 28 : beside) + "px";
      tip.style.top = svg.offsetTop + PAD.top + 6 + "px";
    }
    function hide() { tip.hidden = true; cursor.replaceChildren(); at = null; }

    svg.addEventListener("pointermove", (event) => {
      const position = (event.clientX - svg.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right);
      show(x0 + Math.min(Math.max(position, 0), 1) * (x1 - x0));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const main = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      show(main.x[Math.min(Math.max((at === null ? main.x.length : at) + move, 0), main.x.length - 1)]);
    });
    draw();
    new ResizeObserver(() => { if (svg.clientWidth !== width) { draw(); tip.hidden = true; at = null; } }).observe(svg);
  }

  const x = data.steps;
  const one = (title, name, color, y, options) =>
    chart({ title, axis: compact, value: plain, series: [{ name, color: `var(--${color})`, x: options.x || x, y }], ...options });
  chart({
    title: "Loss", wide: true, marks: true, axis: plain, value: (v) => v.toFixed(4),
    series: [
      { name: "training, each step", color: "var(--blue-faint)", x, y: data.loss, thin: true },
      { name: "training, smoothed", color: "var(--blue)", x, y: data.smooth },
      { name: "validation", color: "var(--orange)", x: data.validation.map((p) => p[0]), y: data.validation.map((p) => p[1]), dots: true },
    ],
  });
  one("Learning rate", "learning rate", "violet", data.lr, { fromZero: true });
  one("Gradient norm before clipping", "norm", "teal", data.grad_norm, { fromZero: true });
  const rate = data.throughput_unit;
  one(`Throughput, ${rate}`, rate, "blue", data.throughput, { fromZero: true, value: rate === "tokens/s" ? whole : plain });
  one("Memory of the largest rank, MiB", "proportional set size", "slate", data.memory.map((p) => p[1]),
    { x: data.memory.map((p) => p[0]), fromZero: true, value: whole });
})();
)js";

}  // namespace trireme
