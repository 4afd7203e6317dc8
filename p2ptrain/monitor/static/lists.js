// Contributions and events, refreshed twice a minute.

import { byId, el, fetchJson, peerLink, show } from "./dom.js";
import { count, duration, iso, utc } from "./formats.js";

const EVERY_MILLISECONDS = 30_000;

export function startLists() {
  setInterval(async () => {
    if (document.hidden) return;
    try {
      const [{ leaders }, { events }] = await Promise.all([
        fetchJson("/api/v1/leaders?limit=20"), fetchJson("/api/v1/events?limit=30"),
      ]);
      showLeaders(leaders);
      showEvents(events);
    } catch {
      // The connection status at the top reports it.
    }
  }, EVERY_MILLISECONDS);
}

function showLeaders(leaders) {
  show(byId("no-leaders"), leaders.length === 0);
  show(byId("leader-table"), leaders.length > 0);
  byId("leader-table").tBodies[0].replaceChildren(...leaders.map((each, index) => el(
    "tr", {},
    el("td", { class: "num" }, index + 1),
    el("th", { scope: "row" }, peerLink(each.peer, each.name)),
    el("td", { class: "num" }, count(each.tokens)),
    el("td", { class: "num" }, each.rounds),
    el("td", { class: "num" }, duration(each.seconds)),
  )));
}

function showEvents(events) {
  show(byId("no-events"), events.length === 0);
  byId("event-list").replaceChildren(...events.map(({ at, kind, text }) => el(
    "li", { class: kind }, el("time", { datetime: iso(at) }, utc(at)), " ",
    kind === "alert" ? el("b", {}, "alert ") : null, el("span", {}, text),
  )));
}
