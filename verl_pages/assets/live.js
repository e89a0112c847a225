// While the page is served: reload it once the run has moved on, unless the reader is inspecting a value or typing.
const KEPT = "verl-report";
let follows = true;

// What was chosen, for the page after this one.
function remember() {
  const fields = [...document.querySelectorAll("select[id], input[id]")].filter(({ id }) => !["measure", "marks", "formulas", "side-0", "side-1"].includes(id));
  const entry = browse.matches[prompts.chosen];
  const section = [...document.querySelectorAll("section")].findLast((one) => one.getBoundingClientRect().top < 200);
  history.scrollRestoration = "manual";
  sessionStorage.setItem(KEPT, JSON.stringify({
    fields: fields.map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]),
    hidden: data.runs.flatMap(({ name }, r) => (shown.runs.has(r) ? [] : [name])),
    open: [...document.querySelectorAll("details")].map((one) => one.open),
    section: section && [section.id, section.getBoundingClientRect().top], inside: byId("detail").scrollTop,
    entry: entry && [entry.split, entry.uid, entry.text], sides: browse.sides, samples: browse.samples, marks: browse.marks, formulas: browse.formulas, measure: browse.measure,
  }));
}

async function recall() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) || "null");
  sessionStorage.removeItem(KEPT);
  if (!kept) return;
  data.runs.forEach(({ name }, r) => { if (kept.hidden.includes(name)) shown.runs.delete(r); });
  runChips();
  redraw();
  for (const [id, value] of kept.fields) {
    const field = byId(id);
    if (!field || field[field.type === "checkbox" ? "checked" : "value"] === value) continue;
    field[field.type === "checkbox" ? "checked" : "value"] = value;
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }
  Object.assign(browse, { marks: kept.marks, formulas: kept.formulas, measure: kept.measure });
  const place = browse.matches.findIndex(({ split, uid, text }) => kept.entry && split === kept.entry[0] && uid === kept.entry[1] && text === kept.entry[2]);
  if (place >= 0) {
    await prompts.choose(place);
    const { cells } = browse.matches[place];
    browse.sides = browse.sides.map((side, i) => (cells.some((cell) => sameCell(cell, kept.sides[i])) ? kept.sides[i] : side));
    browse.samples = kept.samples;
    await drawPrompt();
    byId("detail").scrollTop = kept.inside;
  }
  document.querySelectorAll("details").forEach((one, i) => { one.open = kept.open[i]; });
  // By the section in view: what is above it may have another height now.
  const [id, top] = kept.section || [];
  if (id && byId(id)) window.scrollBy({ top: byId(id).getBoundingClientRect().top - top, behavior: "instant" });
}

async function watch() {
  try {
    const version = await (await fetch("version", { cache: "no-store" })).text();
    if (follows && version !== data.version && byId("tip").hidden && !document.querySelector("dialog") && !document.activeElement.closest("input[type=search]")) {
      remember();
      location.reload();
      return;
    }
    byId("live-state").textContent = "";
  } catch {
    byId("live-state").textContent = " (the server does not answer)";
  }
  setTimeout(watch, 3000);
}

const liveBox = el("input", { type: "checkbox" });
liveBox.checked = true;
liveBox.addEventListener("change", () => { follows = liveBox.checked; });
byId("live").append(el("label", {}, liveBox, " follow the run"), el("span", { id: "live-state" }));
byId("live").hidden = false;
ready.then(recall).then(watch);
