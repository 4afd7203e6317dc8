// Elements built from text: text of peers is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

// Sets text only when it changes, so that selections and screen readers are not disturbed.
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export function show(element, visible) {
  element.hidden = !visible;
}

export const peerLink = (peer, name) =>
  el("a", { class: "name", href: `/peers/${encodeURIComponent(peer)}`, title: name }, name);

export async function fetchJson(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path} answers ${answer.status}`);
  return answer.json();
}
