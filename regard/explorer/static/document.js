// Trees of [tag, attributes, children] from Python become elements. Other tags become spans.

import { html, math } from "./dom.js";

const HTML = new Set(["p", "h2", "h3", "h4", "ul", "ol", "li", "blockquote", "strong", "em", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "hr", "br"]);
const MATHML = new Set(["math", "mrow", "mi", "mn", "mo", "mtext", "msub", "msup", "msubsup", "mfrac", "msqrt", "mover", "munder", "munderover", "mtable", "mtr", "mtd", "mspace", "mfenced", "mroot", "mstyle"]);

// `blocks` draws what is no element of text: { view: (attributes, children) => element, question: ... }.
export function drawDocument(nodes, blocks = {}) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    const [tag, attributes, children] = node;
    if (Object.hasOwn(blocks, tag)) return blocks[tag](attributes, children);
    // a long formula scrolls in its box, by keyboard too
    if (tag === "math") return html("div", { class: "formula-box", tabindex: "0", role: "group", "aria-label": "Formula" }, math("math", { display: "block" }, drawDocument(children, blocks)));
    if (MATHML.has(tag)) return math(tag, { width: attributes.width }, drawDocument(children, blocks));
    if (tag === "a") return html("a", { href: attributes.href.startsWith("#") ? attributes.href : "#" }, drawDocument(children, blocks));
    if (tag === "table") return html("div", { class: "scroll" }, html("table", { class: "prose-table" }, drawDocument(children, blocks)));
    if (HTML.has(tag)) return html(tag, {}, drawDocument(children, blocks));
    return html("span", {}, drawDocument(children, blocks));
  });
}

// A list of items to choose from, and the chosen item beside it.
export function shelf(title, groups, chosen, choose) {
  return html("nav", { class: "shelf", "aria-label": title }, groups.map(({ name, items }) => html("details", { open: items.some((item) => item.key === chosen) || groups.length === 1 },
    html("summary", {}, name), html("ul", {}, items.map((item) => html("li", {}, html("button", { class: "link", "aria-current": item.key === chosen ? "true" : null, onclick: () => choose(item.key) }, item.label)))))));
}
