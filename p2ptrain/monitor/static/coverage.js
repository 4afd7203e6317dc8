// The coverage table: a column per stage, a row per peer, a cell per block.

import { byId, el, peerLink, setText, show, svg } from "./dom.js";
import { count } from "./formats.js";

let shownRows = "";

export function showCoverage({ stages, states, rows, others }) {
  byId("stages").replaceChildren(...stages.map((stage) => stageBox(stage, stages.length > 1)));
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

function stageBox(stage, isCut) {
  const [first, end] = stage.blocks;
  const blocks = end === first ? "" : end - first === 1 ? `block ${first}` : `blocks ${first}–${end - 1}`;
  const isSlowest = stage.is_bottleneck && stage.hosts > 0; // A stage without hosts has a worse remark.
  const waiting = isCut ? `, ${stage.waiting} waiting` : "";
  const syncing = stage.syncing ? `, ${stage.syncing} on the way` : "";
  return el(
    "li", { class: ["stage uncovered", "stage alone"][stage.hosts] ?? "stage" },
    el(
      "h3", {}, `Stage ${stage.number} `, el("small", {}, blocks), isSlowest ? " " : null,
      isSlowest ? el("b", { class: "tag" }, "bottleneck") : null,
    ),
    el(
      "p", {}, el("b", {}, stage.hosts), ` ${stage.hosts === 1 ? "replica" : "replicas"}${syncing}, `,
      `${count(stage.tokens_per_second)} tokens/s${waiting}`,
    ),
    stage.load === null ? null : loadLine(stage),
    el("p", { class: stage.risk ? "bad" : "muted" }, stage.risk || "Losing any one of them breaks nothing."),
  );
}

function loadLine({ load, is_bottleneck: isSlowest }) {
  const share = (100 * load).toFixed(0);
  return el(
    "p", { class: "load" },
    svg(
      "svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "hole", width: 100, height: 1 }),
      svg("rect", { class: isSlowest ? "full" : "held", width: (100 * load).toFixed(1), height: 1 }),
    ),
    ` load ${share} %${isSlowest ? ": it sets the pace" : " of the slowest stage's"}`,
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
