// One small curve per site of its held-out metric over rounds, and the pooled one, each with its 95 % interval.

import { byId, el, fetchJson, peerLink, show, svg } from "./dom.js";
import { evaluation } from "./formats.js";

const WIDTH = 240;
const HEIGHT = 64;
const CONFIDENCE = 1.96; // standard errors
const REFRESH_MILLISECONDS = 10_000;

export function startSites() {
  let asked = 0;
  return async (headline) => {
    if (headline.evaluation === null || Date.now() - asked < REFRESH_MILLISECONDS) return;
    asked = Date.now();
    const { sites } = await fetchJson("/api/v1/sites");
    for (const id of ["sites", "to-sites"]) show(byId(id), sites.length > 0);
    const newest = Math.max(...sites.map(({ points }) => points.at(-1).round));
    byId("site-grid").replaceChildren(...sites.map((site) => figure(site, newest)));
  };
}

function figure({ peer, name, metric, points }, newest) {
  const last = points.at(-1);
  const words = evaluation({ metric, ...last });
  const title = el("h3", {}, peer ? peerLink(peer, name) : name);
  const rounds = points.length > 1 ? `rounds ${points[0].round} to ${last.round}` : `round ${last.round}`;
  const [low, high] = scale(points);
  const when = peer && last.round === newest ? "" : `, ${rounds}`;
  return el(
    "div", { class: peer ? "site" : "site pooled" }, title,
    curve(points, low, high, `${name}: ${words}, ${rounds}`),
    el("p", {}, `${words}${when}`),
    el("p", {}, `scale ${low.toFixed(3)} to ${high.toFixed(3)}`),
  );
}

const half = ({ error }) => CONFIDENCE * (error ?? 0);

function scale(points) {
  return [
    Math.min(...points.map((point) => point.mean - half(point))),
    Math.max(...points.map((point) => point.mean + half(point))),
  ];
}

function curve(points, low, high, label) {
  const [first, last] = [points[0].round, points.at(-1).round];
  const x = ({ round }) => (last > first ? (WIDTH * (round - first)) / (last - first) : WIDTH / 2).toFixed(1);
  const y = (value) => (high > low ? 2 + ((HEIGHT - 4) * (high - value)) / (high - low) : HEIGHT / 2).toFixed(1);
  const edge = (sign) => points.map((point) => `${x(point)},${y(point.mean + sign * half(point))}`);
  const line = points.length > 1 ? points : [points[0], points[0]]; // A dot, by its round ends.
  return svg(
    "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("polygon", { points: [...edge(1), ...edge(-1).reverse()].join(" ") }),
    svg("polyline", { points: line.map((point) => `${x(point)},${y(point.mean)}`).join(" ") }),
  );
}
