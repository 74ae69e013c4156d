// Saving the picture and the numbers of a view.

import { format, hatch, svg } from "./dom.js";
import { sum } from "./maths.js";

const PROPERTIES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "color"];

export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Pictures made of canvases, such as the maps of all heads, side by side with their names.
function gallery(canvases) {
  const [size, across] = [canvases.length === 1 ? 480 : 120, Math.min(canvases.length, 8)];
  const hatching = hatch(); // behind hidden cells, which are transparent
  const parts = canvases.flatMap((canvas, k) => {
    const [x, y] = [(k % across) * (size + 12), Math.floor(k / across) * (size + 40)];
    const name = canvas.closest(".tile")?.getAttribute("aria-label")?.replace(/^Layer (\d+) head (\d+): /, "$1.$2 ") ?? "";
    const image = svg("image", { x, y, width: size, height: size, href: canvas.toDataURL(), style: { "image-rendering": "pixelated" } });
    return [svg("rect", { x, y, width: size, height: size, fill: hatching.fill }), image, svg("text", { x, y: y + size + 16, "font-size": 11, class: "" }, name)];
  });
  return svg("svg", { viewBox: `-8 -8 ${across * (size + 12) + 4} ${Math.ceil(canvases.length / across) * (size + 40) + 8}` }, hatching.defs, parts);
}

// A view without a picture is saved as its table.
function drawTable({ head, rows }) {
  const most = rows.slice(0, 200);
  const widths = head.map((name, c) => 24 + 7.5 * Math.min(60, Math.max(String(name).length, ...most.map((row) => String(typeof row[c] === "number" ? format(row[c]) : row[c] ?? "").length))));
  const starts = widths.map((_, c) => widths.slice(0, c).reduce((sum, x) => sum + x, 0));
  const cell = (value, r, c) => svg("text", { x: starts[c] + 8, y: 22 + 22 * r, "font-size": 13, "font-weight": r ? 400 : 600 }, String(typeof value === "number" ? format(value) : value ?? "").slice(0, 60));
  return svg("svg", { viewBox: `0 0 ${sum(widths)} ${22 * (most.length + 1) + 16}` }, [head, ...most].flatMap((row, r) => row.map((value, c) => cell(value, r, c))));
}

// The picture of a view with its computed colours written into it.
function standalone(stage, table) {
  const section = stage.querySelector("section:not(.pinned):not(.difference)") ?? stage;
  const found = section.querySelector("svg.picture");
  const canvases = [...section.querySelectorAll("canvas.map")];
  const picture = found ?? (canvases.length ? gallery(canvases) : drawTable(table));
  if (!found) { picture.classList.add("hidden-visually"); stage.append(picture); } // styles are computed in the page
  const copy = picture.cloneNode(true);
  const originals = [picture, ...picture.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, k) => {
    const computed = getComputedStyle(originals[k]);
    for (const property of PROPERTIES) element.setAttribute(property, computed.getPropertyValue(property));
    element.removeAttribute("class");
    element.removeAttribute("style");
    if (element.tagName === "image") element.setAttribute("image-rendering", "pixelated");
  });
  if (!found) picture.remove();
  const box = picture.viewBox.baseVal;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", box.width);
  copy.setAttribute("height", box.height);
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ x: box.x, y: box.y, width: box.width, height: box.height })) ground.setAttribute(name, value);
  ground.setAttribute("fill", getComputedStyle(document.body).backgroundColor);
  copy.prepend(ground);
  return { text: new XMLSerializer().serializeToString(copy), width: box.width, height: box.height };
}

export function exportSvg(stage, table, name) {
  save(new Blob([standalone(stage, table).text], { type: "image/svg+xml" }), name);
}

export async function exportPng(stage, table, name) {
  const { text, width, height } = standalone(stage, table);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = 2 * width;
  canvas.height = 2 * height;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(blob, name), "image/png");
}

export function exportCsv({ head, rows }, name) {
  // a cell that begins like a formula would be computed by spreadsheet programs
  const cell = (value) => {
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value ?? "");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  save(new Blob([[head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n")], { type: "text/csv" }), name);
}
