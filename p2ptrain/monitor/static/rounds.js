// The last rounds: durations by phase, members, absentees and reasons.

import { byId, el, peerLink, setText, show, svg } from "./dom.js";
import { ago, count, duration, iso, orDash, plural, utc } from "./formats.js";

const rowsByRound = new Map(); // round -> {key, row}; unchanged rows and their open details stay.

export function showRounds(rounds, now) {
  show(byId("no-rounds"), rounds.length === 0);
  show(byId("round-table"), rounds.length > 0);
  const most = Math.max(...rounds.map((view) => view.compute_seconds + view.seconds), 0);
  const rows = rounds.map((view) => {
    const key = JSON.stringify([view, most]);
    let known = rowsByRound.get(view.round);
    if (!known || known.key !== key) {
      known = { key, row: roundRow(view, most) };
      rowsByRound.set(view.round, known);
    }
    setText(known.row.querySelector("time"), ago(now, view.at));
    return known.row;
  });
  for (const round of rowsByRound.keys()) {
    if (!rounds.some((view) => view.round === round)) rowsByRound.delete(round);
  }
  const body = byId("round-table").tBodies[0];
  const current = [...body.children];
  if (rows.length !== current.length || rows.some((row, index) => row !== current[index])) body.replaceChildren(...rows);
}

function roundRow(view, most) {
  const levels = view.levels > 1 ? el("small", { class: "muted" }, ` in ${view.levels} levels`) : null;
  return el(
    "tr", {},
    el("th", { scope: "row", class: "num" }, view.round),
    el("td", {}, el("time", { datetime: iso(view.at), title: utc(view.at) })),
    el("td", {}, outcome(view)),
    el("td", { class: "wide" }, bar(view, most), spent(view)),
    el("td", { class: "num" }, `${view.contributors} of ${view.members}`, levels),
    el("td", { class: "num" }, orDash(view.tokens, count)),
    el("td", {}, agreement(view)),
    el("td", {}, absences(view)),
  );
}

function outcome(view) {
  return el("span", {}, outcomeWord(view), brokenTries(view));
}

function brokenTries({ committed, broken_tries, broken_peers, broken_reason }) {
  if (!committed || broken_tries === 0) return null;
  const words = ` after ${plural(broken_tries, "broken try", "broken tries")}`;
  const title = `${plural(broken_peers, "peer", "peers")}: ${broken_reason || "no reason given"}`;
  return el("small", { class: "warn tries", title }, words);
}

function outcomeWord({ committed, verified }) {
  if (!committed) return el("span", { class: "bad" }, "aborted");
  if (!verified) return el("span", { title: "As peers report" }, "committed");
  return el("span", { class: "good", title: "This monitor holds a certificate signed by a majority" }, "certified");
}

function agreement({ agrees, digests }) {
  if (agrees === null) return el("span", { class: "muted" }, "not compared");
  return agrees ? el("span", { class: "good" }, "equal") : el("span", { class: "bad" }, `${digests.length} differ`);
}

function bar(view, most) {
  const rest = Math.max(0, view.seconds - view.matchmaking_seconds - view.transfer_seconds);
  const parts = [
    ["compute", view.compute_seconds], ["matchmaking", view.matchmaking_seconds],
    ["transfer", view.transfer_seconds], ["rest", rest],
  ];
  let x = 0;
  const drawn = parts.map(([name, seconds]) => {
    const width = most ? (100 * seconds) / most : 0;
    x += width;
    return svg("rect", { class: name, x: x - width, y: 0, width, height: 1 });
  });
  const frame = { class: "spent", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" };
  return svg("svg", frame, ...drawn);
}

function spent(view) {
  const transfer = view.seconds - view.matchmaking_seconds;
  const parts = [view.compute_seconds, view.matchmaking_seconds, transfer].map(duration).join(" + ");
  const total = `${duration(view.compute_seconds + view.seconds)} `;
  return el("span", { class: "spent-text" }, total, el("span", { class: "muted" }, `= ${parts}`));
}

function absences({ absences }) {
  if (absences.length === 0) return el("span", { class: "muted" }, "nobody");
  const first = absences.slice(0, 2).map(({ name, kind }) => `${name} ${kind}`).join(", ");
  const number = `${absences.length}${absences.length >= 20 ? "+" : ""}`;
  const lines = absences.map(({ peer, name, kind, reason }) =>
    el(
      "li", {}, peerLink(peer, name), " ", el("b", { class: "kind" }, kind), " ", el("span", { class: "muted" }, reason),
    ));
  const summary = el("summary", {}, `${number}: ${first}${absences.length > 2 ? " …" : ""}`);
  return el("details", { class: "absences" }, summary, el("ul", {}, ...lines));
}
