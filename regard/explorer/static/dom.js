// Elements, numbers and colours. Text is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const MATHML = "http://www.w3.org/1998/Math/MathML";

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, setting] of Object.entries(value)) element.style.setProperty(key, setting);
    else if (name in element && !(element instanceof SVGElement) && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const html = (tag, properties, ...children) => build(document.createElement(tag), tag === "button" ? { type: "button", ...properties } : properties, children);
export const svg = (tag, properties, ...children) => build(document.createElementNS(SVG, tag), properties, children);
export const math = (tag, properties, ...children) => build(document.createElementNS(MATHML, tag), properties, children);

// Three decimals where they say something, otherwise powers of ten.
export function format(x) {
  if (x === null || x === undefined) return "";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = size !== 0 && (size < 5e-4 || size >= 1e5) ? x.toExponential(2) : Number.isInteger(x) ? String(x) : x.toFixed(3);
  return text.replace("-", "−");
}

// The same in at most six characters, for the cells of a matrix.
export function formatShort(x) {
  const size = Math.abs(x);
  if (!Number.isFinite(x) || Number.isInteger(x)) return size >= 1e5 && Number.isFinite(x) ? x.toExponential(0).replace("-", "−").replace("e+", "e") : format(x);
  if (size < 5e-3) return x.toExponential(0).replaceAll("-", "−");
  return (size >= 1000 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : size >= 1 ? x.toFixed(2) : x.toFixed(3)).replace("-", "−");
}

// Text of Python in which code is between backticks.
export const withCode = (text) => text.split("`").map((part, k) => (k % 2 ? html("code", {}, part) : part));

export const help = (...parts) => html("p", { class: "help" }, parts);
export const warning = (...parts) => html("p", { class: "error", role: "alert" }, parts);
export const muted = (...parts) => html("p", { class: "muted" }, parts);

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// A number that can be unfolded: Enter or a click asks the view why.
export function number(value, key, label) {
  return html("button", { class: "number", "data-why": key, "aria-label": `${label}: ${format(value)}. Why this number?` }, format(value));
}

const mix = (a, b, t) => a.map((x, c) => Math.round(x + (b[c] - x) * t));
const SEQUENTIAL = [[255, 255, 255], [205, 224, 242], [133, 182, 222], [61, 130, 189], [19, 78, 142], [6, 38, 82]];
const NEGATIVE = [[247, 247, 247], [244, 189, 122], [197, 108, 14], [116, 52, 2]];
const POSITIVE = [[247, 247, 247], [143, 191, 224], [41, 113, 176], [6, 50, 102]];

// In dark mode, zero is near the background and large values are bright.
const DARK = {
  sequential: [[24, 27, 32], [22, 58, 98], [30, 104, 164], [74, 152, 208], [150, 203, 238], [235, 247, 255]],
  negative: [[38, 42, 48], [122, 70, 16], [214, 128, 36], [255, 205, 140]], positive: [[38, 42, 48], [22, 78, 128], [64, 142, 206], [176, 217, 247]],
};
let dark = false;
export function setDark(on) { dark = on; }

function along(stops, t) {
  const at = Math.min(1, Math.max(0, t)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return mix(stops[low], stops[low + 1], at - low);
}

const css = (rgb) => `rgb(${rgb.join(",")})`;
// White or black, whichever has more contrast: at least 4.58 to 1 on any colour (WCAG 2 asks for 4.5).
const textOn = (rgb) => {
  const [r, g, b] = rgb.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.179 ? "#ffffff" : "#000000";
};

// The colour of a value between 0 and `largest`, and the colour of text on it.
export function sequential(value, largest = 1) {
  const rgb = along(dark ? DARK.sequential : SEQUENTIAL, largest > 0 ? value / largest : 0);
  return { fill: css(rgb), text: textOn(rgb) };
}

// The colour of a value between -largest and largest; zero is nearly white.
export function diverging(value, largest) {
  const rgb = along(dark ? DARK[value < 0 ? "negative" : "positive"] : value < 0 ? NEGATIVE : POSITIVE, largest > 0 ? Math.abs(value) / largest : 0);
  return { fill: css(rgb), text: textOn(rgb) };
}

// Okabe and Ito's colours, which differ for the colour-blind too; some darker, for contrast with white.
export const CATEGORY = ["#0072b2", "#d55e00", "#00805e", "#b0508a", "#946c00", "#3d7a99", "#7a4b9a", "#555b63"];
export const category = (index) => CATEGORY[index % CATEGORY.length];

let patterns = 0;

// A pattern of diagonal lines for hidden cells; never the colour of zero.
export function hatch() {
  patterns += 1;
  const id = `hatch-${patterns}`;
  const pattern = svg("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 6, height: 6, class: "hatch-ground" }), svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch-line" }));
  return { defs: svg("defs", {}, pattern), fill: `url(#${id})` };
}

// A scale beside a map: a strip of colours with its two ends.
export function colourScale(colour, low, high, title) {
  const steps = 40;
  const strip = svg("svg", { class: "scale-strip", viewBox: `0 0 ${steps} 1`, preserveAspectRatio: "none", "shape-rendering": "crispEdges", "aria-hidden": "true" },
    Array.from({ length: steps }, (_, k) => svg("rect", { x: k, y: 0, width: 1.5, height: 1, fill: colour(low + ((high - low) * k) / (steps - 1)).fill })));
  return html("div", { class: "scale" }, html("span", {}, format(low)), strip, html("span", {}, format(high)), html("span", { class: "muted" }, title));
}

export const headRow = (cells) => html("thead", {}, html("tr", {}, cells.map((cell) => html("th", { scope: "col" }, cell))));

export const h2 = (...parts) => html("h2", {}, parts);
export const tbody = (...rows) => html("tbody", {}, rows);
export const tr = (name, ...cells) => html("tr", {}, html("th", { scope: "row" }, name), cells);
export const script = (text) => html("pre", { class: "script", tabindex: "0" }, html("code", {}, text));

// "Show as table" under every picture.
export function asTable(caption, head, rows) {
  return html("details", { class: "as-table" }, html("summary", {}, "Show as table"),
    html("div", { class: "scroll" }, html("table", {}, html("caption", {}, caption),
      headRow(head),
      tbody(rows.map((row) => html("tr", {}, row.map((cell, c) => html(c ? "td" : "th", c ? {} : { scope: "row" }, typeof cell === "number" ? format(cell) : cell))))))));
}

// Remembers which control inside `root` has the focus. The returned function restores the focus after a redraw: to the
// control of the same name, or else to the control at its position.
export function holdFocus(root) {
  const controls = () => [...root.querySelectorAll("a, button, input, select, summary, [tabindex]")];
  const name = ({ tagName, dataset, ariaLabel, labels, textContent }) => tagName + (dataset.handle ?? dataset.why ?? dataset.head ?? ariaLabel ?? labels?.[0]?.textContent ?? textContent);
  const old = document.activeElement;
  const at = controls().indexOf(old);
  const own = at < 0 ? "" : name(old);
  return () => {
    if (at < 0 || old.isConnected || document.activeElement !== document.body) return;
    const now = controls();
    (now.find((each) => name(each) === own) ?? now[Math.min(at, now.length - 1)])?.focus();
  };
}

// A labelled control: the label names it, the help says what it does.
let fields = 0;
export function field(label, control, help = null) {
  fields += 1; // a pinned view shows the same controls a second time, and ids must differ
  const id = `field-${fields}`;
  control.id = id;
  return html("div", { class: "field" }, html("label", { for: id }, label), control, help && html("p", { class: "help" }, help));
}

export function checkbox(label, checked, change) {
  return html("label", { class: "check" }, html("input", { type: "checkbox", checked, onchange: (event) => change(event.target.checked) }), label);
}

export function select(options, chosen, change) {
  return html("select", { onchange: (event) => change(event.target.value) },
    options.map(([value, label]) => html("option", { value, selected: value === chosen }, label)));
}

// beta on a logarithmic scale whose ends are 0 and infinity.
const BETA_STEPS = 200;
export function betaToSlider(beta) {
  if (beta === 0) return 0;
  if (beta === Infinity) return BETA_STEPS;
  return Math.min(BETA_STEPS - 1, Math.max(1, Math.round(((Math.log10(beta) + 2) / 4) * (BETA_STEPS - 2) + 1)));
}
export function sliderToBeta(step) {
  if (step <= 0) return 0;
  if (step >= BETA_STEPS) return Infinity;
  return Number((10 ** (((step - 1) / (BETA_STEPS - 2)) * 4 - 2)).toPrecision(3));
}
export function betaSlider(beta, change) {
  const output = html("output", { class: "tabular" });
  const input = html("input", { type: "range", max: String(BETA_STEPS), oninput: () => change(sliderToBeta(Number(input.value))) });
  const set = (value) => { input.value = String(betaToSlider(value)); input.ariaValueText = output.textContent = `β = ${format(value)}`; };
  set(beta);
  return { input, output, set };
}
