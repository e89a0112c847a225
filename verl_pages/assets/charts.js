// Charts: lines with bands over an axis, and shares as bars one above the other; values under the pointer or by arrow keys.
const CHART = { width: 380, height: 220, left: 68, right: 14, top: 10, bottom: 26 };
const DASHES = [null, "6 3", "2 3", "9 3 2 3", "12 4", "1 4", "4 2 1 2 1 2", "3 6"];
const INNER = { width: CHART.width - CHART.left - CHART.right, height: CHART.height - CHART.top - CHART.bottom };
const paint = (style) => style[dark.matches ? "dark" : "light"];

function marker(shape, x, y, colour, hollow) {
  const colours = { fill: hollow ? "var(--card)" : colour, stroke: hollow ? colour : "var(--card)", "stroke-width": hollow ? 1.6 : 1 };
  const paths = {
    circle: `M${x - 4},${y}a4,4 0 1 0 8,0a4,4 0 1 0 -8,0`,
    square: `M${x - 3.6},${y - 3.6}h7.2v7.2h-7.2z`,
    diamond: `M${x},${y - 4.8}l4.8,4.8l-4.8,4.8l-4.8,-4.8z`,
    triangle: `M${x},${y - 4.8}l4.6,8h-9.2z`,
  };
  return svg("path", { d: paths[shape], ...colours });
}

// Ticks at round numbers.
function niceTicks(low, high, number) {
  const raw = (high - low) / number || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i === 0 ? 0 : i * step);
  return ticks;
}

// The vertical axis: its ticks, their labels, and the place of a value.
function scaleOf({ percent: rate, log }, lines) {
  const values = lines.flatMap((line) => [...line.mean, ...(line.low || []), ...(line.high || [])]);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity);
  let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (log && low > 0 && high / low > 8) {
    const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((to - from) / 5);
    const ticks = Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => 10 ** (from + i * every));
    return { ticks, label: (v) => v.toExponential(0).replace("e+", "e").replace("-", "−"), y: (v) => CHART.top + INNER.height * (1 - (Math.log10(v) - from) / (to - from)) };
  }
  // Rates start at zero; a value that hardly moves is not blown up to fill the panel.
  if (rate && low >= 0) low = 0;
  else if (low > 0 && low < 0.4 * high) low = 0;
  const least = Math.max(Math.abs(high), Math.abs(low)) * 1e-3 || 1;
  if (low === 0 && high < least) high = least;
  else if (high - low < least) [low, high] = [low - least / 2, high + least / 2];
  if (low !== 0) low -= 0.04 * (high - low);
  high += 0.04 * (high - low);
  const label = rate ? (v) => `${Number((100 * v).toPrecision(3))}%` : (v) => short(Math.abs(v) < 1e-12 * Math.abs(high) ? 0 : v);
  return { ticks: niceTicks(low, high, 5), label, y: (v) => CHART.top + INNER.height * (1 - (v - low) / (high - low)) };
}

// The horizontal axis from step 0 to the last.
const stepAxis = () => ({
  xOf: (step) => CHART.left + (step / Math.max(1, data.last)) * INNER.width,
  xTicks: niceTicks(0, data.last || 1, 5).filter((step) => Number.isInteger(step)),
  tipTitle: (step) => {
    const first = Math.floor(step / data.width) * data.width;
    return data.width > 1 ? `steps ${count(first)} to ${count(Math.min(first + data.width - 1, data.last))}` : `step ${count(step)}`;
  },
  near: data.width,
});

// An empty picture with its axes.
function axes(label, { ticks, label: text, y }, { xOf, xTicks }) {
  const picture = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", tabindex: 0, "aria-label": label });
  const across = (name, at) => svg("line", { class: name, x1: CHART.left, x2: CHART.width - CHART.right, y1: at, y2: at });
  for (const tick of ticks) picture.append(across("grid", y(tick)), svg("text", { x: CHART.left - 6, y: y(tick) + 4, "text-anchor": "end" }, text(tick)));
  for (const tick of xTicks) {
    const x = Math.min(xOf(tick), CHART.width - 3 - 3.6 * count(tick).length);
    picture.append(svg("text", { x, y: CHART.height - 8, "text-anchor": "middle" }, count(tick)));
  }
  picture.append(across("axis", CHART.height - CHART.bottom));
  return picture;
}

// A chart of lines {name, style, dash, x, mean, low, high, smooth, marks}. `axis` is as that of stepAxis; `panel` may be percent or log.
function lineChart(panel, lines, axis) {
  const scale = scaleOf(panel, lines);
  const text = (value) => (panel.percent ? `${tenths(100 * value)}%` : short(value));
  const summary = lines.slice(0, 8).map((line) => `${line.name} ${text(line.mean[0])} to ${text(line.mean[line.mean.length - 1])}`).join("; ");
  const picture = axes(`${panel.title}: ${summary}`, scale, axis);
  const at = (x, value) => `${axis.xOf(x).toFixed(1)},${scale.y(value).toFixed(1)}`;
  const bands = lines.filter((line) => line.low);
  for (const { x, low, high, style } of bands.length <= 6 ? bands : []) {
    const edge = [...x.map((one, i) => at(one, high[i])), ...x.map((one, i) => at(one, low[i])).reverse()];
    picture.append(svg("polygon", { points: edge.join(" "), fill: paint(style), opacity: 0.15 }));
  }
  for (const { x, mean, smooth, style, dash, marks } of lines) {
    const colour = paint(style);
    const stroke = (values, more) => svg("polyline", { points: x.map((one, i) => at(one, values[i])).join(" "), fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-linejoin": "round", ...(dash ? { "stroke-dasharray": dash } : {}), ...more });
    if (smooth) picture.append(stroke(mean, { opacity: 0.28, "stroke-width": 1 }));
    picture.append(stroke(smooth || mean, {}));
    if (marks) picture.append(...x.map((one, i) => marker(style.shape, axis.xOf(one), scale.y((smooth || mean)[i]), colour, Boolean(dash))));
  }
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  addCursor(picture, places, axis, (place) => {
    const rows = [];
    for (const line of lines) {
      const i = line.x.reduce((best, x, number) => (Math.abs(x - place) < Math.abs(line.x[best] - place) ? number : best), 0);
      if (Math.abs(line.x[i] - place) > axis.near) continue;
      const range = line.low && line.low[i] !== line.high[i] ? `${text(line.low[i])} to ${text(line.high[i])}` : "";
      rows.push([line.mean[i], el("div", {}, swatch(line), line.name, el("strong", {}, text(line.mean[i])), range)]);
    }
    return rows.sort((a, b) => b[0] - a[0]).slice(0, 16).map(([, row]) => row);
  });
  return picture;
}

// Shares that add up to one, each row [step, share, ...], as bars one above the other.
function stackedChart(title, rows, names, colours, axis) {
  const y = (v) => CHART.top + INNER.height * (1 - v);
  const last = rows[rows.length - 1];
  const label = `${title}: at the last step ${names.map((name, i) => `${name} ${percent(last[i + 1])}%`).join(", ")}`;
  const picture = axes(label, { ticks: [0, 0.5, 1], label: (v) => `${100 * v}%`, y }, axis);
  const gap = rows.slice(1).reduce((least, [step], i) => Math.min(least, step - rows[i][0]), rows.length > 1 ? Infinity : 1);
  const width = Math.max(1, Math.min(18, axis.xOf(gap) - axis.xOf(0) - 1));
  for (const [step, ...shares] of rows) {
    let below = 0;
    shares.forEach((share, i) => {
      if (share > 0) picture.append(svg("rect", { x: axis.xOf(step) - width / 2, width, y: y(below + share), height: INNER.height * share, fill: colours[i] }));
      below += share;
    });
  }
  addCursor(picture, rows.map(([step]) => step), axis, (step) => {
    const [, ...shares] = rows.find((row) => row[0] === step);
    return names.map((name, i) => el("div", {}, block(colours[i]), name, el("strong", {}, `${percent(shares[i])}%`)));
  });
  return picture;
}

// Calls `rows(place)` for what the tooltip says of the place under the pointer, or where the arrow keys are.
function addCursor(picture, places, { xOf, tipTitle }, rows) {
  const cursor = svg("line", { class: "axis", y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden", "stroke-dasharray": "2 2" });
  picture.append(cursor);
  let at = -1;
  const show = (index, left, top) => {
    at = Math.max(0, Math.min(index, places.length - 1));
    for (const side of ["x1", "x2"]) cursor.setAttribute(side, xOf(places[at]));
    cursor.setAttribute("visibility", "visible");
    byId("tip").replaceChildren(el("div", {}, tipTitle(places[at])), ...rows(places[at]));
    placeTip(left, top);
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    byId("tip").hidden = true;
  };
  picture.addEventListener("pointermove", (event) => {
    const { x } = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
    show(places.reduce((best, place, i) => (Math.abs(xOf(place) - x) < Math.abs(xOf(places[best]) - x) ? i : best), 0), event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const box = picture.getBoundingClientRect();
    show((at < 0 ? places.length - 1 : at) + moves[event.key], box.left + box.width / 3, box.top);
  });
}

// The title of a panel, with a button that makes it as wide as the page.
function panelHead(title, note = "", hint = null) {
  const button = el("button", { type: "button", class: "enlarge", "aria-label": `Enlarge ${title}`, "aria-pressed": "false" }, "⤢");
  button.addEventListener("click", () => button.setAttribute("aria-pressed", String(button.closest(".panel").classList.toggle("wide"))));
  return el("h3", { title: hint }, button, title, note && " ", note && el("small", {}, note));
}

function swatch({ style, dash, marks }) {
  const picture = svg("svg", { width: 30, height: 12, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 29, y1: 6, y2: 6, stroke: paint(style), "stroke-width": 2.2, ...(dash ? { "stroke-dasharray": dash } : {}) }));
  if (marks) picture.append(marker(style.shape, 15, 6, paint(style), Boolean(dash)));
  return picture;
}
const block = (colour) => svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("rect", { width: 12, height: 12, rx: 2, fill: colour }));
const legend = (lines, mark = swatch) => el("div", { class: "keysOf" }, ...lines.map((line) => el("span", {}, mark(line), line.name)));
