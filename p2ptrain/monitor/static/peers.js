// The table of peers: search, sort, and virtual scrolling, for thousands of rows.

import { byId, el, fetchJson, setText, show } from "./dom.js";
import { ago, bytes, count, duration, orDash, plural, shortId } from "./formats.js";

const FEW = 300;
const FEW_MILLISECONDS = 5_000;
const MANY_MILLISECONDS = 15_000;
const OVERSCAN = 8; // Rows drawn above and below the region, which is at most 0.7 screens high.
const STRIDE = 4; // Rows to scroll before a redraw.
const NUMBERS = new Set([
  "round", "loss", "tokens_per_second", "sent_per_second", "received_per_second", "trained_tokens", "trained_rounds",
  "served_per_second", "started_at", "last_seen",
]);
const CELLS = {
  peer: (row) => shortId(row.peer),
  spans: ({ spans, stages }) =>
    (spans.map(([first, end]) => (end - first === 1 ? `${first}` : `${first}–${end - 1}`)).join(", ") || "–")
    + (stages.length ? ` stage ${stages.join(", ")}` : ""),
  state: (row) => row.state + (row.agrees === false ? ", astray" : "") + (row.proven === false ? ", unproven" : ""),
  loss: (row) => orDash(row.loss, (loss) => loss.toFixed(3)),
  tokens_per_second: (row) => count(row.tokens_per_second),
  sent_per_second: (row) => bytes(row.sent_per_second),
  received_per_second: (row) => bytes(row.received_per_second),
  trained_tokens: (row) => count(row.trained_tokens),
  served_per_second: (row) => orDash(row.served_per_second, count),
  started_at: (row, now) => duration(Math.max(0, now - row.started_at)),
  last_seen: (row, now) => ago(now, row.last_seen),
};

const names = new Map();
export const nameOf = (peer) => names.get(peer);

export function startPeers() {
  const table = byId("peer-table");
  const keys = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.key);
  const spacers = [spacer(keys.length), spacer(keys.length)];
  const view = {
    all: [], rows: [], at: 0, key: "name", down: false, keys, spacers, drawn: new Map(), height: 32, first: 0,
  };
  const arrange = () => {
    choose(view);
    draw(view);
    measure(view);
  };
  makeSortable(table, view, arrange);
  byId("search").addEventListener("submit", (event) => event.preventDefault());
  byId("search-text").addEventListener("input", () => {
    byId("found").setAttribute("aria-live", "polite");
    arrange();
  });
  let waiting = 0;
  byId("peer-scroll").addEventListener("scroll", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => firstRow(view) === view.first || draw(view));
  }, { passive: true });

  let timer = 0;
  const refresh = async () => {
    clearTimeout(timer);
    try {
      if (!document.hidden) {
        take(view, await fetchJson("/api/v1/peers/table"));
        byId("found").setAttribute("aria-live", "off"); // Screen readers announce only search results.
        arrange();
      }
    } catch {
      // The connection status at the top reports it.
    }
    clearTimeout(timer); // Another fetch may have set it meanwhile.
    timer = setTimeout(refresh, view.all.length > FEW ? MANY_MILLISECONDS : FEW_MILLISECONDS);
  };
  refresh();
  return (total) => { // A small swarm shows joins and leaves at once.
    if (view.at && total <= FEW && total !== view.all.length) refresh();
  };
}

function take(view, { at, columns, rows }) {
  view.at = at;
  view.all = rows.map((values) => Object.fromEntries(columns.map((name, index) => [name, values[index]])));
  names.clear();
  for (const row of view.all) {
    row.words = `${row.name} ${row.peer} ${row.role} ${row.state}`.toLowerCase();
    names.set(row.peer, row.name);
  }
}

function choose(view) {
  const wanted = byId("search-text").value.trim().toLowerCase();
  // The latest start is the shortest uptime.
  const sign = view.down === (view.key === "started_at") ? 1 : -1;
  const value = (row) => (view.key === "spans" ? 4096 * (row.spans[0]?.[0] ?? 0) + (row.spans.at(-1)?.[1] ?? 0) : row[view.key]);
  view.rows = view.all.filter((row) => row.words.includes(wanted));
  view.rows.sort((first, second) => {
    const [a, b] = [value(first), value(second)];
    if (a === b) return first.peer < second.peer ? -1 : 1;
    if (a === null || b === null) return a === null ? 1 : -1; // Missing values come last in both directions.
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  });
  const found = view.rows.length;
  setText(byId("found"), plural(found, "peer", "peers") + (found < view.all.length ? ` of ${view.all.length}` : ""));
  setText(byId("no-peers"), view.all.length ? "No peer matches: try another word." : "No peer is here now.");
  show(byId("no-peers"), found === 0);
  show(byId("peer-table"), found > 0);
  show(byId("paging"), false);
}

function firstRow({ height, rows }) {
  const top = Math.floor(byId("peer-scroll").scrollTop / height) - OVERSCAN;
  return Math.max(0, Math.min(top - (top % STRIDE), rows.length - 1));
}

function draw(view) {
  const { rows, drawn, spacers, keys } = view;
  const body = byId("peer-table").tBodies[0];
  const first = firstRow(view);
  const last = Math.min(rows.length, first + Math.ceil((0.7 * innerHeight) / view.height) + 2 * OVERSCAN);
  view.first = first;
  const wanted = rows.slice(first, last);
  const needed = new Set(wanted.map((row) => row.peer));
  for (const peer of drawn.keys()) if (!needed.has(peer)) drawn.delete(peer);
  const elements = wanted.map((row, index) => {
    if (!drawn.has(row.peer)) drawn.set(row.peer, emptyRow(keys, row.peer));
    const element = drawn.get(row.peer);
    element.setAttribute("aria-rowindex", first + index + 2);
    fill(element, keys, row, view.at);
    return element;
  });
  byId("peer-table").setAttribute("aria-rowcount", rows.length + 1);
  spacers[0].hidden = first === 0;
  spacers[1].hidden = last === rows.length;
  spacers[0].style.height = `${first * view.height}px`;
  spacers[1].style.height = `${(rows.length - last) * view.height}px`;
  place(body, [spacers[0], ...elements, spacers[1]]);
}

// Columns only grow, so that they do not jump while rows change.
function measure(view) {
  const cells = [...byId("peer-table").tHead.rows[0].cells];
  const widths = cells.map((cell) => cell.offsetWidth);
  const [row] = view.drawn.values();
  view.height = row?.offsetHeight || view.height;
  cells.forEach((cell, index) => {
    if (widths[index]) cell.style.minWidth = `${widths[index]}px`;
  });
}

// Reorders children with few moves, and restores the focus if a move lost it.
function place(body, children) {
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  const wanted = new Set(children);
  for (const child of [...body.children]) if (!wanted.has(child)) child.remove();
  children.forEach((child, index) => {
    if (body.children[index] !== child) body.insertBefore(child, body.children[index] ?? null);
  });
  if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
}

function emptyRow(keys, peer) {
  const link = el("a", { class: "name", href: `/peers/${encodeURIComponent(peer)}` });
  return el("tr", {}, ...keys.map((key) => (
    key === "name" ? el("th", { scope: "row" }, link)
    : key === "peer" ? el("td", {}, el("code", { title: peer }))
    : el("td", { class: NUMBERS.has(key) && "num" })
  )));
}

function fill(element, keys, row, now) {
  keys.forEach((key, index) => {
    const cell = element.cells[index];
    const target = cell.firstElementChild ?? cell;
    setText(target, CELLS[key] ? CELLS[key](row, now) : row[key]);
    if (key === "name") target.title = row.name;
    if (key === "state") cell.className = row.agrees === false ? "bad" : "";
  });
}

function spacer(columns) {
  return el("tr", { class: "spacer", "aria-hidden": "true" }, el("td", { colspan: columns }));
}

function makeSortable(table, view, arrange) {
  const cells = [...table.tHead.rows[0].cells];
  for (const cell of cells) {
    const button = el("button", { type: "button" }, cell.textContent);
    button.addEventListener("click", () => {
      view.down = view.key === cell.dataset.key ? !view.down : NUMBERS.has(cell.dataset.key);
      view.key = cell.dataset.key;
      for (const other of cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
      byId("peer-scroll").scrollTop = 0;
      arrange();
    });
    cell.replaceChildren(button);
    if (cell.dataset.key === view.key) cell.setAttribute("aria-sort", "ascending");
  }
}
