// Curves of pass@k over log2 k: one small panel per benchmark, one legend, one tooltip.
const PANEL = { width: 340, height: 210, left: 44, right: 12, top: 8, bottom: 24 };
const colourOf = (label) => data.labels[label][dark.matches ? "dark" : "light"];

function swatch(label) {
  const style = data.labels[label];
  const colour = colourOf(label);
  const dash = style.dashed ? { "stroke-dasharray": "5 3" } : {};
  return svg("svg", { width: 34, height: 12, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 33, y1: 6, y2: 6, stroke: colour, "stroke-width": 2, ...dash }),
    marker(style.shape, 17, 6, colour, style.dashed));
}

function curvePanel(benchmark) {
  const rows = data.rows.filter((row) => row.benchmark === benchmark && row.pass.length);
  const ks = [...new Set(rows.flatMap((row) => row.pass.map(([k]) => k)))].sort((a, b) => a - b);
  const highest = Math.max(0.05, ...rows.flatMap((row) => row.pass.map(([, value, , high]) => high ?? value)));
  const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.25].find((size) => highest / size <= 5) || 0.25;
  const top = Math.ceil(highest / step - 1e-9) * step;
  const span = Math.log2(ks[ks.length - 1] / ks[0]) || 1;
  const inner = { width: PANEL.width - PANEL.left - PANEL.right, height: PANEL.height - PANEL.top - PANEL.bottom };
  const x = (k) => PANEL.left + 8 + (ks.length > 1 ? Math.log2(k / ks[0]) / span : 0.5) * (inner.width - 16);
  const y = (value) => PANEL.top + inner.height * (1 - value / top);
  const title = `pass@k on ${benchmarkName(benchmark)}: ` + rows.map((row) => {
    const [k, value] = row.pass[row.pass.length - 1];
    return `${data.labels[row.label].name} ${percent(row.pass[0][1])} to ${percent(value)} at k=${k}`;
  }).join("; ");
  const picture = svg("svg", { viewBox: `0 0 ${PANEL.width} ${PANEL.height}`, role: "img", "aria-label": title });
  for (let value = 0; value <= top + 1e-9; value += step) {
    picture.append(svg("line", { class: "grid", x1: PANEL.left, x2: PANEL.width - PANEL.right, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: PANEL.left - 6, y: y(value) + 4, "text-anchor": "end" }, `${Math.round(100 * value)}%`));
  }
  for (const k of ks) {
    if (ks.length > 7 && ks.indexOf(k) % 2 !== (ks.length - 1) % 2) continue;
    picture.append(svg("text", { x: x(k), y: PANEL.height - 6, "text-anchor": "middle" }, String(k)));
  }
  picture.append(svg("line", { class: "axis", x1: PANEL.left, x2: PANEL.width - PANEL.right, y1: y(0), y2: y(0) }));
  if (rows.length <= 4) {
    for (const row of rows.filter((one) => one.pass.every(([, , low]) => low !== null))) {
      const upper = row.pass.map(([k, , , high]) => `${x(k)},${y(high)}`);
      const lower = row.pass.map(([k, , low]) => `${x(k)},${y(low)}`).reverse();
      picture.append(svg("polygon", { points: [...upper, ...lower].join(" "), fill: colourOf(row.label), opacity: 0.13 }));
    }
  }
  for (const row of rows) {
    const style = data.labels[row.label];
    const dash = style.dashed ? { "stroke-dasharray": "5 3" } : {};
    const line = row.pass.map(([k, value]) => `${x(k)},${y(value)}`).join(" ");
    picture.append(svg("polyline", { points: line, fill: "none", stroke: colourOf(row.label), "stroke-width": 2, "stroke-linejoin": "round", ...dash }));
    for (const [k, value] of row.pass) picture.append(marker(style.shape, x(k), y(value), colourOf(row.label), style.dashed));
  }
  const cursor = svg("line", { class: "axis", y1: PANEL.top, y2: y(0), visibility: "hidden", "stroke-dasharray": "2 2" });
  picture.prepend(cursor);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * PANEL.width;
    const nearest = ks.reduce((best, k) => (Math.abs(x(k) - at) < Math.abs(x(best) - at) ? k : best));
    for (const side of ["x1", "x2"]) cursor.setAttribute(side, x(nearest));
    cursor.setAttribute("visibility", "visible");
    showTip(event, rows, nearest);
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    byId("tip").hidden = true;
  });
  const problems = Math.max(...rows.map((row) => row.problems));
  const size = benchmark === AVERAGE ? "" : plural(problems, "problem");
  return el("div", { class: "panel" }, el("h3", {}, benchmarkName(benchmark), " ", el("small", {}, size)), picture);
}

function showTip(event, rows, k) {
  const lines = rows.map((row) => [row, row.pass.find((entry) => entry[0] === k)]).filter(([, found]) => found);
  lines.sort((a, b) => b[1][1] - a[1][1]);
  const tip = byId("tip");
  tip.replaceChildren(el("div", {}, `pass@${k}`), ...lines.map(([row, [, value, low, high]]) =>
    el("div", {}, swatch(row.label), data.labels[row.label].name, el("strong", {}, percent(value)),
      low === null ? "" : `${percent(low)} to ${percent(high)}`)));
  placeTip(event.clientX, event.clientY);
}

function showCurves() {
  const present = new Set(data.rows.filter((row) => row.pass.length).map((row) => row.benchmark));
  const order = [AVERAGE, ...data.benchmarks.map((_, b) => b)].filter((b) => present.has(b));
  byId("curves").hidden = !order.length;
  byId("curves-legend").replaceChildren(...data.labels.map((label, l) => el("span", {}, swatch(l), label.name)));
  byId("curves-grid").replaceChildren(...order.map(curvePanel));
}
dark.addEventListener("change", showCurves);
