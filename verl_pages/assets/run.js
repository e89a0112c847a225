// The page of runs: sections of curves, drawn when they come into view, and what is chosen above them.
async function draw(figure) {
  const panel = data.panels[Number(figure.dataset.panel)];
  const curves = await chunk(panel.chunk);
  drawPanel(figure, panel, curves[panel.place]);
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    watcher.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "600px" });

// Those in view now, the others when they come into view.
function redraw() {
  for (const figure of document.querySelectorAll("[data-panel]")) {
    const { layer } = data.panels[Number(figure.dataset.panel)];
    figure.hidden = Boolean(layer) && layer !== shown.layer;
    watcher.unobserve(figure);
    if (!figure.hidden) watcher.observe(figure);
  }
  for (const slot of document.querySelectorAll("[data-shaping]")) slot.replaceWith(shapingPanels());
  const slot = byId("phases");
  if (slot) slot.replaceChildren(phaseTable() || "");
}

function makeSections() {
  const links = [["overview", "Overview"]];
  for (const [section, title] of Object.entries(data.sections)) {
    const own = data.panels.map((panel, i) => [panel, i]).filter(([panel]) => panel.section === section);
    const stacked = section === "shaping" && data.shaping.runs.some((rows) => rows.length);
    const table = section === "speed" && data.phases.some((phases) => Object.keys(phases).length);
    if (!own.length && !stacked && !table) continue;
    const grid = el("div", { class: "panels" }, stacked ? shapingPanels() : null, ...own.map(([panel, i]) =>
      el("div", { class: "panel", "data-panel": i }, panelHead(panel), el("div", { class: "waiting" }))));
    const head = el("h2", { id: `${section}-title` }, title);
    const parts = table ? [el("div", { id: "phases" })] : [];
    const content = section === "others" ? others(own, grid) : [head, ...parts, grid];
    byId("sections").append(el("section", { id: section, "aria-labelledby": `${section}-title` }, ...content));
    links.push([section, title]);
  }
  links.push(["options", "Configuration"], ["samples", "Samples"]);
  byId("nav").append(...links.map(([id, title]) => el("a", { href: `#${id}` }, title)));
}

// Hundreds of panels: folded, with a search for the metric's name.
function others(own, grid) {
  const field = el("input", { type: "search", autocomplete: "off", spellcheck: "false" });
  const fold = el("details", {}, el("summary", {}, el("h2", { id: "others-title" }, "All other metrics "), el("span", { class: "quiet" }, plural(own.length, "metric"))),
    el("form", { class: "filters", role: "search" }, el("label", { class: "grow" }, "Text in the name", field)), grid);
  fold.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  field.addEventListener("input", () => {
    const words = field.value.trim().toLowerCase();
    [...grid.children].forEach((figure, i) => figure.classList.toggle("filtered", !own[i][0].title.toLowerCase().includes(words)));
  });
  return [fold];
}

function shapingPanels() {
  const bounds = data.shaping.bounds;
  const names = ["unchanged", ...bounds.slice(1).map((b) => `up to ${percent0(b)}`), `above ${percent0(bounds[bounds.length - 1])}`];
  const dim = dark.matches ? ["#4a4f57", "#34506a", "#3f78a6", "#56b4e9", "#f28e4b"] : ["#d5d8dc", "#bcdcf0", "#6bb1dc", "#0072b2", "#d55e00"];
  const slot = el("div", { class: "panels inner", "data-shaping": "" });
  data.shaping.runs.forEach((rows, r) => {
    if (rows.length && shown.runs.has(r)) slot.append(stackedPanel(`Responses by the change of their advantage${severalRuns ? `: ${data.runs[r].name}` : ""}`, rows, names, dim));
  });
  return slot;
}

function startTools() {
  const layers = [...new Set(data.panels.map(({ layer }) => layer).filter(Boolean))].sort((a, b) => a.slice(6) - b.slice(6));
  shown.layer = layers[0] || "";
  byId("layer").append(...layers.map((layer) => option(layer, layer.replace("_", " "))));
  byId("layer-tool").hidden = layers.length < 2;
  byId("layer").addEventListener("input", () => { shown.layer = byId("layer").value; redraw(); });
  byId("smoothing").addEventListener("input", () => { shown.smoothing = Number(byId("smoothing").value); redraw(); });
  const seeds = data.groups.length < data.runs.length;
  byId("together-tool").hidden = !seeds;
  shown.together = seeds;
  byId("together").addEventListener("input", () => { shown.together = byId("together").checked; runChips(); showOverview(); drawPrompt(); redraw(); });
  runChips();
}

// What the colours are; a click leaves a run, or a group of seeds, out.
function runChips() {
  if (!severalRuns) return;
  const owners = shown.together ? data.groups.map((group, g) => [group, data.runs.flatMap((run, r) => (run.group === g ? [r] : []))]) : data.runs.map((run, r) => [run, [r]]);
  byId("runs").replaceChildren(...owners.map(([owner, members]) => {
    const button = el("button", { type: "button", class: "owner", "aria-pressed": String(members.some((r) => shown.runs.has(r))) }, swatch({ style: owner }), owner.name);
    button.addEventListener("click", () => {
      const on = members.some((r) => shown.runs.has(r));
      for (const r of members) shown.runs[on ? "delete" : "add"](r);
      button.setAttribute("aria-pressed", String(!on));
      redraw();
    });
    return button;
  }));
}

// The panels that nobody has scrolled to, one after the other while nothing else happens: for printing, and for searching.
function drawTheRest() {
  const next = document.querySelector("section:not(#others) > .panels > [data-panel]:not([hidden]) > .waiting");
  if (!next) return;
  const figure = next.parentElement;
  watcher.unobserve(figure);
  draw(figure).then(() => requestIdleCallback(drawTheRest));
}

function start() {
  byId("troubles").hidden = !data.troubles.length;
  byId("troubles-count").textContent = `${plural(data.troubles.length, "thing")} could not be read`;
  byId("troubles-list").append(...data.troubles.map((line) => el("li", {}, line)));
  makeSections();
  startTools();
  showOverview();
  redraw();
  byId("differing-tool").hidden = !severalRuns;
  byId("option-filters").addEventListener("input", showOptions);
  byId("option-filters").addEventListener("submit", (event) => event.preventDefault());
  dark.addEventListener("change", () => { runChips(); showOverview(); redraw(); drawPrompt(); });
}

start();
let ready = Promise.resolve();
if ("DecompressionStream" in window) {
  ready = Promise.all([showOptions(), startSamples()]).then(() => {
    performance.mark("ready");
    document.documentElement.setAttribute("data-ready", "");
    requestIdleCallback(drawTheRest);
  });
} else {
  trouble("This browser cannot unpack the data, because it lacks DecompressionStream. Browsers since 2023 have it.");
}
