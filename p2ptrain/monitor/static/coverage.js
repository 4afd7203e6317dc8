// Stages across, peers down, a cell per block.

import { byId, el, peerLink, setText, show, svg } from "./dom.js";
import { count, plural } from "./formats.js";

let shownRows = "";

export function showCoverage({ stages, states, rows, others }) {
  byId("stages").replaceChildren(...stages.map(stageBox));
  byId("states").replaceChildren(
    ...states.map(([state, number]) => el("li", { class: state }, el("b", {}, number), ` ${state}`)),
  );
  show(byId("no-rows"), rows.length === 0);
  show(byId("blocks"), rows.length > 0);
  show(byId("other-rows"), others > 0);
  setText(byId("other-rows").querySelector("span"), others);
  const key = JSON.stringify(rows);
  if (key === shownRows) return;
  shownRows = key;
  byId("blocks").tBodies[0].replaceChildren(...rows.map(blockRow));
}

function stageBox(stage) {
  const [first, end] = stage.blocks;
  const syncing = stage.syncing ? `, ${stage.syncing} on the way` : "";
  return el(
    "li", { class: stage.hosts ? "stage" : "stage uncovered" },
    el(
      "h3", {}, `Stage ${stage.number} `, el("small", {}, `blocks ${first}–${end - 1}`),
      stage.is_bottleneck ? el("b", { class: "tag" }, "bottleneck") : null,
    ),
    el("p", {}, `${plural(stage.hosts, "replica", "replicas")}${syncing}, ${count(stage.tokens_per_second)} tokens/s`),
    el("p", { class: stage.risk ? "bad" : "muted" }, stage.risk || "Losing any one of them breaks nothing."),
  );
}

function blockRow({ peer, name, state, cells }) {
  const drawn = cells.map((held, index) =>
    svg("rect", { class: held ? "held" : "hole", x: index + 0.06, y: 0, width: 0.88, height: 1 }));
  const picture = svg(
    "svg",
    { class: `cells ${state}`, viewBox: `0 0 ${cells.length} 1`, preserveAspectRatio: "none", "aria-hidden": "true" },
    ...drawn,
  );
  return el(
    "tr", {}, el("th", { scope: "row" }, peerLink(peer, name)), el("td", { class: "wide" }, picture), el("td", {}, state),
  );
}
