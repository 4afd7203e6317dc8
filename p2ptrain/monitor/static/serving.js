// Current numbers of serving; charts.js draws their charts.

import { byId, setText, show } from "./dom.js";
import { count, latency, orDash } from "./formats.js";

export function showServing(serving) {
  show(byId("serving-state"), serving.peers === 0);
  show(byId("serving-now"), serving.peers > 0);
  setText(byId("s-peers"), serving.peers);
  setText(byId("s-sessions"), serving.sessions);
  setText(byId("s-tokens"), orDash(serving.tokens_per_second, count));
  setText(byId("s-requests"), count(serving.totals.requests));
  setText(byId("s-failed"), count(serving.totals.failed_requests));
  for (const [name, recent] of [["first", serving.first_token], ["token", serving.token]]) {
    for (const share of ["p50", "p95"]) setText(byId(`s-${name}-${share}`), orDash(recent[share], latency));
  }
}
