// Refreshes the numbers of a peer's page.

import { byId, setText } from "./dom.js";
import { bytes, count, evaluation, latency, orDash, privacy, utc } from "./formats.js";

const EVERY_MILLISECONDS = 5_000;
const FORMATS = {
  "record.loss": (value) => orDash(value, (loss) => loss.toFixed(4)),
  "record.evaluation": (value) => orDash(value, evaluation),
  "record.privacy": (value) => orDash(value, privacy),
  "record.tokens_per_second": count,
  "record.serving.totals.requests": count, "record.serving.totals.failed_requests": count,
  "record.serving.totals.generated_tokens": count, "record.serving.totals.prompt_tokens": count,
  "rates.sent_per_second": bytes, "rates.received_per_second": bytes,
  "rates.served_per_second": (value) => orDash(value, count),
  first_token: percentiles, token: percentiles,
};
const place = byId("connection");
const path = `/api/v1/peers/${encodeURIComponent(byId("main").dataset.peer)}`;

function percentiles({ p50, p95, p99 }) {
  if (p50 === null) return "not measured yet";
  return `${latency(p50)}, 95 % within ${latency(p95)}, 99 % within ${latency(p99)}`;
}

async function refresh() {
  try {
    if (!document.hidden) {
      const answer = await fetch(path);
      if (answer.status === 404) {
        place.className = "connection lost";
        setText(place, "It has left the swarm: what is shown is old");
      } else if (!answer.ok) {
        throw new Error(`${path} answers ${answer.status}`);
      } else {
        showFacts(await answer.json());
      }
    }
  } catch {
    place.className = "connection lost";
    setText(place, "Connection lost: what is shown is old; trying again");
  }
  setTimeout(refresh, EVERY_MILLISECONDS);
}

function showFacts(facts) {
  for (const element of document.querySelectorAll("[data-fact]")) {
    const name = element.dataset.fact;
    const value = name.split(".").reduce((within, part) => within?.[part], facts);
    if (value === undefined) continue; // The peer stopped serving: keep the last numbers.
    setText(element, FORMATS[name] ? FORMATS[name](value) : value);
  }
  place.className = "connection live";
  setText(place, `Seen ${utc(facts.last_seen)}`);
}

setTimeout(refresh, EVERY_MILLISECONDS);
