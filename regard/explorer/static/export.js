// Saving the picture and the numbers of a view.

const PROPERTIES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "color"];

export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// The main picture with its computed colours written into it, so that it looks the same elsewhere.
function standalone(stage) {
  const picture = stage.querySelector("section:not(.pinned) svg.picture, svg.picture");
  const copy = picture.cloneNode(true);
  const originals = [picture, ...picture.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((element, k) => {
    const computed = getComputedStyle(originals[k]);
    for (const property of PROPERTIES) element.setAttribute(property, computed.getPropertyValue(property));
    element.removeAttribute("class");
    element.removeAttribute("style");
  });
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

export function exportSvg(stage, name) {
  save(new Blob([standalone(stage).text], { type: "image/svg+xml" }), name);
}

export async function exportPng(stage, name) {
  const { text, width, height } = standalone(stage);
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
