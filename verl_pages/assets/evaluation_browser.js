// The list of problems, and their responses and verdicts. Responses are unpacked when their problem is opened.
const state = { matches: [], run: -1, verdict: "", open: new Map() };

const questionsOf = (b) => chunk(data.benchmarks[b].questions);
const verdictsOf = (b, l, i) => (data.benchmarks[b].verdicts[l] || [])[i] || "";

function fillFilters() {
  byId("filter-benchmark").append(option("", "all"), ...data.benchmarks.map(({ name }, b) => option(b, name)));
  byId("filter-run").append(option("-1", "all"), ...data.labels.map(({ name }, l) => option(l, name)));
  const single = data.verdicts.filter(([code]) => data.benchmarks.some((b) => b.verdicts.some((list) => list && list.some((v) => v.includes(code)))));
  byId("filter-verdict").append(
    option("", "any"),
    el("optgroup", { label: "Some response is" }, ...single.map(([code, name]) => option(code, name.replaceAll("_", " ")))),
    el("optgroup", { label: "Problem is" }, option("all", "always solved"), option("some", "sometimes solved"),
      option("none", "never solved"), option("mixed", "solved by only some runs")));
}

function verdictMatches(b, i) {
  const labels = data.labels.map((_, l) => l).filter((l) => (state.run < 0 || state.run === l) && verdictsOf(b, l, i));
  const all = labels.map((l) => verdictsOf(b, l, i));
  if (state.run >= 0 && !labels.length) return false;
  const joined = all.join("");
  const solved = (text) => text.includes("c");
  switch (state.verdict) {
    case "": return true;
    case "all": return joined !== "" && /^c+$/.test(joined);
    case "some": return solved(joined) && !/^c+$/.test(joined);
    case "none": return joined !== "" && !solved(joined);
    case "mixed": return all.some(solved) && !all.every(solved);
    default: return joined.includes(state.verdict);
  }
}

let filterRound = 0;
async function applyFilters() {
  const round = ++filterRound;
  const chosen = byId("filter-benchmark").value;
  state.run = Number(byId("filter-run").value);
  state.verdict = byId("filter-verdict").value;
  const words = byId("filter-text").value.trim().toLowerCase();
  const matches = [];
  for (const b of data.benchmarks.keys()) {
    if (chosen !== "" && Number(chosen) !== b) continue;
    const questions = words ? await questionsOf(b) : null;
    for (let i = 0; i < data.benchmarks[b].count; i++) {
      if (verdictMatches(b, i) && (!words || questions[i][1].toLowerCase().includes(words))) matches.push([b, i]);
    }
  }
  if (round !== filterRound) return;
  state.matches = matches;
  const total = data.benchmarks.reduce((sum, { count }) => sum + count, 0);
  byId("count").textContent = `${matches.length.toLocaleString("en")} of ${plural(total, "problem")}`;
  await problems.show(matches.length);
}

async function listItem(place) {
  const [b, i] = state.matches[place];
  const questions = await questionsOf(b);
  const labels = data.labels.map((_, l) => l).filter((l) => state.run < 0 || state.run === l);
  const tally = labels.map((l) => verdictsOf(b, l, i)).map((v) => (v ? `${v.split("c").length - 1}/${v.length}` : "–"));
  return el("div", { class: "item" },
    el("div", { class: "where" }, el("span", {}, visible(`${data.benchmarks[b].name} · ${questions[i][0]}`)),
      el("span", { class: "tally" }, ...tally.slice(0, 4).map((text) => el("span", {}, text)), tally.length > 4 ? "…" : null)),
    el("div", { class: "text", dir: "auto" }, visible(questions[i][1].slice(0, 200)) || "(no question)"));
}

async function openProblem() {
  state.open = new Map();
  await drawDetail();
  byId("detail").scrollTop = 0;
}
const problems = rowList(byId("list"), byId("list-space"), listItem, openProblem);

// The response that is open at first: the first with the chosen verdict (-1: there is none).
function openSample(l, verdicts) {
  if (!state.open.has(l)) state.open.set(l, verdictNames[state.verdict] ? verdicts.indexOf(state.verdict) : 0);
  return state.open.get(l);
}

let detailRound = 0;
async function drawDetail() {
  const round = ++detailRound;
  const detail = byId("detail");
  if (!state.matches.length) {
    detail.replaceChildren(el("p", { class: "empty" }, "No problem matches the filters."));
    return;
  }
  const [b, i] = state.matches[problems.chosen];
  const labels = data.labels.map((_, l) => l).filter((l) => (state.run < 0 || state.run === l) && data.benchmarks[b].verdicts[l]);
  const [index, question, answer] = (await questionsOf(b))[i];
  const samples = await Promise.all(labels.map((l) => samplesOf(b, l, i)));
  if (round !== detailRound) return;
  detail.replaceChildren(
    el("h3", {}, visible(`${data.benchmarks[b].name} · problem ${index}`)),
    el("p", { class: "prose", dir: "auto" }, visible(question) || "(no question)"),
    el("p", { class: "facts" }, el("span", {}, "Reference answer ", el("b", {}, visible(answer)))),
    ...labels.map((l, at) => runBlock(b, l, i, samples[at])));
}

async function samplesOf(b, l, i) {
  const place = (data.benchmarks[b].chunks[l] || []).find(([first, end]) => first <= i && i < end);
  return place ? (await chunk(place[2]))[i - place[0]] : [];
}

function runBlock(b, l, i, samples) {
  const verdicts = verdictsOf(b, l, i);
  const solved = verdicts.split("c").length - 1;
  const head = el("h4", {}, data.labels[l].name, el("small", {}, verdicts ? `${solved} of ${verdicts.length} correct` : "no samples"));
  const block = el("section", { class: "run", "data-run": l }, head);
  if (!verdicts) return block;
  const open = openSample(l, verdicts);
  block.append(el("div", { class: "cells", role: "group", "aria-label": `Responses of ${data.labels[l].name}` },
    ...[...verdicts].map((code, s) => {
      const faint = verdictNames[state.verdict] && code !== state.verdict;
      const name = `Response ${s + 1}: ${(verdictNames[code] || "other").replaceAll("_", " ")}`;
      const cell = el("button", {
        type: "button", class: `cell ${verdictClass(code)}${faint ? " faint" : ""}`, title: name, "aria-label": name,
        "aria-pressed": String(s === open),
      }, GLYPHS[code] || "·");
      cell.addEventListener("click", async () => {
        state.open.set(l, s);
        await drawDetail();
        const again = byId("detail").querySelectorAll(`[data-run="${l}"] .cell`)[s];
        if (again) again.focus({ preventScroll: true });
      });
      return cell;
    })));
  if (open >= 0) block.append(...sampleView(verdicts[open], open, samples[open]));
  return block;
}

function sampleView(code, s, sample) {
  const facts = el("p", { class: "facts" },
    el("span", { class: `badge ${verdictClass(code)}` }, `${GLYPHS[code] || "·"} ${(verdictNames[code] || "other").replaceAll("_", " ")}`),
    el("span", {}, `response ${s + 1}`));
  if (!sample) return [facts, el("p", { class: "quiet" }, "This response was left out to keep the page small; it is in samples.parquet.")];
  const [response, tokens, truncated, answer, leftOut, metrics, extras] = sample;
  facts.append(el("span", {}, "answer ", el("b", {}, visible(answer) || "none")), el("span", {}, plural(tokens, "token")));
  if (truncated) facts.append(el("span", {}, "cut at the length limit"));
  (metrics || []).forEach((value, m) => {
    if (value !== null) facts.append(el("span", {}, `${data.metrics[m]} `, el("b", {}, figure(value))));
  });
  for (const [name, value] of Object.entries(extras || {})) {
    facts.append(el("span", {}, visible(`${name} `), el("b", {}, visible(typeof value === "string" ? value : JSON.stringify(value)))));
  }
  const text = el("pre", { class: "response", dir: "auto" });
  if (leftOut) {
    const [head, tail] = response;
    text.append(visible(head), el("span", { class: "cut" }, `\n[… ${leftOut.toLocaleString("en")} characters left out on this page …]\n`), visible(tail));
  } else text.append(visible(response) || el("span", { class: "cut" }, "(empty)"));
  return [facts, text];
}

// Opens the next response, or the next with the chosen verdict, in the run that has the focus.
async function moveSample(by) {
  const focused = document.activeElement.closest("[data-run]") || byId("detail").querySelector("[data-run]");
  if (!focused) return;
  const l = Number(focused.dataset.run);
  const [b, i] = state.matches[problems.chosen];
  const verdicts = verdictsOf(b, l, i);
  const wanted = [...Array(verdicts.length).keys()].filter((s) => !verdictNames[state.verdict] || verdicts[s] === state.verdict);
  if (!wanted.length) return;
  const at = wanted.indexOf(state.open.get(l));
  state.open.set(l, wanted[(at + by + wanted.length) % wanted.length]);
  await drawDetail();
}

const pageKeys = shortcuts({
  j: () => problems.choose(problems.chosen + 1),
  k: () => problems.choose(problems.chosen - 1),
  n: () => moveSample(1),
  p: () => moveSample(-1),
  "/": () => byId("filter-text").focus(),
});

function startBrowser() {
  fillFilters();
  document.addEventListener("keydown", pageKeys);
  byId("filters").addEventListener("input", applyFilters);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(applyFilters));
  return applyFilters();
}
