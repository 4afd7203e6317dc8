// Series over an hour, a day or a week, refreshed while the page is visible; plot.js draws them.

import { byId, el, fetchJson, setText, show } from "./dom.js";
import { bytes, count, duration, latency } from "./formats.js";
import { makePlot } from "./plot.js";

const loss = (value) => value.toFixed(3);
const number = (value) => String(Math.round(value * 100) / 100);
const perSecond = (value) => `${bytes(value)}/s`;
const CHARTS = [
  { title: "Loss", unit: loss, lines: [["loss", "loss", "--accent"]] },
  { title: "Tokens per second", unit: count, fromZero: true, least: 10, lines: [["tokens_per_second", "tokens/s", "--accent"]] },
  {
    title: "Peers", unit: (value) => String(Math.round(value)), fromZero: true, whole: true, least: 2,
    lines: [["peers", "all", "--idle"], ["training", "training", "--accent"]],
  },
  {
    title: "Time per round", unit: duration, fromZero: true, stacked: true,
    lines: [
      ["compute_seconds", "training", "--compute"], ["matchmaking_seconds", "finding a group", "--matchmaking"],
      ["transfer_seconds", "transfer", "--transfer"],
    ],
  },
  {
    title: "Rounds with a broken attempt", unit: number, fromZero: true,
    bars: true, whole: true, least: 2,
    lines: [["aborted", "rounds", "--bad"]],
  },
  {
    title: "Traffic", unit: perSecond, fromZero: true, least: 1000,
    lines: [["sent_per_second", "sent", "--accent"], ["received_per_second", "received", "--matchmaking", [4, 3]]],
  },
];
// Charts of serving. Percentiles of a step come from the counts of all peers in it.
const percentiles = (kind) => [
  [`${kind}_p50`, "half within", "--accent"], [`${kind}_p95`, "95 %", "--matchmaking", [4, 3]],
  [`${kind}_p99`, "99 %", "--bad", [2, 3]],
];
const SERVING = [
  {
    title: "Served tokens per second", unit: count, fromZero: true, least: 10,
    lines: [
      ["served_tokens_per_second", "generated", "--accent"],
      ["served_prompt_tokens_per_second", "prompts", "--matchmaking", [4, 3]],
    ],
  },
  { title: "Time to the first token", unit: latency, fromZero: true, least: 0.001, lines: percentiles("first_token_seconds") },
  { title: "Time per further token", unit: latency, fromZero: true, least: 0.001, lines: percentiles("token_seconds") },
];
const REFRESH_MILLISECONDS = { hour: 10_000, day: 60_000, week: 300_000 };
const SECONDS = { hour: 3600, day: 86400, week: 7 * 86400 };

export function startCharts() {
  const view = { window: "hour", charts: CHARTS.map(frame), serving: SERVING.map(frame), timer: 0, asked: 0 };
  byId("chart-grid").append(...view.charts.map(({ figure }) => figure));
  byId("serving-grid").append(...view.serving.map(({ figure }) => figure));
  show(byId("windows"), true);
  const buttons = [...byId("windows").querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      view.window = button.dataset.window;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      refresh(view);
    });
  }
  const redraw = () => view.data && draw(view);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    redraw();
  }).observe(byId("chart-grid"));
  document.addEventListener("visibilitychange", () => document.hidden || refresh(view));
  refresh(view);
}

function frame(chart) {
  const plot = el("div", { class: "plot", role: "img" });
  const values = chart.lines.map(([, label, colour]) => {
    const value = el("b", {}, "–");
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = `var(${colour})`;
    return { value, key: el("span", {}, swatch, `${label} `, value) };
  });
  const figure = el(
    "div", { class: "chart" }, el("h3", {}, chart.title), plot, el("p", { class: "key" }, ...values.map(({ key }) => key)),
  );
  return { ...chart, figure, plot, values, made: null };
}

async function refresh(view) {
  clearTimeout(view.timer);
  const asked = ++view.asked;
  const since = Math.floor(Date.now() / 1000 - SECONDS[view.window]);
  try {
    if (!document.hidden) {
      const [data, { events }, { rounds }] = await Promise.all([
        fetchJson(`/api/v1/series?window=${view.window}`), fetchJson(`/api/v1/events?limit=300&since=${since}`),
        fetchJson("/api/v1/rounds?limit=500"),
      ]);
      if (asked !== view.asked) return; // The user chose another window meanwhile.
      view.data = { ...data, events, rounds: rounds.filter(({ at, committed }) => committed && at >= since) };
      draw(view);
    }
  } catch {
    setText(byId("charts-state"), "The numbers for these charts cannot be had right now; trying again.");
    show(byId("charts-state"), true);
  }
  if (asked === view.asked) view.timer = setTimeout(() => refresh(view), REFRESH_MILLISECONDS[view.window]);
}

function draw({ data, charts, serving, window: span }) {
  const enough = data.at.length > 1 && data.series.peers.some((peers) => peers > 0);
  setText(byId("charts-state"), enough ? "" : "Charts appear once this monitor has watched peers for half a minute.");
  show(byId("charts-state"), !enough);
  show(byId("chart-grid"), enough);
  show(byId("chart-key"), enough);
  const isServing = serving.some(({ lines }) => lines.some(([name]) => data.series[name].some((value) => value !== null)));
  show(byId("serving-grid"), enough && isServing);
  if (!enough) return;
  for (const chart of isServing ? [...charts, ...serving] : charts) {
    chart.made?.destroy();
    const columns = chart.lines.map(([name]) => data.series[name]);
    chart.made = makePlot(chart, data, columns, (index) => showValues(chart, columns, index));
    showValues(chart, columns, null);
    chart.plot.setAttribute("aria-label", summary(chart, columns, span));
  }
}

// The values under the cursor, else the newest.
function showValues({ values, unit }, columns, index) {
  columns.forEach((column, line) => {
    const value = index === null ? column.findLast((each) => each !== null) : column[index];
    setText(values[line].value, value === null || value === undefined ? "–" : unit(value));
  });
}

function summary({ title, lines, unit }, columns, span) {
  const parts = lines.map(([, label], line) => {
    const known = columns[line].filter((value) => value !== null);
    if (known.length === 0) return `${label}: nothing seen`;
    const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
    return `${label}: now ${unit(known.at(-1))}, from ${unit(low)} to ${unit(high)}`;
  });
  return `${title} over the last ${span}. ${parts.join("; ")}.`;
}
