// Hover values, an x-axis of steps, time or tokens, zoom, and hiding of runs. The page is complete without it.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg", EDGE = 4;  // EDGE: as in streamrl/report/charts.py
  const list = (text) => (text ? text.split(",").map(Number) : []);
  const runs = [...document.querySelectorAll(".axis-data")].map((e) => ({
    step: list(e.dataset.step), time: list(e.dataset.time), tokens: list(e.dataset.tokens),
  }));
  const hidden = new Set();
  let axis = "step", zoom = null, whole = 1;  // whole: the end of the longest run on the axis

  // --- numbers: as streamrl/metrics/text.py writes them
  function compact(v) {
    for (const [size, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (Math.abs(v) >= size) return String(+(v / (suffix === "k" ? 1e3 : size)).toPrecision(3)) + suffix;
    }
    if (v !== 0 && Math.abs(v) < 1e-3) return v.toExponential(1);
    return Number.isInteger(v) ? String(v) : Math.abs(v) >= 100 ? v.toFixed(0) : String(+v.toPrecision(3));
  }
  function duration(s) {
    if (s < 10 && !Number.isInteger(s)) return s.toFixed(1) + "s";
    s = Math.round(s);
    for (const [size, small, big, unit] of [[86400, 3600, "d", "h"], [3600, 60, "h", "m"], [60, 1, "m", "s"]]) {
      const rest = Math.floor((s % size) / small);
      if (s >= size) return Math.floor(s / size) + big + (rest ? String(rest).padStart(2, "0") + unit : "");
    }
    return s + "s";
  }
  const shown = (v) => (axis === "time" ? duration(v) : compact(v));

  // --- axes
  function ticks(low, high, about) {
    const rough = (high - low) / about;
    const units = axis === "time" ? [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
      86400, 172800, 432000, 864000] : [];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = units.find((u) => u >= rough) || [1, 2, 2.5, 5, 10].map((m) => m * power).find((u) => u >= rough * .999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
    return found;
  }
  function along(from, to, v) {  // linear interpolation
    if (!from.length) return v;
    let low = 0, high = from.length - 1;
    if (v <= from[0]) return from[0] ? to[0] * (v / from[0]) : to[0];
    if (v >= from[high]) return to[high];
    while (high - low > 1) { const mid = (low + high) >> 1; if (from[mid] <= v) low = mid; else high = mid; }
    return to[low] + (to[high] - to[low]) * (v - from[low]) / (from[high] - from[low] || 1);
  }
  const toAxis = (run, step) => (axis === "step" || !runs[run] ? step : along(runs[run].step, runs[run][axis], step));

  // --- charts
  const charts = [...document.querySelectorAll("figure[data-low]")].flatMap((figure) =>
    [...figure.children].filter((e) => e.tagName === "svg").map((svg) => {
      const plot = svg.querySelector(".plot"), at = (name) => +plot.getAttribute(name);
      return {
        figure, svg, plot, x: at("x") + EDGE, y: at("y"), width: at("width") - 2 * EDGE, height: at("height"),
        low: +figure.dataset.low, high: +figure.dataset.high, log: figure.dataset.log === "1",
        lines: [...plot.querySelectorAll("path[data-x]")].map((path) => ({
          path, run: +path.dataset.run, name: path.dataset.name, steps: list(path.dataset.x), ys: list(path.dataset.y),
          errors: list(path.dataset.e), from: list(path.dataset.from), faint: path.classList.contains("faint"),
        })),
      };
    }));

  function yOf(chart, v) {
    const place = chart.log ? (n) => Math.log10(Math.max(n, 1e-300)) : (n) => n;
    return chart.y + chart.height * (1 - (place(v) - place(chart.low)) / (place(chart.high) - place(chart.low)));
  }
  function draw(chart) {
    for (const line of chart.lines) {
      line.xs = line.steps.map((s) => toAxis(line.run, s));
      line.path.style.display = hidden.has(line.run) ? "none" : "";
    }
    [chart.first, chart.last] = zoom || [0, whole];
    const xOf = (v) => chart.x + chart.width * (v - chart.first) / (chart.last - chart.first);
    for (const line of chart.lines) {
      const at = line.xs.map((x, i) => [xOf(x).toFixed(2), yOf(chart, line.ys[i]).toFixed(2)]);
      if (line.from.length) {
        const back = line.xs.map((x, i) => xOf(x).toFixed(2) + "," + yOf(chart, line.from[i]).toFixed(2)).reverse();
        line.path.setAttribute("d", "M" + at.map(([x, y]) => x + "," + y).concat(back).join("L") + "Z");
      } else if (line.errors.length) {
        line.path.setAttribute("d", at.map(([x], i) => "M" + x + "," + yOf(chart, line.ys[i] - line.errors[i]).toFixed(2)
          + "V" + yOf(chart, line.ys[i] + line.errors[i]).toFixed(2)).join(""));
      } else if (line.path.classList.contains("dots")) {
        line.path.setAttribute("d", at.map(([x, y]) => "M" + x + "," + y + "h0").join(""));
      } else line.path.setAttribute("d", "M" + at.map(([x, y]) => x + "," + y).join("L"));
    }
    const group = chart.svg.querySelector(".x-ticks"), base = chart.y + chart.height;
    group.replaceChildren();
    for (const value of ticks(chart.first, chart.last, chart.width > 600 ? 9 : 5)) {
      const x = xOf(value);
      add(group, "line", { class: "axis", x1: x, x2: x, y1: base, y2: base + 4 });
      add(group, "text", { class: "tick", x, y: base + 17, "text-anchor": "middle" }).textContent = shown(value);
    }
    chart.svg.querySelector(".x-label").textContent = { step: "step", time: "wall time", tokens: "trained tokens" }[axis];
  }
  function add(parent, name, attributes) {
    const element = parent.appendChild(document.createElementNS(SVG, name));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }
  function drawAll() {
    const ends = charts.flatMap((chart) => chart.lines).filter((line) => !hidden.has(line.run) && line.steps.length);
    whole = Math.max(1e-9, ...ends.map((line) => toAxis(line.run, line.steps[line.steps.length - 1])));
    charts.forEach(draw);
    reset.hidden = !zoom;
    buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.axis === axis)));
  }

  // --- hover
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  function nearest(xs, v) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= v) low = mid; else high = mid; }
    return Math.abs(xs[low] - v) <= Math.abs(xs[high] - v) ? low : high;
  }
  function row(parent, css, name, value) {
    const line = parent.appendChild(document.createElement("div"));
    if (css) line.appendChild(document.createElement("i")).className = "key " + css;
    line.appendChild(document.createElement("span")).textContent = name;
    line.appendChild(document.createElement("b")).textContent = value;
  }
  function point(chart, event) {  // x in the units of the axis
    const box = chart.svg.getBoundingClientRect(), unit = box.width / chart.svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / unit;
    return chart.first + (chart.last - chart.first) * Math.min(1, Math.max(0, (x - chart.x) / chart.width));
  }
  function hover(chart, event) {
    const named = chart.lines.filter((line) => line.name && !line.faint && !hidden.has(line.run) && line.xs.length);
    if (!named.length) return;
    const want = point(chart, event);
    const near = named.map((line) => line.xs[nearest(line.xs, want)]);
    const at = near.reduce((a, b) => (Math.abs(b - want) < Math.abs(a - want) ? b : a));
    const x = chart.x + chart.width * (at - chart.first) / (chart.last - chart.first);
    chart.cursor ||= add(chart.plot, "line", { class: "cursor", y1: chart.y, y2: chart.y + chart.height });
    chart.cursor.setAttribute("x1", x);
    chart.cursor.setAttribute("x2", x);
    tip.replaceChildren();
    const main = named[near.indexOf(at)], step = main.steps[nearest(main.xs, at)], of = runs[main.run];
    const where = ["step " + compact(step)];
    if (of && of.time.length) where.push(duration(along(of.step, of.time, step)));
    if (of && of.tokens.length) where.push(compact(along(of.step, of.tokens, step)) + " tokens");
    tip.appendChild(document.createElement("small")).textContent = where.join(" · ");
    const lines = named[0].from.length ? [...named].reverse() : named;  // areas: as they are stacked
    for (const line of lines) {
      const i = nearest(line.xs, at), css = (line.path.getAttribute("class").match(/\b([cs])(\d)/) || ["", "c", "0"]);
      const raw = chart.lines.find((other) => other.faint && other.name === line.name && other.run === line.run);
      let value = line.from.length ? (100 * (line.ys[i] - line.from[i])).toFixed(1) + " %" : compact(line.ys[i]);
      const bars = chart.lines.find((other) => other.errors.length && other.run === line.run);
      if (bars && !line.from.length) value += " ± " + compact(bars.errors[nearest(bars.xs, at)]);
      if (raw) value += "  (" + compact(raw.ys[nearest(raw.xs, at)]) + ")";
      row(tip, (css[1] === "c" ? "k" : "s") + css[2], line.name, value);
    }
    tip.hidden = false;
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(innerHeight - tip.offsetHeight - 4, event.clientY + 12)) + "px";
  }
  function leave(chart) {
    tip.hidden = true;
    if (chart.cursor) chart.cursor.remove();
    chart.cursor = null;
  }

  // --- zoom: drag over a chart; a double click shows the whole run again
  for (const chart of charts) {
    let begin = null, brush = null;
    chart.svg.addEventListener("pointermove", (event) => {
      hover(chart, event);
      if (begin === null) return;
      const xOf = (v) => chart.x + chart.width * (v - chart.first) / (chart.last - chart.first);
      const ends = [xOf(begin), xOf(point(chart, event))].sort((a, b) => a - b);
      brush ||= add(chart.plot, "rect", { class: "brush", y: chart.y, height: chart.height });
      brush.setAttribute("x", ends[0]);
      brush.setAttribute("width", ends[1] - ends[0]);
    });
    chart.svg.addEventListener("pointerleave", () => leave(chart));
    chart.svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      event.preventDefault();
      begin = point(chart, event);
      chart.svg.setPointerCapture(event.pointerId);
    });
    chart.svg.addEventListener("pointerup", (event) => {
      if (begin === null) return;
      const ends = [begin, point(chart, event)].sort((a, b) => a - b);
      if (brush) brush.remove();
      begin = brush = null;
      leave(chart);  // its cursor is of the axis before
      if (ends[1] - ends[0] < (chart.last - chart.first) / 50) return;
      zoom = ends;
      drawAll();
    });
    chart.svg.addEventListener("dblclick", () => { zoom = null; drawAll(); });
  }

  // --- controls
  const controls = document.querySelector(".tools .axis");
  const buttons = [...document.querySelectorAll("[data-axis]")], reset = document.querySelector("[data-reset]");
  if (!controls || !charts.length) return;
  controls.hidden = false;
  for (const button of buttons) {
    button.hidden = button.dataset.axis !== "step" && !runs.every((run) => run[button.dataset.axis].length);
    button.addEventListener("click", () => { axis = button.dataset.axis; zoom = null; drawAll(); });
  }
  reset.addEventListener("click", () => { zoom = null; drawAll(); });
  for (const box of document.querySelectorAll(".runs input")) {
    box.hidden = false;
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(+box.dataset.run); else hidden.add(+box.dataset.run);
      drawAll();
    });
  }
  drawAll();
})();
