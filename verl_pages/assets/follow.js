// The page of a run that trains is written again every few steps: reload it, unless the reader is inspecting a value or typing.
const KEPT = "verl-report";
const RELOADED_S = 10;
// A page that is older than this at first belongs to a run that has ended, though it did not finish.
const FOLLOWED_S = 3600;

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

// Whether there may be a newer page. Only a server tells: of a file, one has to reload it to see.
async function changed() {
  if (location.protocol === "file:") return true;
  const answer = await fetch(location.href, { method: "HEAD", cache: "no-store" });
  return answer.ok && answer.headers.get("Last-Modified") !== new Date(document.lastModified).toUTCString();
}

async function follow() {
  const reading = !byId("tip").hidden || document.querySelector("dialog") || document.activeElement.closest("input[type=search]");
  if (followBox.checked && !reading) {
    try {
      if (await changed()) {
        remember();
        location.reload();
        return;
      }
      byId("follow-state").textContent = "";
    } catch {
      byId("follow-state").textContent = " (the server does not answer)";
    }
  }
  setTimeout(follow, wait);
}

const followBox = el("input", { type: "checkbox" });
followBox.checked = Date.now() / 1000 - data.written < FOLLOWED_S;
byId("follow").append(el("label", {}, followBox, " follow the run"), el("span", { id: "follow-state" }));
byId("follow").hidden = false;
let wait;
ready.then(recall).then(() => {
  // A large page is reloaded less often.
  wait = Math.max(RELOADED_S * 1000, 20 * performance.now());
  setTimeout(follow, wait);
});
