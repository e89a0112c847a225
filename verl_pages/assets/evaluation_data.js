// Names of what was evaluated.
const AVERAGE = -1;

const rowOf = (label, benchmark) => data.rows.find((row) => row.label === label && row.benchmark === benchmark);
const benchmarkName = (b) => (b === AVERAGE ? "macro average" : data.benchmarks[b].name);
const verdictNames = Object.fromEntries(data.verdicts.map(([code, name]) => [code, name]));
const verdictClass = (code) => (code === "c" ? "correct" : code === "w" ? "wrong" : "else");
const GLYPHS = { c: "✓", w: "×", n: "–", u: "?", t: "T", m: "M", x: "C" };
