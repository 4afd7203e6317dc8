// Health, alerts, and the main numbers.

import { byId, el, setText, show } from "./dom.js";
import { bytes, count, duration, interval, orDash } from "./formats.js";

const WORDS = { healthy: "Healthy", degraded: "Degraded", stopped: "Stopped", empty: "Empty" };
let shownAlerts = "";

export function showHeadline({ headline, alerts }) {
  byId("headline").className = `headline ${headline.health}`;
  setText(byId("health-word"), WORDS[headline.health]);
  setText(byId("summary"), headline.summary);
  show(byId("welcome"), headline.health === "empty");
  document.title = document.title.replace(/^[^·]*/, `${WORDS[headline.health]} `);
  setText(byId("n-loss"), orDash(headline.loss, (loss) => loss.toFixed(4)));
  show(byId("evaluation"), headline.evaluation !== null);
  if (headline.evaluation) {
    const { metric, mean, error } = headline.evaluation;
    setText(byId("n-evaluation"), mean.toFixed(3));
    setText(byId("n-metric"), metric);
    setText(byId("n-interval"), interval(error));
  }
  setText(byId("n-tokens"), orDash(headline.tokens_per_second, count));
  setText(byId("n-peers"), headline.peers);
  setText(byId("n-training"), headline.training);
  setText(byId("n-unproven"), headline.unproven);
  show(byId("unproven"), headline.unproven > 0);
  setText(byId("n-round"), headline.round);
  setText(byId("n-seconds"), orDash(headline.round_seconds, duration));
  setText(byId("n-committed"), headline.committed);
  setText(byId("n-aborted"), headline.aborted);
  setText(byId("n-bytes"), orDash(headline.bytes_per_token, bytes));
  showAlerts(alerts);
}

function showAlerts(alerts) {
  const key = JSON.stringify(alerts);
  if (key === shownAlerts) return;
  shownAlerts = key;
  const lines = alerts.map(({ severity, text }) => el("li", { class: severity }, el("b", {}, severity), ` ${text}`));
  byId("alerts").replaceChildren(...(lines.length ? lines : [el("li", { class: "none" }, "No alerts.")]));
}
