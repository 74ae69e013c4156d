// The shell: navigation, state in the address, the inspector, pinning, sharing and export.

import { colourScale, diverging, format, h2, hatch, headRow, holdFocus, html, muted, setDark, svg, tbody, tr } from "./dom.js";
import { attentionView } from "./attention.js";
import { lessonsView, offer } from "./lessons.js";
import { masksView } from "./masks.js";
import { modelsView } from "./models.js";
import { planeView } from "./plane.js";
import { checkView } from "./check.js";
import { exportCsv, exportPng, exportSvg, save } from "./export.js";
import { sheetsView } from "./sheets.js";

const VIEWS = { plane: planeView, attention: attentionView, masks: masksView, models: modelsView, check: checkView, sheets: sheetsView, lessons: lessonsView };
offer(VIEWS);
const KEYS = [
  ["1 to 7", "open a view"], ["Enter", "on a number: why this number?"], ["Backspace", "one step back in the inspector"],
  ["Arrow keys", "move the chosen key, query or value, or the cell of a matrix"], ["Shift + arrow", "move it by a tenth as much"], ["P", "pin this state and compare"],
  ["T", "present: larger type"], ["D", "light or dark"], ["?", "this list"], ["Escape", "close"],
];
const LARGEST_MAP = 64; // rows or columns of a difference that is drawn

// The address is #view?name=value; a pinned state is the value of `pin`, in the same form.
function readAddress(first, held) {
  const stored = document.querySelector('meta[name="regard-state"]');
  const text = (held || location.hash || (stored && stored.content) || `#${first || "plane"}`).slice(1);
  const [name, query = ""] = text.split(/\?(.*)/s); // a text may hold another question mark
  const parameters = new URLSearchParams(query);
  const pin = parameters.get("pin");
  parameters.delete("pin");
  return { name: Object.hasOwn(VIEWS, name) ? name : "plane", parameters, pin: pin === null ? null : new URLSearchParams(pin) };
}

function writeAddress(name, state, pinned) {
  const parameters = VIEWS[name].write(state);
  if (pinned) parameters.set("pin", VIEWS[name].write(pinned).toString());
  const query = parameters.toString();
  return `#${name}${query ? `?${query}` : ""}`;
}

// `data` is what the server or the export put into the page; data.api says that Python answers.
export function start(root, data) {
  let current = null; // { name, view, state, pinned, drawn }
  let trail = []; // keys of the inspector, innermost last
  let pending = false;
  let mounted = []; // functions that draw the shown states
  let held = data.embedded ? `#${data.start}` : "";
  document.body.classList.toggle("embedded", Boolean(data.embedded));
  const go = (address) => { if (data.embedded) { held = address; open(); } else location.hash = address; };

  const announce = html("p", { class: "hidden-visually", "aria-live": "polite" });
  const heading = html("h1", { class: "hidden-visually" });
  const stage = html("main", { id: "stage", tabindex: "-1" });
  const inspector = html("aside", { id: "inspector", "aria-label": "Why this number?" });
  const dialog = html("dialog", { "aria-label": "Keys" });
  const links = Object.entries(VIEWS).map(([name, view]) => html("a", { href: `#${name}`, "data-view": name }, view.title));
  const action = (label, title, act, name = "") => html("button", { title, class: name, onclick: act }, label);
  const menu = html("details", { class: "menu" }, html("summary", {}, "Export"), html("div", {},
    action("SVG", "Save the picture as SVG", () => exportSvg(stage, numbers(), fileName("svg"))),
    action("PNG", "Save the picture as PNG", () => exportPng(stage, numbers(), fileName("png"))),
    action("CSV", "Save the numbers as CSV", () => exportCsv(numbers(), fileName("csv"))),
    action("HTML", "Save this page with its state: it works without a server", () => exportPage())));

  root.append(
    html("a", { class: "skip", href: "#stage", onclick: (event) => { event.preventDefault(); stage.focus(); } }, "Skip to the view"),
    html("header", {},
      html("a", { href: "#plane", class: "brand" }, "regard"), heading,
      html("nav", { "aria-label": "Views" }, links),
      html("div", { class: "actions" },
        action("Pin A", "Keep this state and compare it with the next ones (P)", togglePin, "pin"),
        action("Share", "Copy the address of this state", () => copy(data.embedded ? held : location.href, "The address is copied.")),
        action("Copy Python", "Copy the Python that computes these numbers", () => copy(current.view.python(current.state), "The Python is copied.")),
        menu,
        action("Present", "Larger type for a projector (T)", present),
        action("Light / dark", "Switch between light and dark (D)", switchTheme),
        action("?", "Keys", showKeys))),
    html("div", { id: "body" }, stage, inspector), html("footer", { class: "hint muted" }, "Choose any number, or press Enter on it, to see how it was computed."), announce, dialog);

  const numbers = () => current.view.table(current.state);
  function say(text) { announce.textContent = text; }

  async function copy(text, message) {
    try {
      await navigator.clipboard.writeText(text);
      say(message);
      flash(message);
    } catch {
      // no permission, or no secure context: show the text, selected, to copy by hand
      const area = html("textarea", { readonly: true, rows: 12, "aria-label": "Text to copy" }, text);
      openDialog("Copy this text", area);
      area.select();
    }
  }

  function flash(message) {
    const note = html("div", { class: "flash" }, message);
    root.append(note);
    setTimeout(() => note.remove(), 1600);
  }

  function openDialog(title, ...content) {
    dialog.replaceChildren(h2(title), ...content, html("form", { method: "dialog" }, html("button", { type: "submit" }, "Close")));
    dialog.showModal();
  }

  function showKeys() { openDialog("Keys", html("dl", {}, [...KEYS, ...Object.entries(current.view.keys ?? {}).map(([key, [text]]) => [key.toUpperCase(), text])].map(([key, text]) => [html("dt", {}, key), html("dd", {}, text)]))); }
  function fileName(ending) { return `regard-${current.name}.${ending}`; }

  function present() { document.documentElement.classList.toggle("present"); }
  function switchTheme() {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    commit(false);
    open(); // colours of maps are computed
  }
  const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  function exportPage() {
    const head = document.head.cloneNode(true);
    head.querySelector('meta[name="regard-state"]')?.remove();
    head.append(html("meta", { name: "regard-state", content: writeAddress(current.name, current.state, current.pinned) }));
    const scripts = [...document.querySelectorAll("script")].map((script) => {
      const copy = script.cloneNode(true);
      // a saved page has no server to ask; what the page itself holds stays in it
      if (copy.id === "data") copy.textContent = JSON.stringify({ ...data, api: false }).replaceAll("<", "\\u003c");
      return copy.outerHTML;
    }).join("\n");
    const page = `<!doctype html>\n<html lang="en">${head.outerHTML}<body><div id="app"></div>\n${scripts}</body></html>`;
    save(new Blob([page], { type: "text/html" }), fileName("html"));
  }

  function togglePin() {
    current.pinned = current.pinned ? null : structuredClone(current.state);
    say(current.pinned ? "This state is pinned as A." : "The pin is removed.");
    mount();
    commit(true);
  }

  // Change the state. Redraw in the next frame; the address follows when the value has settled.
  let settle = 0;
  function schedule() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  }
  function update(change) {
    Object.assign(current.state, change);
    schedule();
    clearTimeout(settle);
    settle = setTimeout(() => commit(false), 250);
  }

  function commit(push) {
    const address = writeAddress(current.name, current.state, current.pinned);
    if (data.embedded) held = address; // a frame in a notebook has no address of its own
    else if (address !== location.hash) history[push ? "pushState" : "replaceState"](null, "", address);
  }

  function mount() {
    const { view, state, pinned } = current;
    setDark(isDark());
    for (const shown of mounted) shown.stop?.(); // cancel the requests of the old views
    stage.replaceChildren();
    if (pinned) {
      const a = html("section", { class: "pinned", inert: true, "aria-label": "Pinned state A" });
      const b = html("section", { "aria-label": "Current state B" });
      const difference = html("section", { class: "difference", "aria-label": "Difference B minus A" });
      stage.append(html("div", { class: "pair" }, html("div", {}, h2("A, pinned"), a), html("div", {}, h2("B"), b), difference));
      mounted = [view.mount(a, pinned, () => schedule(), data), view.mount(b, state, update, data)];
      mounted[0]();
      current.difference = difference;
    } else {
      mounted = [view.mount(stage, state, update, data)];
      current.difference = null;
    }
    current.redraw = mounted.at(-1);
    draw();
  }

  function draw() {
    const giveBack = holdFocus(stage);
    current.redraw();
    giveBack();
    if (current.difference) current.difference.replaceChildren(differenceMaps(current.view), compare(current.view.table(current.pinned), numbers()));
    showWhy();
    stage.dataset.drawn = String(Number(stage.dataset.drawn ?? 0) + 1);
  }

  // The maps of a view, `maps(state)`, in one state minus the other: diverging maps with a common scale.
  function differenceMaps(view) {
    const [before, after] = [current.pinned, current.state].map((state) => view.maps?.(state) ?? []);
    const pairs = after.flatMap((map) => { const old = before.find(({ title }) => title === map.title); return old && old.rows.length === map.rows.length && old.rows[0]?.length === map.rows[0]?.length && Math.max(map.rows.length, map.rows[0].length) <= LARGEST_MAP ? [{ ...map, rows: map.rows.map((row, i) => row.map((x, j) => x - old.rows[i][j])), isHidden: (i, j) => Boolean(map.isHidden?.(i, j) && old.isHidden?.(i, j)) }] : []; });
    if (!pairs.length) return "";
    const largest = Math.max(1e-12, ...pairs.flatMap(({ rows }) => rows.flat()).map(Math.abs).filter(Number.isFinite));
    const hatching = hatch();
    let hatched = false;
    const draw = ({ title, rows, down = [], across = [], small, isHidden }) => {
      const size = small ? 4 : Math.max(8, Math.min(30, Math.floor(360 / rows[0].length)));
      const [left, top] = [down.length ? 44 : 0, across.length ? 20 : 0];
      const cells = rows.flatMap((row, i) => row.map((x, j) => {
        const hidden = isHidden(i, j); // in both states; a cell hidden in one state has a difference
        hatched ||= hidden;
        return svg("rect", { x: left + j * size, y: top + i * size, width: size - (small ? 0 : 1), height: size - (small ? 0 : 1), fill: hidden ? hatching.fill : diverging(x, largest).fill }, svg("title", {}, `${down[i] ?? i + 1}, ${across[j] ?? j + 1}: ${hidden ? "hidden" : format(x)}`));
      }));
      const labels = size < 12 ? [] : [...down.slice(0, rows.length).map((text, i) => svg("text", { x: left - 4, y: top + (i + 0.5) * size + 4, class: "label end" }, text.slice(0, 6))), ...across.slice(0, rows[0].length).map((text, j) => svg("text", { x: left + (j + 0.5) * size, y: top - 5, class: "label" }, text.slice(0, 4)))];
      const box = [left + rows[0].length * size, top + rows.length * size];
      return html("figure", {}, html("figcaption", {}, title), svg("svg", { viewBox: `0 0 ${box.join(" ")}`, width: box[0], height: box[1], class: "difference-map", role: "img", "aria-label": `${title}: B minus A` }, labels, cells));
    };
    const figures = pairs.map(draw);
    return html("div", {}, svg("svg", { width: 0, height: 0, class: "definitions", "aria-hidden": "true" }, hatching.defs), h2("B minus A"), html("div", { class: "maps" }, figures), colourScale((x) => diverging(x, largest), -largest, largest, `difference${hatched ? "; hatched: hidden in both" : ""}`));
  }

  // The numbers of both states and their differences; a row that only one state has gets no difference.
  function compare(a, b) {
    const before = new Map(a.rows.map((row) => [String(row[0]), row]));
    const rows = b.rows.flatMap((row) => row.slice(1).map((value, c) => {
      const old = before.get(String(row[0]))?.[c + 1];
      return { name: row.length > 2 ? `${row[0]}, ${b.head[c + 1]}` : String(row[0]), old, value };
    })).filter(({ value }) => typeof value === "number");
    const largest = Math.max(1e-12, ...rows.map(({ old, value }) => (typeof old === "number" ? Math.abs(value - old) : 0)).filter(Number.isFinite));
    return html("table", { class: "compare" }, html("caption", {}, "The numbers of both states"),
      headRow(["number", "A", "B", "B − A"]),
      tbody(rows.map(({ name, old, value }) => {
        const change = typeof old === "number" ? value - old : null;
        const colour = change === null ? null : diverging(change, largest);
        return tr(name, html("td", {}, format(old)), html("td", {}, format(value)),
          html("td", colour ? { style: { background: colour.fill, color: colour.text } } : {}, format(change)));
      })));
  }

  function showWhy() {
    const steps = trail.map((key) => ({ key, why: current.view.why(current.state, key, update, data) })).filter(({ why }) => why);
    trail = steps.map(({ key }) => key);
    document.body.classList.toggle("inspecting", steps.length > 0);
    for (const cell of stage.querySelectorAll("[data-why]")) cell.classList.toggle("chosen", cell.dataset.why === trail[trail.length - 1]);
    if (!steps.length) {
      inspector.replaceChildren();
      return;
    }
    const { why } = steps[steps.length - 1];
    const crumbs = html("ol", { class: "crumbs" }, steps.map(({ why: step }, depth) => html("li", {}, html("button", { onclick: () => { trail = trail.slice(0, depth + 1); showWhy(); } }, step.title))));
    const parts = (why.parts ?? []).map((part) => tr(part.label, html("td", {},
      part.key ? html("button", { class: "number", "data-into": part.key, "aria-label": `${part.label}: ${format(part.value)}. Why this number?` }, format(part.value)) : format(part.value))));
    const giveBack = holdFocus(inspector);
    const full = (value) => (typeof value === "number" ? String(value) : "");
    inspector.replaceChildren(h2("Why this number?"), crumbs,
      html("p", { class: "result" }, why.value === null ? why.title : `${why.title} = `, html("strong", { class: "tabular" }, format(why.value))),
      html("p", { class: "formula" }, why.formula), muted(why.note ?? ""),
      parts.length ? html("div", { class: "scroll" }, html("table", {}, tbody(parts))) : muted(why.parts ? why.end ?? "This is an input." : ""),
      html("div", { class: "actions" },
        html("button", { onclick: () => copy([`${why.title} = ${full(why.value)}`, ...(why.parts ?? []).map((part) => `${part.label}\t${full(part.value)}`)].join("\n"), "The numbers are copied.") }, "Copy"),
        html("button", { onclick: back }, "Back")));
    giveBack();
    say(`${why.title} is ${format(why.value)}`);
  }

  // By keyboard, Enter goes into the inspector, and leaving it leads back to the number.
  const enter = () => (inspector.querySelector("[data-into]") ?? inspector.querySelector("button"))?.focus();
  function leave(rest) {
    const [first] = trail;
    const inside = inspector.contains(document.activeElement);
    trail = rest;
    showWhy();
    if (inside && rest.length) enter();
    else if (inside && first) stage.querySelector(`[data-why="${CSS.escape(first)}"]`)?.focus();
  }
  const back = () => leave(trail.slice(0, -1));

  inspector.addEventListener("click", (event) => {
    const into = event.target.closest("[data-into]");
    if (!into) return;
    trail = [...trail, into.dataset.into];
    showWhy();
    enter();
  });
  const unfold = (event) => {
    const cell = event.target.closest("[data-why]");
    if (!cell || cell.closest("[inert]")) return false;
    trail = [cell.dataset.why];
    showWhy();
    return true;
  };
  stage.addEventListener("click", unfold);
  stage.addEventListener("keydown", (event) => {
    const cell = event.target.closest(".cell[data-row]");
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter" && unfold(event)) { event.preventDefault(); enter(); }
    if (!cell || !by) return;
    event.preventDefault();
    const next = cell.parentNode.querySelector(`[data-row="${Number(cell.dataset.row) + by[0]}"][data-column="${Number(cell.dataset.column) + by[1]}"]`);
    if (!next) return;
    cell.setAttribute("tabindex", "-1"); // Tab comes back to the cell that was left
    next.setAttribute("tabindex", "0");
    next.focus();
  });

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    const shortcuts = { p: togglePin, t: present, d: switchTheme, "?": showKeys, Backspace: back, Escape: () => leave([]) };
    const view = Object.keys(VIEWS)[Number(event.key) - 1];
    const own = current.view.keys?.[event.key];
    if (own) { event.preventDefault(); update(own[1](current.state)); return; }
    if (view) go(`#${view}`);
    else if (shortcuts[event.key]) { event.preventDefault(); shortcuts[event.key](); }
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => open());

  function open() {
    const { name, parameters, pin } = readAddress(data.start, held);
    const view = VIEWS[name];
    trail = current?.name === name ? trail : [];
    current = { name, view, state: view.read(parameters), pinned: pin && view.read(pin) };
    document.body.classList.toggle("reading", ["check", "sheets", "lessons"].includes(name));
    heading.textContent = view.title;
    document.title = `${view.title} – regard`;
    for (const link of links) link.ariaCurrent = link.dataset.view === name ? "page" : null;
    const own = links.find((link) => link.dataset.view === name);
    own.parentElement.scrollLeft = own.offsetLeft - own.parentElement.offsetLeft - 60; // on a phone the row of views scrolls
    mount();
  }
  if (data.embedded) document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]:not(.skip)');
    if (link) { event.preventDefault(); go(link.getAttribute("href")); }
  });
  window.addEventListener("popstate", open); // links, the back button and a changed address; hashchange would be a second event
  open();
}
