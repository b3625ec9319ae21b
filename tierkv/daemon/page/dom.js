// Elements, made of text only: what an engine calls itself can do nothing here.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const at = (id) => document.getElementById(id);

export function text(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

// A cell is text, or {text, and attributes}. The first cell of a row is its heading.
function cell(tag, content) {
  const { text: words, ...attributes } = typeof content === "object" && content !== null ? content : { text: content };
  return html(tag, tag === "th" ? { scope: "row", ...attributes } : attributes, String(words));
}

// `none` is said where there is no row; `more` is how many others there are.
export function table(element, headings, rows, none, more = 0) {
  const head = html("thead", {}, html("tr", {}, ...headings.map((one) => {
    const { text: words, ...attributes } = typeof one === "object" ? one : { text: one };
    return html("th", { scope: "col", ...attributes }, words);
  })));
  const body = html("tbody", {}, ...rows.map((row) =>
    html("tr", {}, ...row.map((content, place) => cell(place ? "td" : "th", content)))));
  const words = !rows.length ? none : more > 0 ? `and ${more.toLocaleString("en-US")} more` : null;
  if (words) body.append(html("tr", {}, html("td", { colspan: headings.length, class: "faint" }, words)));
  element.replaceChildren(head, body);
}

export const number = (words, attributes = {}) => ({ text: words, class: "number", ...attributes });
