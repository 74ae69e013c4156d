// Check: reports of `regard check --save`, each finding with its smallest example; two reports compared.

import { diverging, field, format, formatShort, h2, hatch, headRow, help, html, muted, plural, script, svg, tbody, tr, warning } from "./dom.js";
import { load } from "./remote.js";

const LARGEST = 4 << 20; // bytes of a report
const MOST = 500;
const read = (parameters) => ({ fact: (parameters.get("fact") ?? "").slice(0, 80), all: parameters.get("all") === "1" });
const write = (state) => new URLSearchParams({ ...(state.fact ? { fact: state.fact } : {}), ...(state.all ? { all: "1" } : {}) });
const EXAMPLE = ["# my_attention.py holds a function attention(q, k, v, mask=None)", "regard check my_attention.py:attention --save report.json", "regard explore --report report.json"].join("\n");

let reports = []; // one, or two to compare

function parse(text) {
  let found;
  try { found = JSON.parse(text); } catch { throw new Error("This file is no JSON. Choose a report of regard check --save."); }
  if (!Array.isArray(found?.facts) || !found.facts.every((fact) => typeof fact?.name === "string")) throw new Error("This is no report of regard check --save.");
  const string = (value) => (value === undefined || value === null ? "" : String(value).slice(0, 20000));
  return { subject: string(found.subject), ok: Boolean(found.ok), conventions: Object.fromEntries(Object.entries(found.conventions ?? {}).slice(0, 50).map(([name, value]) => [name, string(value)])),
    facts: found.facts.slice(0, MOST).map((fact) => Object.fromEntries(["name", "status", "reason", "grade", "student", "engineer", "found", "cause", "example", "declare"].map((key) => [key, string(fact[key])]))) };
}

// A tensor of an example, torch.tensor([[1.0, float('nan')]]), torch.ones(2, 3) or torch.full((2, 3), 5.0), as rows of
// its last two axes.
function readTensor(text) {
  const made = /^torch\.(zeros|ones|full)\(\(?([\d, ]+)\)?(?:, (-?[\d.]+))?(?:, dtype=[\w.]+)?\)$/.exec(text);
  if (made) {
    const [rows, columns] = made[2].split(",").map(Number).slice(-2);
    return columns > 0 && rows * columns <= 256 ? Array.from({ length: rows }, () => Array(columns).fill({ zeros: 0, ones: 1, full: Number(made[3]) }[made[1]])) : null;
  }
  const list = /^torch\.tensor\((\[.*\])(?:, dtype=[\w.]+)?\)$/.exec(text)?.[1];
  if (!list || list.length > 4000) return null;
  let found;
  try { found = JSON.parse(list.replace(/(-?)float\('(\w+)'\)/g, '"$1$2"').replaceAll("True", "1").replaceAll("False", "0").replace(/(\d)\.(?=[,\]])/g, "$1")); } catch { return null; }
  while (Array.isArray(found?.[0]?.[0])) [found] = found;
  if (!Array.isArray(found)) return null;
  if (!Array.isArray(found[0])) found = [found];
  const value = (x) => (typeof x === "number" ? x : { nan: NaN, inf: Infinity, "-inf": -Infinity }[x] ?? NaN);
  return found.map((row) => row.map(value));
}

// The tensors of an example by name, "gives" and "should be" last.
function tensorsOf(example) {
  return example.split("\n").flatMap((line) => {
    const [, name, text] = /^(?:# )?(\w+|gives|should be)\s+(?:= )?(torch\..*)$/.exec(line) ?? [];
    const rows = name && readTensor(text);
    return rows ? [{ name, rows }] : [];
  });
}

function drawTensors(fact) {
  const tensors = tensorsOf(fact.example);
  if (!tensors.length) return null;
  const finite = tensors.flatMap(({ rows }) => rows.flat()).filter(Number.isFinite);
  const largest = Math.max(1e-9, ...finite.map(Math.abs));
  const pattern = hatch();
  let x = 0;
  const parts = tensors.map(({ name, rows }, t) => {
    const [width, left] = [rows[0].length * 56, x];
    x += Math.max(width, name.length * 9) + 28;
    return svg("g", { transform: `translate(${left},0)` }, svg("text", { x: 0, y: 16, class: "title" }, name), rows.flatMap((row, r) => row.map((value, c) => {
      const colour = Number.isFinite(value) ? diverging(value, largest) : { fill: pattern.fill, text: "currentColor" };
      return svg("g", { class: "cell", tabindex: "0", role: "button", "data-why": `x.${fact.name}.${t}.${r}.${c}`, "aria-label": `${name}, row ${r + 1}, column ${c + 1}: ${format(value)}. Why this number?` }, svg("rect", { x: c * 56, y: 28 + r * 32, width: 54, height: 30, fill: colour.fill }), svg("text", { x: c * 56 + 27, y: 48 + r * 32, style: { fill: colour.text } }, formatShort(value)));
    })));
  });
  const height = 32 + 32 * Math.max(...tensors.map(({ rows }) => rows.length));
  return html("div", { class: "scroll" }, svg("svg", { class: "picture example", viewBox: `0 0 ${x} ${height}`, style: { width: `${x}px` }, role: "group", "aria-label": `The smallest input that shows ${fact.name}` }, pattern.defs, parts));
}

const isFinding = (fact) => fact.found || ["failed", "differs"].includes(fact.status);

function finding(fact) {
  return html("article", { class: `card finding ${fact.grade}`, id: `fact-${fact.name}` }, html("h3", {}, fact.name, " ", html("span", { class: "verdict refuted" }, fact.grade || fact.status)), html("p", {}, fact.student),
    html("dl", {}, [["Found", fact.found], ["Usual cause", fact.cause], ["The rule", fact.engineer], ["If it is meant", fact.declare]].filter(([, text]) => text).map(([name, text]) => [html("dt", {}, name), html("dd", {}, text)])),
    fact.example ? [help("The smallest input that shows it, and its code, which runs as it stands:"), drawTensors(fact), script(fact.example)] : null);
}

function comparison([a, b]) {
  const before = new Map(a.facts.map((fact) => [fact.name, fact]));
  const rows = b.facts.map((fact) => ({ name: fact.name, before: before.get(fact.name)?.status ?? "not tested", after: fact.status })).filter((row) => row.before !== row.after);
  return html("div", {}, h2(`${a.subject} and ${b.subject}`), rows.length ? html("table", {}, headRow(["fact", a.subject, b.subject]), tbody(rows.map((row) => tr(row.name, html("td", { class: row.before === "passed" ? "good" : "error" }, row.before), html("td", { class: row.after === "passed" ? "good" : "error" }, row.after))))) : html("p", {}, "Both have the same result for every fact."));
}

function mount(element, state, update, data) {
  const body = html("div", {});
  const message = warning();
  const open = (at) => html("input", { type: "file", accept: ".json,application/json", onchange: async (event) => {
    const file = event.target.files[0];
    if (!file) return;
    try {
      if (file.size > LARGEST) throw new Error("A report has at most 4 MB.");
      reports[at] = parse(await file.text());
      message.textContent = "";
    } catch (error) { message.textContent = error.message; }
    draw();
  } });
  element.append(html("h1", { class: "view-title" }, "Check"), html("p", {}, "What regard check found about an attention: which rules it keeps, which it breaks, and the smallest input that shows it."), html("div", { class: "row" }, field("A report", open(0)), field("Another report, to compare", open(1))), message, body);
  if (!reports.length) load(data, "report").then((found) => { if (found.report) { reports = [parse(JSON.stringify(found.report))]; draw(); } }, () => {});

  function draw() {
    const [first, second] = reports;
    if (!first) { body.replaceChildren(html("button", { onclick: () => load(data, "example_report").then((found) => { reports = [parse(JSON.stringify(found.report))]; draw(); update({}); }, (error) => { message.textContent = error.message; }) }, "Open an example"), muted("Or make a report of your own attention:"), script(EXAMPLE)); return; }
    const findings = first.facts.filter(isFinding);
    const passed = first.facts.filter((fact) => fact.status === "passed");
    body.replaceChildren(h2(`${first.subject}: ${findings.length ? plural(findings.length, "finding") : "nothing is broken"}`),
      html("table", {}, html("caption", {}, "Conventions that were measured"), tbody(Object.entries(first.conventions).map(([name, value]) => tr(name, html("td", { class: "reason" }, value))))),
      ...(first && second ? [comparison(reports)] : []), ...findings.map(finding), html("details", {}, html("summary", {}, `${plural(passed.length, "fact")} passed`), html("ul", {}, passed.map((fact) => html("li", {}, html("strong", {}, fact.name), `: ${fact.student}`)))));
  }
  return draw;
}

const table = () => ({ head: ["fact", "status", "found"], rows: (reports[0]?.facts ?? []).map((fact) => [fact.name, fact.status, fact.found]) });
function why(_, key) {
  const [kind, name, t, r, c] = key.split(".");
  const fact = reports[0]?.facts.find((each) => each.name === name);
  const tensor = kind === "x" && fact ? tensorsOf(fact.example)[Number(t)] : null;
  const value = tensor?.rows[Number(r)]?.[Number(c)];
  if (value === undefined) return null;
  const result = ["gives", "should be"].includes(tensor.name);
  return { title: `${tensor.name}, row ${Number(r) + 1}, column ${Number(c) + 1}`, value, formula: result ? `${tensor.name === "gives" ? "computed by" : "what the rule demands of"} ${reports[0].subject}` : "an input of the smallest example", note: result ? fact.engineer : "The checker made the input smaller until nothing could be removed.", parts: [], end: result ? "Run the code below the picture to compute it." : "This is an input." };
}

const python = () => 'import regard\nfrom my_attention import attention  # your own\n\nreport = regard.check(attention)\nprint(report)\n';

export const checkView = { title: "Check", read, write, mount, why, table, python };
