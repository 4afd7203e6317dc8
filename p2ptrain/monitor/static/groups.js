// Groups of the last certified round; fetched after each new certificate.

import { byId, el, fetchJson, peerLink, show, svg } from "./dom.js";
import { plural, shortId } from "./formats.js";
import { nameOf } from "./peers.js";

export function startGroups() {
  let shown = null;
  return async (rounds) => {
    const newest = rounds.find((view) => view.verified)?.round ?? null;
    if (newest === null || newest === shown) return;
    shown = newest;
    try {
      draw((await fetchJson("/api/v1/groups")).groups);
    } catch {
      shown = null; // The next snapshot retries.
    }
  };
}

function draw(groups) {
  const place = byId("group-grid");
  if (place.contains(document.activeElement) || place.querySelector("details[open]")) return; // The user reads it.
  const total = groups.reduce((sum, { members }) => sum + members.length, 0);
  const named = total <= Number(place.dataset.named);
  show(byId("no-groups"), groups.length === 0);
  place.replaceChildren(...groups.map((group) => box(group, named)));
}

function box({ cell, members }, named) {
  const missing = ["late", "absent"]
    .map((part) => [members.filter((member) => member[1] === part).length, part])
    .filter(([number]) => number > 0)
    .map(([number, part]) => `, ${number} ${part}`);
  const frame = {
    role: "img", "aria-label": `Group ${cell}: ${members.length} members`,
    viewBox: `0 0 80 ${Math.ceil(members.length / 8) * 10}`,
  };
  return el(
    "li", {},
    el("h3", {}, `Group ${cell}`),
    el("p", { class: "muted" }, `${plural(members.length, "peer", "peers")}${missing.join("")}`),
    svg("svg", frame, ...members.map((member, index) => mark(member, index, named))),
    named ? list(members) : null,
  );
}

function mark([peer, part], index, named) {
  const x = (index % 8) * 10 + 5;
  const y = Math.floor(index / 8) * 10 + 5;
  const shape = part === "delegate" ? svg("path", { d: `M${x} ${y - 4}l4 4l-4 4l-4-4z` })
    : part === "absent" ? svg("path", { d: `M${x - 3} ${y - 3}l6 6m0-6l-6 6` })
    : svg("circle", { cx: x, cy: y, r: 3 });
  const title = named ? svg("title", {}, `${nameOf(peer) ?? shortId(peer)}: ${part}`) : null;
  return svg("g", { class: part }, title, shape);
}

function list(members) {
  const lines = members.map(([peer, part]) => {
    const name = nameOf(peer);
    return el("li", {}, name ? peerLink(peer, name) : shortId(peer), " ", el("span", { class: "muted" }, part));
  });
  return el("details", {}, el("summary", {}, "Members"), el("ul", {}, ...lines));
}
